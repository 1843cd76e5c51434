// Transport between the devices of one host: copy engines write chunks into the peers' memory, on a stream of
// their own, and streams wait for them. Nothing waits on the host, so an op returns before its chunks have
// come, as every op on a device does.
//
// What waits on the device is bounded by the deadline too. The host learns of a deadline that has passed at
// the group's next op, and raises then.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "transport/device_library.h"
#include "transport/multicast.h"
#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// What keeps this rank's device from multicast; "" for nothing. Whether those of a group reach each other so
// is known when they map memory.
std::string why_no_multicast(c10::Device device, const DeviceLibrary& library);

// Collective over the group, with its first op. `workspace` is of its ranks; `library` outlives the
// transport; `piece_bytes`: how much of a rank's rows is announced at once to a product that waits for them,
// 0 for a default. `multicast`: off where a rank's device cannot.
std::unique_ptr<Transport> make_device_transport(GroupContext& context,
                                                 std::unique_ptr<WorkspaceGroup> workspace,
                                                 c10::Device device, const DeviceLibrary& library,
                                                 int64_t piece_bytes, Multicast multicast);

}  // namespace pyruntime
