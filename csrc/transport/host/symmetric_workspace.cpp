#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <unistd.h>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/host_process.h"
#include "core/job/peers.h"
#include "core/late_report.h"
#include "core/text.h"
#include "transport/host/host_workspace.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

using Number = std::atomic<uint64_t>;  // of an op: 1, 2, ... in the order in which all ranks begin them

// One slot of the control block, in its owner's memory; only the owner writes. Numbers only grow, so nothing
// is ever reset, and a late reader never takes an old flag for a new one.
struct alignas(64) SlotControl {
  Number begun;  // written after `descriptor`
  FlightDescriptor descriptor;
  int64_t bytes;
  pid_t pid;                    // the owner's; in slot 0 only
  alignas(64) Number finished;  // the owner has read all it wanted from the peers' slots
};

// A control block: kSlots SlotControls, then for every slot the `ready` numbers of its flags.
class ControlBlock {
 public:
  ControlBlock(void* base, int flags) : base_(static_cast<char*>(base)), flags_(flags) {}

  static int64_t bytes(int flags) {
    return kSlots * static_cast<int64_t>(sizeof(SlotControl) + round_up(flags) * sizeof(Number));
  }
  SlotControl& slot(int index) const { return reinterpret_cast<SlotControl*>(base_)[index]; }
  Number& ready(int index, int flag) const {
    auto* numbers = reinterpret_cast<Number*>(base_ + kSlots * sizeof(SlotControl));
    return numbers[index * round_up(flags_) + flag];
  }

 private:
  static int64_t round_up(int flags) { return (flags + 7) / 8 * 8; }  // whole cache lines per slot

  char* base_;
  int flags_;
};

struct Slot {
  at::Tensor memory;  // this rank's, symmetric
  c10::intrusive_ptr<symm::SymmetricMemory> handle;
  std::vector<void*> buffers;  // every rank's
  int64_t bytes = 0;
};

class SymmetricWorkspace : public HostWorkspace {
 public:
  SymmetricWorkspace(GroupContext& context, std::unique_ptr<WorkspaceGroup> group, std::vector<int> ranks,
                     int local_rank, int flags)
      : context_(context),
        group_(std::move(group)),
        ranks_(std::move(ranks)),
        local_rank_(local_rank),
        size_(static_cast<int>(ranks_.size())) {
    control_ = allocate(ControlBlock::bytes(flags));
    for (void* base : control_.buffers) blocks_.emplace_back(base, flags);
    own().slot(0).pid = getpid();
    control_.handle->barrier(/*channel=*/0, static_cast<size_t>(context.deadline_seconds * 1e3));
    for (int peer = 0; peer < size_; ++peer) peers_.emplace_back(blocks_[peer].slot(0).pid);
  }

  std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) override;
  int64_t bytes() const override {
    int64_t total = control_.bytes;
    for (const Slot& slot : slots_) total += slot.bytes;
    return total;
  }

 private:
  friend class SymmetricFlight;

  static int slot_of(uint64_t number) { return static_cast<int>(number % kSlots); }
  const ControlBlock& own() const { return blocks_[local_rank_]; }

  Slot allocate(int64_t bytes) {
    const ScopedWaitCheck peers_live([this] { check_all_peers(); });
    Slot slot;
    slot.memory = symm::empty_strided_p2p({bytes}, {1}, c10::kByte, c10::kCPU, std::nullopt, std::nullopt);
    slot.handle = group_->rendezvous(slot.memory, context_.deadline_seconds);
    slot.buffers = slot.handle->get_buffer_ptrs();
    slot.bytes = bytes;
    return slot;
  }

  // Called while this group's memory is being set up. Before the first op the peers are not known yet, and
  // only the deadline ends the wait.
  void check_all_peers() {
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_[peer].gone()) continue;
      lose(name_of(op_) + (" on group '" + context_.name + "', ") + context_.own_name() + " waiting for " +
           context_.name_of(ranks_[peer]) + " to make room");
    }
  }

  // All ranks reach the same flight with the same byte count, so all grow or none does. The peers'
  // descriptors are compared first: a rank that disagrees about the op would leave the others waiting in the
  // rendezvous.
  void grow(int slot, uint64_t number, const FlightDescriptor& descriptor, int64_t bytes) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != local_rank_) await_begun(peer, number, descriptor);
    }
    slots_[slot] = Slot();  // every peer has finished with it: see await_slot()
    slots_[slot] = allocate(power_of_two(std::max(bytes, kLeastSlotBytes)));
  }

  // A slot is free for op `previous` + kSlots when every rank has finished op `previous`.
  void await_slot(int slot, uint64_t previous, Op op) {
    check_slot_is_free(context_, own().slot(slot).finished.load(std::memory_order_relaxed) >= previous, op);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != local_rank_)
        await(blocks_[peer].slot(slot).finished, previous, previous, peer, op, "finish");
    }
  }

  // Waits until the peer has begun op `number`, and compares its op with this rank's.
  const FlightDescriptor& await_begun(int peer, uint64_t number, const FlightDescriptor& descriptor) {
    const SlotControl& theirs = blocks_[peer].slot(slot_of(number));
    await(theirs.begun, number, number, peer, descriptor.op, "begin");
    const FlightDescriptor& other = theirs.descriptor;
    if (!descriptor.agrees_with(other)) {
      fail(CommErrorKind::kDisagree, disagreement_text(context_, number, descriptor, ranks_[peer], other));
    }
    return other;
  }

  void await(const Number& number, uint64_t expected, uint64_t op_number, int peer, Op op,
             const std::string& what) {
    if (number.load(std::memory_order_acquire) >= expected) return;
    const Spending waiting(context_, Entered::kWait, name_of(op), ranks_[peer]);
    const auto site = [&] { return waiting_text(context_, op, op_number, ranks_[peer], what); };
    LateReport report(context_.deadline_seconds, site);
    const auto peer_lives = [&] {
      if (peers_[peer].gone()) lose(site());
      report.look();
    };
    // acquire: what the peer wrote before it published is seen by the reads that follow.
    const auto arrived = [&] { return number.load(std::memory_order_acquire) >= expected; };
    if (wait_until(arrived, context_.deadline_seconds, peer_lives)) return;
    await_better_word(context_.job_rank(ranks_[peer]));
    fail(CommErrorKind::kTimeout, site() + ": not within the deadline of " +
                                      seconds_text(context_.deadline_seconds) + " (expected " +
                                      std::to_string(expected) + ", seen " + std::to_string(number.load()) +
                                      "; the peer last began op " + std::to_string(last_begun(peer)) + ").");
  }

  uint64_t last_begun(int peer) const {
    uint64_t last = 0;
    for (int slot = 0; slot < kSlots; ++slot) last = std::max(last, blocks_[peer].slot(slot).begun.load());
    return last;
  }

  [[noreturn]] void lose(const std::string& site) {
    fail(CommErrorKind::kPeerLost, site + ": its process has ended.");
  }

  [[noreturn]] void fail(CommErrorKind kind, const std::string& message) {
    poison(message);
    raise_for_all(failure_of(context_, kind, message));
  }

  void poison(const std::string& failure) {
    if (failure_.empty()) failure_ = failure;
  }

  GroupContext& context_;
  std::unique_ptr<WorkspaceGroup> group_;
  std::vector<int> ranks_;  // numbers in the group, by rank on this host
  int local_rank_;
  int size_;
  Slot control_;
  std::vector<ControlBlock> blocks_;  // every rank's
  std::array<Slot, kSlots> slots_;
  std::vector<WatchedProcess> peers_;
  uint64_t last_number_ = 0;
  Op op_ = Op::kAllGather;  // the latest op
  std::string failure_;     // why this group cannot go on; empty while it can
};

class SymmetricFlight : public HostFlight {
 public:
  SymmetricFlight(SymmetricWorkspace& workspace, uint64_t number, const FlightDescriptor& descriptor)
      : workspace_(workspace),
        number_(number),
        slot_(SymmetricWorkspace::slot_of(number)),
        descriptor_(descriptor) {}
  ~SymmetricFlight() override {
    // Left by an exception: the peers may wait for chunks that never come, so no later op may use the group.
    if (!finished_) workspace_.poison(std::string(name_of(descriptor_.op)) + " ended before it was finished");
  }

  uint64_t number() const override { return number_; }
  char* memory(int peer) override {
    // A slot may have no memory yet when its first flight carries no rows.
    const std::vector<void*>& buffers = workspace_.slots_[slot_].buffers;
    return buffers.empty() ? nullptr : static_cast<char*>(buffers[peer]);
  }
  void publish(int chunk) override {
    // release: the chunk's contents are visible to whoever sees the number.
    workspace_.own().ready(slot_, chunk).store(number_, std::memory_order_release);
  }
  bool ready(int peer, int chunk) const override {
    return workspace_.blocks_[peer].ready(slot_, chunk).load(std::memory_order_acquire) >= number_;
  }
  const FlightDescriptor& rendezvous(int peer) override {
    if (peer == workspace_.local_rank_) return descriptor_;
    return workspace_.await_begun(peer, number_, descriptor_);
  }
  void wait(int peer, int chunk) override {
    rendezvous(peer);
    workspace_.await(workspace_.blocks_[peer].ready(slot_, chunk), number_, number_, peer, descriptor_.op,
                     "publish chunk " + std::to_string(chunk));
  }
  void finish() override {
    finished_ = true;
    // release: all reads of the peers' chunks come before it; the peers overwrite them after they see it.
    workspace_.own().slot(slot_).finished.store(number_, std::memory_order_release);
  }

 private:
  SymmetricWorkspace& workspace_;
  uint64_t number_;
  int slot_;
  FlightDescriptor descriptor_;
  bool finished_ = false;
};

std::unique_ptr<HostFlight> SymmetricWorkspace::begin(const FlightDescriptor& descriptor, int64_t bytes) {
  if (!failure_.empty()) raise_out_of_step(context_, failure_);
  check_process(context_, own().slot(0).pid);
  const uint64_t number = ++last_number_;
  const int slot = slot_of(number);
  op_ = descriptor.op;
  // Made first: from here on an exception leaves the ranks out of step, and the flight's destructor tells the
  // group.
  auto flight = std::make_unique<SymmetricFlight>(*this, number, descriptor);
  if (number > kSlots) await_slot(slot, number - kSlots, descriptor.op);

  SlotControl& control = own().slot(slot);
  control.descriptor = descriptor;
  control.bytes = bytes;
  control.begun.store(number, std::memory_order_release);

  if (slots_[slot].bytes < bytes) grow(slot, number, descriptor, bytes);
  ++context_.stats.ops;
  return flight;
}

}  // namespace

std::unique_ptr<HostWorkspace> make_symmetric_workspace(GroupContext& context,
                                                        std::unique_ptr<WorkspaceGroup> group,
                                                        std::vector<int> ranks, int local_rank, int flags) {
  return std::make_unique<SymmetricWorkspace>(context, std::move(group), std::move(ranks), local_rank, flags);
}

}  // namespace pyruntime
