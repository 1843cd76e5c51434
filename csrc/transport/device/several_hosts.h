// Transport between the devices of several hosts: chunks go straight from rank to rank by the process group's
// sends and receives (NCCL), in stream order. Nothing waits on the host, so an op returns before its chunks
// have arrived, as every op on a device does.
//
// Step s of a flight sends to one rank and receives from another in one call. Chunks arrive in the order in
// which they are read, and every rank takes its steps in the order of its program, which is the same on all.
// Chunks that a rank publishes together travel in one call, and arrive together.
//
// A pipeline's ranks have different programs, so messages between two ranks have a process group of their own
// (pairs.h). A message's receive begins with its flight.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "transport/device/library.h"
#include "transport/transport.h"

namespace pyruntime {

// Uses the backend of `process_group` for that device, among the context's ranks. Returns nullptr, with the
// reason in `why_not`, if no backend sends and receives in stream order. `instance`, the same on all ranks,
// tells apart the messages of groups that share the process group. `pair`: for an edge, the name of a process
// group to make for its two ranks; else empty. `library` sums in one kernel; with nullptr torch sums.
std::unique_ptr<Transport> make_several_hosts_device_transport(
    GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device,
    int hosts, int instance, const std::string& pair, const DeviceLibrary* library, std::string& why_not);

}  // namespace pyruntime
