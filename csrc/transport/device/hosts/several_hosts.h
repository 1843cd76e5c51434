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

#include <memory>

#include "transport/device/hosts/exchange.h"
#include "transport/device/library.h"
#include "transport/transport.h"

namespace pyruntime {

// `library` sums in one kernel; with nullptr torch sums.
std::unique_ptr<Transport> make_several_hosts_device_transport(GroupContext& context,
                                                               std::unique_ptr<Exchange> exchange,
                                                               c10::Device device, int hosts,
                                                               const DeviceLibrary* library);

}  // namespace pyruntime
