// Transport between the devices of several hosts: chunks go straight from rank to rank by the sends and
// receives of the process group (NCCL), which streams order as they order copies. Nothing waits on the host,
// so an op returns before its chunks have come, as every op on a device does.
//
// Step s of a flight sends to one rank and receives from another, as one call: chunks arrive in the order in
// which they are read, and every rank takes its steps in the order of its program, which is the same on all.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "transport/device/library.h"
#include "transport/transport.h"

namespace pyruntime {

// Over the backend that `process_group` has for that device, among the context's ranks; nullptr where that
// has none that sends and receives in the order of streams, and then `why_not` says why. `instance` tells the
// messages of groups apart that share the process group, the same on all ranks. `library`: sums by one
// kernel; nullptr: by torch's.
std::unique_ptr<Transport> make_several_hosts_device_transport(
    GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device,
    int hosts, int instance, const DeviceLibrary* library, std::string& why_not);

}  // namespace pyruntime
