// A flight between the devices of one host: a slot, what is put into the peers', and what is waited for
// there.
#pragma once

#include <algorithm>
#include <vector>

#include "transport/device/fused_gemm.h"
#include "transport/device/one_host.h"
#include "transport/device/sums.h"
#include "transport/flights.h"

namespace pyruntime {

// Consecutive flags of a rank in a slot.
struct Flags {
  int first, count;
};

// The common part of gathers and scatters: a slot, its chunks, and its end.
class DeviceFlight {
 public:
  // `pieces`: how many each rank's rows have in a gather.
  DeviceFlight(DeviceTransport& transport, const FlightDescriptor& descriptor, int64_t bytes, int64_t flags,
               int pieces)
      : transport_(transport),
        descriptor_(descriptor),
        goes_around_(transport.goes_around(descriptor)),
        slot_(transport.claim(descriptor.op, bytes, flags)),
        workspace_(*transport.workspaces_.back()) {
    group_ = {workspace_.shape,
              transport.rank(),
              slot_,
              static_cast<int64_t>(transport.context().deadline_seconds * 1e9),
              workspace_.bases.data(),
              pieces,
              goes_around_ ? rings().ways() / 2 : 0,
              transport.ring_orders_.data()};
    void* data = nullptr;
    check(library().slot_data(&group_, &data));
    data_ = static_cast<char*>(data);
    if (goes_around_) around_number_ = ++transport.around_begun_;
    is_captured_ = transport.is_capturing();
    transport.was_captured_ |= is_captured_;
    await_leave();
  }

  const DeviceLibrary& library() const { return transport_.library_; }
  DeviceStreams& streams() const { return transport_.streams_; }
  void check(int code) const { library().check(code); }
  int slot() const { return slot_; }
  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  const Rings& rings() const { return transport_.rings_; }

  // The offset of a chunk in the rows of all ranks.
  int64_t offset(const Chunk& chunk) const { return chunk.begin * descriptor_.row_bytes(); }
  int64_t bytes(const Chunk& chunk) const { return chunk.rows * descriptor_.row_bytes(); }
  // The address of `offset` in this rank's slot.
  char* at(int64_t offset) const { return data_ + offset; }
  char* staging(int64_t bytes) const {
    return static_cast<char*>(transport_.staging(slot_, bytes).data_ptr());
  }
  at::Tensor view(char* memory, const Chunk& chunk) const {
    return view_of(memory, descriptor_, chunk, transport_.device_);
  }

  // So many lines of the width that travels, one after the other.
  at::Tensor lines(char* memory, int64_t count) const {
    FlightDescriptor flat = descriptor_;
    flat.row_blocks = flat.inner = 1;
    return view_of(memory, flat, {rank(), 0, count}, transport_.device_).select(0, 0);
  }

  // Puts what the caller's stream has written so far.
  void put(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    streams().move_after_current();
    put_more(from, bytes, peer, offset, flags);
  }
  // Puts what was written before the last put().
  void put_more(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    check(library().put(&group_, from, bytes, peer, offset, flags.first, flags.count, streams().moving()));
  }
  // Puts what the caller's stream has written so far; all of it is announced behind the last, or as many as
  // the library puts at once behind theirs.
  void put_together(const std::vector<PyruntimePut>& puts) {
    if (puts.empty()) return;
    streams().move_after_current();
    for (size_t begin = 0; begin < puts.size(); begin += PYRUNTIME_MOST_RANKS) {
      const auto count = static_cast<int32_t>(std::min<size_t>(puts.size() - begin, PYRUNTIME_MOST_RANKS));
      check(library().put_together(&group_, puts.data() + begin, count, streams().moving()));
    }
  }
  int peer_at(int step) const { return (rank() + world_size() - step) % world_size(); }
  bool has_multicast() const { return workspace_.multicast != nullptr; }
  // Puts from this rank's slot to the same place in all others', nearest peer first.
  void put_own_to_all(int64_t offset, int64_t bytes, Flags flags) {
    streams().move_after_current();
    if (has_multicast()) return multicast_more(offset, bytes, flags);
    for (int step = 1; step < world_size(); ++step) {
      put_more(at(offset), bytes, peer_at(step), offset, flags);
    }
  }
  void multicast_more(int64_t offset, int64_t bytes, Flags flags) {
    check(library().put_to_all(&group_, workspace_.multicast, offset, bytes, flags.first, flags.count,
                               streams().moving()));
  }
  // out = the sum over all ranks of what their slots have at `offset` (+ bias); out is contiguous.
  void sum_copies(const at::Tensor& out, int64_t offset, const at::Tensor& bias) {
    const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
    check(library().sum_copies(
        &group_, workspace_.multicast, out.data_ptr(), offset, out.numel(), library_dtype(out.scalar_type()),
        added.defined() ? added.const_data_ptr() : nullptr, descriptor_.width, streams().current()));
  }
  void end_puts() {
    check(library().end_puts(&group_, streams().moving()));
    transport_.slots_[slot_].puts_ended = streams().moved();
  }
  // Puts this rank's pieces on their ways around the rings, then passes on what arrives on each way. Every
  // rank does this step by step and flight by flight in the same order, even if all ways share a queue: a
  // rank puts what another waits for before it waits for more.
  void put_around(const ChunkPlan& plan) {
    TORCH_CHECK(around_number_ == ++transport_.around_published_, name_of(descriptor_.op), " of group '",
                transport_.context().name, "' is published in another order than it began, beside gathers ",
                "that go around rings too; publish them as they begin, on all ranks.");
    streams().ways_after_current();
    for (int step = 0; step + 1 < world_size(); ++step) {
      for (int way = 0; way < rings().ways(); ++way) {
        const int owner = rings().before(way, rank(), step), next = rings().before(way, rank(), -1);
        const Chunk piece = plan.piece(owner, way);
        if (step == 0) {
          check(library().put(&group_, at(offset(piece)), bytes(piece), next, offset(piece), way, 1,
                              streams().way(way)));
        } else {
          check(library().pass_on(&group_, owner, bytes(piece), next, offset(piece), way, 1,
                                  streams().way(way)));
        }
      }
    }
    streams().join_ways();
    check(library().end_puts(&group_, streams().way(0)));
    transport_.slots_[slot_].puts_ended = streams().first_way();
  }
  void await(int peer, Flags flags) {
    const Spending waiting = waiting_for(peer);
    check(library().await(&group_, peer, flags.first, flags.count, streams().current()));
  }
  c10::Device device() const { return transport_.device_; }
  // Waits for all other ranks in one launch.
  void await_all(Flags flags) {
    const Spending waiting = waiting_for(world_size() == 2 ? peer_at(1) : -1);
    check(library().await_all(&group_, flags.first, flags.count, streams().current()));
  }
  // The same on another stream than the op's, which spends no time of its own.
  void follow_all(Flags flags) {
    check(library().await_all(&group_, flags.first, flags.count, streams().current()));
  }
  GroupContext& context() const { return transport_.context(); }

  void gather_and_multiply(const FusedGemm& gemm) {
    multiply(gemm, library().all_gather_matmul, library().sm90_all_gather_matmul);
  }
  void multiply_and_scatter(const FusedGemm& gemm) {
    multiply(gemm, library().matmul_reduce_scatter, library().sm90_matmul_reduce_scatter);
    end_puts();
    is_finished_ = true;
  }

  // Ends the flight for its peers, on the current stream; finish() follows on the caller's. Not for a gather
  // around rings or a multicast store, which finish() has to wait for.
  void finish_beside() {
    check(library().finish(&group_, streams().current()));
    is_finished_ = true;
  }
  // Makes the caller's stream wait for work on another one.
  void await_beside(const std::optional<c10::Event>& done) {
    const Spending waiting = waiting_for(world_size() == 2 ? peer_at(1) : -1);
    streams().current_after(done);
  }
  // Waits for the puts of this flight that have begun.
  void await_puts() {
    const Spending waiting = waiting_for(/*peer=*/-1);
    streams().current_after(transport_.slots_[slot_].puts_ended);
  }
  void finish() {
    if (!is_finished_) {
      // A multicast store also writes this rank's own copy, and pieces that go around a ring are read from
      // there: peers may put other rows there once this has ended.
      if (has_multicast() || goes_around_) await_puts();
      check(library().finish(&group_, streams().current()));
    }
    transport_.slots_[slot_].in_flight = false;
    streams().move_after_current();  // by then it is known what this flight waited for
    {
      const auto moving = streams().on_moving();
      workspace_.header_seen.copy_(workspace_.memory.narrow(0, 0, kDeviceHeaderBytes), /*non_blocking=*/true);
    }
    if (is_captured_) leave_nothing_beside_the_graph();
  }

 private:
  Spending waiting_for(int peer) const {
    return {context(), Entered::kWait, name_of(descriptor_.op), peer, device()};
  }
  // Waits until this rank may write into its slot.
  void await_leave() {
    if (!is_captured_ && transport_.slots_[slot_].puts_ended) {
      const Spending waiting = waiting_for(/*peer=*/-1);
      streams().current_after(transport_.slots_[slot_].puts_ended);
    }
    // After a flight with sums in the switch, peers that have not finished may still read this rank's slot,
    // and a finished peer's slot may still be read by others. A put waits only for its own peer.
    if (transport_.multicast_ == Multicast::kGatherAndReduce) {
      const Spending waiting = waiting_for(/*peer=*/-1);
      check(library().await_leave(&group_, streams().current()));
    }
  }
  void multiply(const FusedGemm& gemm, FusedKernel portable, FusedKernel hopper) {
    multiply_fused(library(), group_, descriptor_.rows * descriptor_.inner, gemm, transport_.fused_place(),
                   portable, hopper);
  }
  // A graph ends on the stream that it began on, and its events mean nothing outside.
  void leave_nothing_beside_the_graph() {
    streams().current_after(streams().moved());
    transport_.slots_[slot_].puts_ended.reset();
  }

  DeviceTransport& transport_;
  FlightDescriptor descriptor_;
  bool goes_around_;
  uint64_t around_number_ = 0;  // among the gathers that go around rings
  int slot_;
  DeviceWorkspace& workspace_;
  PyruntimeGroup group_;
  char* data_;
  bool is_captured_;          // into a graph, and not run now
  bool is_finished_ = false;  // by the kernel that did everything, or beside the op
};

}  // namespace pyruntime
