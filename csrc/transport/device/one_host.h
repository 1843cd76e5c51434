// Transport between the devices of one host. Copy engines write chunks into the peers' memory, on a stream of
// their own, and streams wait for them. Nothing waits on the host, so an op returns before its chunks have
// arrived, as every op on a device does.
//
// Waits on the device end by the deadline too, or sooner (wait_watch.h); the host learns of it at the group's
// next op, and raises then.
//
// The transport owns symmetric memory, cut into slots, and the streams on which chunks leave. Flights
// (one_host_flights.cpp) use the slots.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/device/fused_gemm.h"
#include "transport/device/library.h"
#include "transport/device/streams.h"
#include "transport/device/wait_watch.h"
#include "transport/device_sharing.h"
#include "transport/settings.h"
#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// Says what keeps this rank's device from multicast; "" if nothing does. Whether a group's devices reach each
// other by it is known only when they map memory.
std::string why_no_multicast(c10::Device device, const DeviceLibrary& library);

// Symmetric memory on every rank in the library's layout: slots of equal size.
struct DeviceWorkspace {
  DeviceWorkspace() = default;
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;
  ~DeviceWorkspace();

  PyruntimeWorkspace shape;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemoryAllocator> allocator;  // nullptr: torch's
  at::Tensor memory;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle;
  std::vector<void*> bases;   // every rank's
  void* multicast = nullptr;  // all of them at once; nullptr: not requested
  at::Tensor header_seen;     // the header when the last flight here ended, copied by the device
  int64_t watched = 0;        // its number for WaitWatch; 0: none
  std::shared_ptr<std::atomic<bool>> stopped = std::make_shared<std::atomic<bool>>(false);  // by WaitWatch
};

class DeviceTransport : public Transport, public DeviceSharing {
 public:
  // Collective over the group, with its first op. `group` has its ranks; `library` outlives the transport. Of
  // the settings, chunk_bytes is how much of a rank's rows is announced at once to a GEMM that waits for them
  // (0: a default); multicast is off if a rank's device cannot.
  DeviceTransport(GroupContext& context, std::unique_ptr<WorkspaceGroup> group, PeerProcesses processes,
                  c10::Device device, const DeviceLibrary& library, const GroupSettings& settings);
  ~DeviceTransport() override { BlockBudget::of(device_).forget(this); }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::unique_ptr<DealFlight> deal(const FlightDescriptor& descriptor, const DealtRows& rows) override;
  std::string why_not_deal() const override { return {}; }
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override;
  DeviceSharing* device_sharing() override { return this; }
  std::string why_not_fused(const FlightDescriptor& descriptor) const override;
  std::string why_crowded(int64_t rows, int64_t n) const override {
    return pyruntime::why_crowded(library_, world_size(), rows, n, fused_place());
  }
  std::vector<std::string> tiles() const override { return tile_names(library_); }
  std::vector<std::string> other_tiles(int64_t rows, int64_t n, int64_t k) const override {
    return other_tile_names(library_, world_size(), rows, n, k);
  }

  // Whether the rows of a gather travel around the rings, one piece of each rank's rows on each way: only
  // with enough rows for that many pieces. Fewer rows arrive sooner straight from their owner.
  bool goes_around(const FlightDescriptor& descriptor) const;
  // The number of flags that announce a rank's rows, piece by piece.
  int pieces_of(const FlightDescriptor& descriptor) const;
  // The number of flags that announce a part of that many rows. Ranks whose kernels raise them one by one and
  // ranks that raise them together need not know of each other.
  int flags_of_part(const FlightDescriptor& descriptor, int64_t rows) const;
  // Whether the switch sums. Never if some rank may use a fused kernel: that kernel sends its parts.
  bool sums_in_the_switch(const FlightDescriptor& descriptor) const;

  void flush() override;
  void leave() override { flush(); }
  bool crosses_hosts() const override { return false; }
  bool is_capturing() const override { return library_.is_capturing(streams_.current()) != 0; }
  std::string description() const override;
  int64_t workspace_bytes() const override;
  // Reads what the device had written down by the end of a finished flight, and raises a failure.
  void raise_if_failed();

 private:
  friend class DeviceFlight;

  struct Slot {
    bool in_flight = false;
    at::Tensor staging;  // chunks that leave from here
    // Until this event, the puts of the former flight read what it wrote.
    std::optional<c10::Event> puts_ended;
  };

  // Takes a slot of the workspace for the next flight, with room for that many bytes and flags on every rank.
  int claim(Op op, int64_t bytes, int64_t flags);
  // All ranks come here with the same op, because all have claimed the same bytes so far. The former memory
  // stays, because flights may be under way in it; all of it together is less than the new one.
  void grow(int64_t bytes, int64_t flags);
  at::Tensor staging(int slot, int64_t bytes);
  // The place of a fused kernel that is launched now.
  FusedPlace fused_place() const {
    return {BlockBudget::of(device_), streams_.current_stream(), streams_.current(), is_capturing(), this};
  }
  WatchedWorkspace watched(const DeviceWorkspace& workspace) const;

  std::unique_ptr<WorkspaceGroup> group_;
  std::shared_ptr<const PeerProcesses> processes_;
  c10::Device device_;
  const DeviceLibrary& library_;
  int64_t piece_bytes_;
  Multicast multicast_;
  Rings rings_;
  std::vector<int32_t> ring_orders_;  // in the form that the library takes
  DeviceStreams streams_;
  uint64_t last_number_ = 0;
  uint64_t around_begun_ = 0, around_published_ = 0;  // gathers that go around rings
  std::array<Slot, PYRUNTIME_SLOTS> slots_;
  std::vector<std::unique_ptr<DeviceWorkspace>> workspaces_;  // only the last one is used for new flights
  bool was_captured_ = false;                                 // any flight, into a graph
  std::vector<at::Tensor> kept_;                              // memory that graphs still use
};

}  // namespace pyruntime
