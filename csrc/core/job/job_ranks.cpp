#include "core/job/job_ranks.h"

#include <numeric>
#include <utility>

namespace pyruntime {

JobRanks& JobRanks::instance() {
  static auto* instance = new JobRanks();  // never destroyed: threads may name a rank while the process ends
  return *instance;
}

void JobRanks::set_finder(Finder finder) {
  const std::lock_guard<std::mutex> lock(mutex_);
  finder_ = std::move(finder);
}

void JobRanks::enter(const std::string& process_group, std::vector<int> ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_[process_group] = std::move(ranks);
}

void JobRanks::leave(const std::string& process_group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_.erase(process_group);
}

std::vector<int> JobRanks::of(const std::string& process_group, int size) const {
  Finder finder;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entered_.find(process_group);
    if (found != entered_.end()) return found->second;
    finder = finder_;
  }
  // Not under the lock: the finder may want the GIL, whose holder may want the lock.
  if (finder) return finder(process_group, size);
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void JobRanks::set_coordinates(std::vector<std::string> coordinates) {
  const std::lock_guard<std::mutex> lock(mutex_);
  coordinates_ = std::move(coordinates);
}

void JobRanks::learn(int rank, const std::string& host, pid_t pid) {
  const std::lock_guard<std::mutex> lock(mutex_);
  processes_[rank] = {host, pid};
}

void JobRanks::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  coordinates_.clear();
  processes_.clear();
}

std::string JobRanks::name(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string where = coordinate(rank);
  return "rank " + std::to_string(rank) + (where.empty() ? "" : " (" + where + ")");
}

std::string JobRanks::name_and_place(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string where = coordinate(rank);
  const auto process = processes_.find(rank);
  if (process != processes_.end()) {
    where += (where.empty() ? "process " : "; process ") + std::to_string(process->second.pid) + " on " +
             process->second.host;
  }
  return "rank " + std::to_string(rank) + (where.empty() ? "" : " (" + where + ")");
}

std::string JobRanks::coordinate(int rank) const {
  return rank >= 0 && rank < static_cast<int>(coordinates_.size()) ? coordinates_[rank] : "";
}

}  // namespace pyruntime
