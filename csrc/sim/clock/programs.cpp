#include "sim/clock/programs.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace sim {

namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Programs& Programs::instance() {
  static auto* programs = new Programs();  // never destroyed: threads may outlive static destructors
  return *programs;
}

void Programs::begin(int own, std::vector<int> of_rank, int gpus_per_host,
                     c10::intrusive_ptr<c10d::Store> board) {
  own_ = own;
  of_rank_ = std::move(of_rank);
  gpus_per_host_ = gpus_per_host;
  board_ = std::move(board);
}

void Programs::know(const std::string& group, std::vector<int> job_ranks) {
  const Lock lock(mutex_);
  groups_[group] = std::move(job_ranks);
}

const std::vector<int>& Programs::ranks_of(const std::string& group) {
  static const std::vector<int> kNone;
  const Lock lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? kNone : found->second;  // which stay where they are
}

bool Programs::are_several(const std::vector<int>& job_ranks) const {
  return std::any_of(job_ranks.begin(), job_ranks.end(), [&](int rank) { return of_rank(rank) != own_; });
}

void Programs::say(const std::string& key, const std::vector<double>& moments) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(moments.data());
  board_->set(key + "/" + std::to_string(own_),
              std::vector<uint8_t>(bytes, bytes + moments.size() * sizeof(double)));
}

std::vector<double> Programs::hear(const std::string& key, int program) {
  std::vector<uint8_t> bytes;
  try {
    bytes = board_->get(key + "/" + std::to_string(program));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "Program ", own_, " of the job waits for '", key, "' of program ", program,
                ", which has not said it: it has ended, or the two wait for each other. ", error.what());
  }
  std::vector<double> moments(bytes.size() / sizeof(double));
  std::memcpy(moments.data(), bytes.data(), moments.size() * sizeof(double));
  return moments;
}

double Programs::meet(const std::string& group, const std::vector<int>& job_ranks, double moment) {
  std::set<int> others;
  for (const int rank : job_ranks) others.insert(of_rank(rank));
  others.erase(own_);
  if (others.empty()) return moment;
  int64_t number = 0;
  {
    const Lock lock(mutex_);
    number = meetings_[group]++;
  }
  const std::string key = group + "/meeting/" + std::to_string(number);
  say(key, {moment});
  for (const int each : others) moment = std::max(moment, hear(key, each).at(0));
  return moment;
}

}  // namespace sim
