// Transport between the devices of several hosts, equally many (more than one) on each. The devices of one
// local rank, one on each host, are a rail. Rows cross between hosts on the rail of the rank that has or
// wants them, once, and go on inside the host by symmetric memory and copy engines:
//
//     gather     rank (h, l) sends its rows to its rail and to the ranks of its host; what arrives on
//                the rail it puts into the ranks of its host
//     scatter    the parts of rows of (h', l), of all ranks of host h, are summed by rank (h, l), which
//                sends the sum on its rail; the owner sums over hosts
//
// So a device receives (H - 1) / P of the rows from other hosts (H hosts, P ranks), and its adapter carries
// no more. Sums run over the ranks of a host in their order, are rounded, and then over hosts in theirs. What
// arrives is passed on, and summed, on the stream that moves rows; nothing waits on the host. Flights of few
// bytes go straight to all ranks.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "transport/device/hosts/exchange.h"
#include "transport/device/library.h"
#include "transport/device/wait_watch.h"
#include "transport/ring/schedule.h"
#include "transport/settings.h"
#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// Collective over the group, with its first op. `exchange` sends among all ranks, and so does `straight`, by
// which flights of few bytes go, if no chunk_bytes are set; `host` has the ranks of this host, and
// `processes` theirs; `library` outlives the transport.
std::unique_ptr<Transport> make_rails_transport(GroupContext& context, std::unique_ptr<Exchange> exchange,
                                                std::unique_ptr<Transport> straight,
                                                std::unique_ptr<WorkspaceGroup> host, PeerProcesses processes,
                                                const HostLayout& layout, c10::Device device,
                                                const DeviceLibrary& library, const GroupSettings& settings);

}  // namespace pyruntime
