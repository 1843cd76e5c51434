#include "transport/workspace_group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/job/job_ranks.h"
#include "core/job/store.h"
#include "core/text.h"
#include "cpu/symmetric_memory.h"

namespace pyruntime {

// A part of the job's store for one workspace.
//
// torch's symmetric memory of CUDA exchanges its data under WHAT/NUMBER/RANK, where NUMBER counts the
// exchanges of the process, over all groups. Ranks in different groups have counted differently, and would
// wait for each other's keys forever; groups that share a store would read each other's keys. Here keys begin
// with the workspace's name, and NUMBER counts only its own exchanges.
class WorkspaceStore : public c10d::Store {
 public:
  WorkspaceStore(c10::intrusive_ptr<c10d::Store> store, std::string group, int rank,
                 std::vector<int> job_ranks)
      : store_(std::move(store)), group_(std::move(group)), rank_(rank), job_ranks_(std::move(job_ranks)) {}

  using c10d::Store::compareSet;
  using c10d::Store::set;

  // Limits every wait from now on, whatever torch passes: torch's limit is minutes, and nothing else ends it.
  void set_deadline_seconds(double seconds) { deadline_seconds_ = seconds; }

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<WorkspaceStore>(store_->clone(), group_, rank_, job_ranks_);
    copy->deadline_seconds_ = deadline_seconds_;
    copy->exchange_ = exchange_;
    copy->exchanges_ = exchanges_;
    return copy;
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->set(own(key), value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return store_->compareSet(own(key), expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    await(key);
    return store_->get(own(key));
  }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(own(key), value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(own(key)); }
  bool check(const std::vector<std::string>& keys) override {
    std::vector<std::string> owned;
    for (const std::string& key : keys) owned.push_back(own(key));
    return store_->check(owned);
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) await(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& /*timeout*/) override {
    wait(keys);
  }

 private:
  std::string own(const std::string& key) {
    const std::string prefix = "pyruntime/workspace/" + group_ + "/";
    const size_t slash = key.find('/');
    if (slash == std::string::npos) return prefix + key;
    const size_t end = std::min(key.find('/', slash + 1), key.size());
    const std::string number = key.substr(slash + 1, end - slash - 1);
    if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return prefix + key;
    // A rank ends one exchange before it begins the next.
    if (std::exchange(exchange_, number) != number) ++exchanges_;
    return prefix + key.substr(0, slash + 1) + std::to_string(exchanges_) + key.substr(end);
  }

  std::string name_of(int rank) const { return JobRanks::instance().name_and_place(job_ranks_.at(rank)); }

  // The rank in WHAT/NUMBER/RANK.
  std::string who_tells(const std::string& key) const {
    const std::string rank = key.substr(key.rfind('/') + 1);
    const bool is_rank = !rank.empty() && rank.size() < 6 &&
                         rank.find_first_not_of("0123456789") == std::string::npos &&
                         std::stoul(rank) < job_ranks_.size();
    return is_rank ? name_of(std::stoi(rank)) : "a rank";
  }

  void await(const std::string& key) {
    if (await_key(*store_, own(key), deadline_seconds_)) return;
    raise_comm_error(CommErrorKind::kTimeout,
                     "rendezvous on group '" + group_ + "', " + name_of(rank_) + ": " + who_tells(key) +
                         " did not come within " + seconds_text(deadline_seconds_) + " ('" + key +
                         "' is not in the store); all ranks must allocate and rendezvous in the same order.");
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string group_;
  int rank_;
  std::vector<int> job_ranks_;
  double deadline_seconds_ = kDefaultDeadlineSeconds;
  std::string exchange_;  // torch's number of the latest exchange
  uint64_t exchanges_ = 0;
};

WorkspaceGroup::WorkspaceGroup(std::string name, int rank, std::vector<int> job_ranks,
                               c10::intrusive_ptr<c10d::Store> store)
    : name_(std::move(name)),
      store_(c10::make_intrusive<WorkspaceStore>(std::move(store), name_, rank, job_ranks)),
      process_group_(
          c10::make_intrusive<c10d::ProcessGroup>(store_, rank, static_cast<int>(job_ranks.size()))) {
  c10d::register_process_group(name_, process_group_);
  JobRanks::instance().enter(name_, std::move(job_ranks));
}

// Nothing is missing if destroy_process_group() has already forgotten all groups.
WorkspaceGroup::~WorkspaceGroup() {
  JobRanks::instance().leave(name_);
  c10d::unregister_process_group(name_);
}

c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> WorkspaceGroup::rendezvous(
    const at::Tensor& memory, double seconds,
    c10d::symmetric_memory::SymmetricMemoryAllocator* allocator) const {
  const cpu::ScopedSymmetricMemoryDeadline bounded(seconds);
  store_->set_deadline_seconds(seconds);
  return allocator != nullptr ? allocator->rendezvous(memory.data_ptr(), name_)
                              : c10d::symmetric_memory::rendezvous(memory, name_);
}

}  // namespace pyruntime
