
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <array>
#include <atomic>
#include <new>
#include <sstream>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/failure_board.h"
#include "core/late_report.h"
#include "cpu/host_process.h"
#include "transport/host_workspace.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

constexpr int64_t kSlotGranularity = int64_t{1} << 16;

using Number = std::atomic<uint64_t>;  // of an op: 1, 2, ... in the order in which all ranks begin them

// One slot of the control block, in its owner's memory; only the owner writes. Numbers only grow, so nothing
// is ever reset and a late reader can never mistake an old flag for a new one.
struct alignas(64) SlotControl {
  Number begun;  // written after `descriptor`
  FlightDescriptor descriptor;
  int64_t bytes;
  pid_t pid;                    // of the owner; in slot 0 only
  alignas(64) Number finished;  // its owner has read all it wanted from the peers' slots
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

class SymmetricWorkspace;

class SymmetricFlight : public HostFlight {
 public:
  SymmetricFlight(SymmetricWorkspace& workspace, uint64_t number, const FlightDescriptor& descriptor)
      : workspace_(workspace), number_(number), descriptor_(descriptor) {}
  ~SymmetricFlight() override;

  uint64_t number() const override { return number_; }
  char* memory(int peer) override;
  void publish(int chunk) override;
  bool ready(int peer, int chunk) const override;
  const FlightDescriptor& meet(int peer) override;
  void wait(int peer, int chunk) override;
  void finish() override;

 private:
  SymmetricWorkspace& workspace_;
  uint64_t number_;
  FlightDescriptor descriptor_;
  bool finished_ = false;
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

  std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) override {
    if (!failure_.empty()) {
      raise_comm_error(CommErrorKind::kBroken,
                       "Group '" + context_.name +
                           "' cannot go on: its ranks are out of step since an earlier error (" + failure_ +
                           "); close it on all ranks and start anew.");
    }
    TORCH_CHECK(getpid() == own().slot(0).pid, "Group '", context_.name, "' was opened by process ",
                own().slot(0).pid, " and is used by its fork ", getpid(),
                "; start ranks as processes of their own.");
    const uint64_t number = ++last_number_;
    const int slot = slot_of(number);
    op_ = descriptor.op;
    // Made first: from here on an exception leaves the ranks out of step, and the flight's destructor tells
    // the group.
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

  // While this group's memory is being set up. Before the first op the peers are not known yet, and the
  // deadline alone ends the wait.
  void check_all_peers() {
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_[peer].gone()) continue;
      const std::string message =
          name_of(op_) + (" on group '" + context_.name + "', rank " + std::to_string(context_.own_rank())) +
          " waiting for rank " + std::to_string(context_.told(ranks_[peer])) + " to make room: its process " +
          std::to_string(peers_[peer].pid()) + " has ended.";
      fail(CommErrorKind::kPeerLost, message);
    }
  }

  // All ranks reach the same flight with the same byte count, so all of them grow, or none does. The peers'
  // descriptors are compared first: a rank that disagrees about the op would otherwise leave the others
  // waiting in the rendezvous.
  void grow(int slot, uint64_t number, const FlightDescriptor& descriptor, int64_t bytes) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != local_rank_) await_begun(peer, number, descriptor);
    }
    int64_t target = std::max(slots_[slot].bytes, kSlotGranularity);
    while (target < bytes) target *= 2;
    slots_[slot] = Slot();  // every peer has finished with it: see await_slot()
    slots_[slot] = allocate(target);
  }

  // A slot is free for op `previous` + kSlots when every rank has finished op `previous`.
  void await_slot(int slot, uint64_t previous, Op op) {
    TORCH_CHECK(own().slot(slot).finished.load(std::memory_order_relaxed) >= previous, "Group '",
                context_.name, "' already has ", kSlots, " ops in flight; finish one before beginning ",
                name_of(op), ".");
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != local_rank_)
        await(blocks_[peer].slot(slot).finished, previous, previous, peer, op, "finish");
    }
  }

  // Waits until the peer has begun op `number`, and compares what it is doing with what this rank is doing.
  const SlotControl& await_begun(int peer, uint64_t number, const FlightDescriptor& descriptor) {
    const SlotControl& theirs = blocks_[peer].slot(slot_of(number));
    await(theirs.begun, number, number, peer, descriptor.op, "begin");
    const FlightDescriptor& other = theirs.descriptor;
    if (!descriptor.agrees_with(other)) {
      std::ostringstream text;
      text << "Ranks disagree on op " << number << " of group '" << context_.name << "': rank "
           << context_.own_rank() << " called " << descriptor.text() << " and rank "
           << context_.told(ranks_[peer]) << " called " << other.text()
           << "; all ranks must call the same ops with the same shapes and dtypes, in the same order.";
      fail(CommErrorKind::kDisagree, text.str());
    }
    return theirs;
  }

  void await(const Number& number, uint64_t expected, uint64_t op_number, int peer, Op op,
             const std::string& what) {
    if (number.load(std::memory_order_acquire) >= expected) return;
    const ScopedSeconds waiting(context_.stats.waiting_s);
    const auto site = [&] {
      std::ostringstream text;
      text << name_of(op) << " (op " << op_number << " of group '" << context_.name << "'), rank "
           << context_.own_rank() << " waiting for rank " << context_.told(ranks_[peer]) << " to " << what;
      return text.str();
    };
    LateReport report(context_.deadline_seconds, site);
    const auto peer_lives = [&] {
      if (peers_[peer].gone()) {
        const std::string message =
            site() + ": its process " + std::to_string(peers_[peer].pid()) + " has ended.";
        fail(CommErrorKind::kPeerLost, message);
      }
      report.look();
    };
    // acquire: what the peer wrote before it published is seen by the reads that follow.
    const auto arrived = [&] { return number.load(std::memory_order_acquire) >= expected; };
    if (wait_until(arrived, context_.deadline_seconds, peer_lives)) return;
    std::ostringstream message;
    message << site() << ": not within the deadline of " << context_.deadline_seconds << " s (expected "
            << expected << ", seen " << number.load() << "; the peer last began op " << last_begun(peer)
            << ").";
    fail(CommErrorKind::kTimeout, message.str());
  }

  uint64_t last_begun(int peer) const {
    uint64_t last = 0;
    for (int slot = 0; slot < kSlots; ++slot) last = std::max(last, blocks_[peer].slot(slot).begun.load());
    return last;
  }

  [[noreturn]] void fail(CommErrorKind kind, const std::string& message) {
    poison(message);
    raise_for_all({kind, message, context_.name});
  }

  void poison(const std::string& failure) {
    if (failure_.empty()) failure_ = failure;
  }

  GroupContext& context_;
  std::unique_ptr<WorkspaceGroup> group_;
  std::vector<int> ranks_;  // of the group, by rank on this host
  int local_rank_;
  int size_;
  Slot control_;
  std::vector<ControlBlock> blocks_;  // every rank's
  std::array<Slot, kSlots> slots_;
  std::vector<cpu::WatchedProcess> peers_;
  uint64_t last_number_ = 0;
  Op op_ = Op::kAllGather;  // begun last
  std::string failure_;     // why this group cannot go on; empty while it can
};

SymmetricFlight::~SymmetricFlight() {
  // Left by an exception: the peers may wait for chunks that never come, so no later op may use the group.
  if (!finished_) workspace_.poison(std::string(name_of(descriptor_.op)) + " ended before it was finished");
}

char* SymmetricFlight::memory(int peer) {
  // A slot may have no memory yet when its first flight carries no rows.
  const Slot& slot = workspace_.slots_[SymmetricWorkspace::slot_of(number_)];
  return slot.buffers.empty() ? nullptr : static_cast<char*>(slot.buffers[peer]);
}

void SymmetricFlight::publish(int chunk) {
  // release: the chunk's contents are visible to whoever sees the number.
  workspace_.own()
      .ready(SymmetricWorkspace::slot_of(number_), chunk)
      .store(number_, std::memory_order_release);
}

bool SymmetricFlight::ready(int peer, int chunk) const {
  return workspace_.blocks_[peer]
             .ready(SymmetricWorkspace::slot_of(number_), chunk)
             .load(std::memory_order_acquire) >= number_;
}

const FlightDescriptor& SymmetricFlight::meet(int peer) {
  if (peer == workspace_.local_rank_) return descriptor_;
  return workspace_.await_begun(peer, number_, descriptor_).descriptor;
}

void SymmetricFlight::wait(int peer, int chunk) {
  meet(peer);
  const Number& ready = workspace_.blocks_[peer].ready(SymmetricWorkspace::slot_of(number_), chunk);
  workspace_.await(ready, number_, number_, peer, descriptor_.op, "publish chunk " + std::to_string(chunk));
}

void SymmetricFlight::finish() {
  finished_ = true;
  // release: all reads of the peers' chunks come before it; the peers overwrite them after they see it.
  workspace_.own()
      .slot(SymmetricWorkspace::slot_of(number_))
      .finished.store(number_, std::memory_order_release);
}

}  // namespace

std::unique_ptr<HostWorkspace> make_symmetric_workspace(GroupContext& context,
                                                        std::unique_ptr<WorkspaceGroup> group,
                                                        std::vector<int> ranks, int local_rank, int flags) {
  return std::make_unique<SymmetricWorkspace>(context, std::move(group), std::move(ranks), local_rank, flags);
}

}  // namespace pyruntime
