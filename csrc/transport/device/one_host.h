// Transport between the devices of one host: copy engines write chunks into the peers' memory, on a stream of
// their own, and streams wait for them. Nothing waits on the host, so an op returns before its chunks have
// come, as every op on a device does.
//
// What waits on the device is bounded by the deadline too. The host learns of a deadline that has passed at
// the group's next op, and raises then.
//
// The transport holds symmetric memory, cut into slots, and the streams on which chunks leave. What an op
// does with a slot is a flight's (one_host_flights.cpp).
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
#include "transport/device_sharing.h"
#include "transport/settings.h"
#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// What keeps this rank's device from multicast; "" for nothing. Whether those of a group reach each other so
// is known when they map memory.
std::string why_no_multicast(c10::Device device, const DeviceLibrary& library);

// Of a workspace: what it begins with is zero until something fails.
inline constexpr int64_t kDeviceHeaderBytes = 128;

// Symmetric memory on every rank, as the library lays it out: slots of so many bytes.
struct DeviceWorkspace {
  PyruntimeWorkspace shape;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemoryAllocator> allocator;  // nullptr: torch's
  at::Tensor memory;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle;
  std::vector<void*> bases;   // every rank's
  void* multicast = nullptr;  // all of them at once; nullptr: not asked for
  at::Tensor header_seen;     // what it began with when the last flight here ended, copied by the device
  PyruntimeGroup seen{};      // that flight's
};

class DeviceTransport : public Transport, public DeviceSharing {
 public:
  // Collective over the group, with its first op. `group` is of its ranks; `library` outlives the transport.
  // Of the settings: chunk_bytes is how much of a rank's rows is announced at once to a GEMM that waits for
  // them, 0 for a default; multicast is off where a rank's device cannot.
  DeviceTransport(GroupContext& context, std::unique_ptr<WorkspaceGroup> group, c10::Device device,
                  const DeviceLibrary& library, const GroupSettings& settings);
  ~DeviceTransport() override { BlockBudget::of(device_).forget(this); }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
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

  // Whether the rows of a gather go around the rings, a piece of each rank's on each way: what is so much
  // that it travels in as many pieces. Less is there sooner straight from its owner.
  bool goes_around(const FlightDescriptor& descriptor) const;
  // How many flags say, piece by piece, that the rows of a rank have come.
  int pieces_of(const FlightDescriptor& descriptor) const;
  // How many flags say that a part of so many rows has come. Ranks whose kernels raise them one by one and
  // ranks that raise them together need not know of each other.
  int flags_of_part(const FlightDescriptor& descriptor, int64_t rows) const;
  // Whether the switch sums. Never what a fused kernel of some rank may compute: that one sends its parts.
  bool sums_in_the_switch(const FlightDescriptor& descriptor) const;

  void flush() override;
  void leave() override { flush(); }
  bool crosses_hosts() const override { return false; }
  bool is_capturing() const override { return library_.is_capturing(streams_.current()) != 0; }
  std::string description() const override;
  int64_t workspace_bytes() const override;

 private:
  friend class DeviceFlight;

  struct Slot {
    bool in_flight = false;
    at::Tensor staging;  // what leaves from here
    // Until then the puts of the flight before read what that flight wrote.
    std::optional<c10::Event> puts_ended;
  };

  // A slot of the workspace for the next flight, with room for so many bytes and flags on every rank.
  int claim(Op op, int64_t bytes, int64_t flags);
  // All ranks come here with the same op, as all have claimed the same bytes so far. The memory before stays,
  // because flights may be under way in it; together it is less than the new one.
  void grow(int64_t bytes, int64_t flags);
  at::Tensor staging(int slot, int64_t bytes);
  // Of a fused kernel that is launched now.
  FusedPlace fused_place() const {
    return {BlockBudget::of(device_), streams_.current_stream(), streams_.current(), is_capturing(), this};
  }
  // Looks at what the device had written down by the end of a flight that is over.
  void raise_if_failed();

  std::unique_ptr<WorkspaceGroup> group_;
  c10::Device device_;
  const DeviceLibrary& library_;
  int64_t piece_bytes_;
  Multicast multicast_;
  Rings rings_;
  std::vector<int32_t> ring_orders_;  // as the library takes them
  DeviceStreams streams_;
  uint64_t last_number_ = 0;
  uint64_t around_begun_ = 0, around_published_ = 0;  // gathers that go around rings
  std::array<Slot, PYRUNTIME_SLOTS> slots_;
  std::vector<std::unique_ptr<DeviceWorkspace>> workspaces_;  // the last one is the one to use
  bool was_captured_ = false;                                 // any flight, into a graph
  std::vector<at::Tensor> kept_;                              // what graphs still use
};

}  // namespace pyruntime
