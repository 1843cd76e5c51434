// What gathers and scatters between the devices of one host have in common.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "transport/device_sums.h"
#include "transport/fused_product.h"
#include "transport/one_host_device_transport.h"

namespace pyruntime {

// Flags of a rank in a slot, one after the other.
struct Flags {
  int first, count;
};

// A slot, chunks in it, and the end.
class DeviceFlight {
 public:
  // `pieces`: of each rank's rows in a gather.
  DeviceFlight(DeviceTransport& transport, const FlightDescriptor& descriptor, int64_t bytes, int64_t flags,
               int pieces)
      : transport_(transport),
        descriptor_(descriptor),
        slot_(transport.claim(descriptor.op, bytes, flags)),
        workspace_(*transport.workspaces_.back()) {
    group_ = {workspace_.shape,
              transport.rank(),
              slot_,
              static_cast<int64_t>(transport.context().deadline_seconds * 1e9),
              workspace_.bases.data(),
              pieces};
    void* data = nullptr;
    check(library().slot_data(&group_, &data));
    data_ = static_cast<char*>(data);
    is_captured_ = transport.is_capturing();
    transport.was_captured_ |= is_captured_;
    if (!is_captured_) streams().current_after(transport_.slots_[slot_].puts_ended);
    // A flight before whose sums the switch took had peers read this rank's slot, and the slot of one that
    // has finished was read by others still. A put's own wait is for its peer alone.
    if (transport.multicast_ == Multicast::kGatherAndReduce) {
      check(library().await_leave(&group_, streams().current()));
    }
  }

  const DeviceLibrary& library() const { return transport_.library_; }
  const DeviceStreams& streams() const { return transport_.streams_; }
  const FlightDescriptor& descriptor() const { return descriptor_; }
  void check(int code) const { library().check(code); }
  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }

  // `offset` in this rank's slot.
  char* at(int64_t offset) const { return data_ + offset; }
  char* staging(int64_t bytes) const {
    return static_cast<char*>(transport_.staging(slot_, bytes).data_ptr());
  }
  at::Tensor view(char* memory, const Chunk& chunk) const {
    const auto options = at::TensorOptions().dtype(descriptor_.scalar_type()).device(transport_.device_);
    if (chunk.rows * descriptor_.row_elements() == 0) return at::empty(descriptor_.sizes_of(chunk), options);
    // Told where it lies, torch does not ask the driver, for every chunk and while a graph is captured.
    return at::for_blob(memory, descriptor_.sizes_of(chunk))
        .options(options)
        .target_device(transport_.device_)
        .make_tensor();
  }

  // Puts what the caller's stream has written so far; nearest peer first, where it goes to all.
  void put(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    streams().move_after_current();
    put_more(from, bytes, peer, offset, flags);
  }
  // What was written before the put before.
  void put_more(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    check(library().put(&group_, from, bytes, peer, offset, flags.first, flags.count, streams().moving()));
  }
  int peer_at(int step) const { return (rank() + world_size() - step) % world_size(); }
  bool has_multicast() const { return workspace_.multicast != nullptr; }
  // From this rank's slot to the same place in all others'.
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
  // out = the sum of what all ranks have from `offset` of their slots on (+ bias); out is contiguous.
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
  void await(int peer, Flags flags) {
    check(library().await(&group_, peer, flags.first, flags.count, streams().current()));
  }

  // `rows`: over all ranks, as the kernels count them.
  void gather_and_multiply(int64_t rows, const FusedProduct& product) {
    pyruntime::gather_and_multiply(library(), group_, rows, product, transport_.fused_place());
  }
  void multiply_and_scatter(int64_t rows, const FusedProduct& product) {
    pyruntime::multiply_and_scatter(library(), group_, rows, product, transport_.fused_place());
    end_puts();
    is_finished_ = true;
  }

  void finish() {
    if (!is_finished_) {
      // A multicast store writes this rank's own copy too: over what peers may put there once this has ended.
      if (has_multicast()) streams().current_after(transport_.slots_[slot_].puts_ended);
      check(library().finish(&group_, streams().current()));
    }
    transport_.slots_[slot_].in_flight = false;
    streams().move_after_current();  // what this flight waited for is known by then
    {
      const auto moving = streams().on_moving();
      workspace_.header_seen.copy_(workspace_.memory.narrow(0, 0, kDeviceHeaderBytes), /*non_blocking=*/true);
      workspace_.seen = group_;
    }
    if (is_captured_) leave_nothing_beside_the_graph();
  }

 private:
  // A graph ends on the stream that it began on, and its events mean nothing outside.
  void leave_nothing_beside_the_graph() {
    streams().current_after(streams().moved());
    transport_.slots_[slot_].puts_ended.reset();
  }

  DeviceTransport& transport_;
  FlightDescriptor descriptor_;
  int slot_;
  DeviceWorkspace& workspace_;
  PyruntimeGroup group_;
  char* data_;
  bool is_captured_;          // into a graph, and not run now
  bool is_finished_ = false;  // by the kernel that did it all
};

}  // namespace pyruntime
