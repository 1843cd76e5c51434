// Transport between hosts: chunks travel round a ring of hosts, one while another is multiplied.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/host/host_workspace.h"
#include "transport/ring/control_line.h"
#include "transport/ring/cost.h"
#include "transport/ring/point_to_point.h"
#include "transport/ring/schedule.h"
#include "transport/transport.h"

namespace pyruntime {

class Arbiter;

// The parts of a ring; tests build it from threads.
struct RingParts {
  HostLayout layout;
  std::vector<std::string> host_names;  // by host: ranks of one host share a window
  std::unique_ptr<HostWorkspace> workspace;
  std::shared_ptr<PointToPoint> link;
  ControlLines lines;
  Arbiter* arbiter;
  // Tells this transport's data apart from those of other rendezvous and transports over the same link.
  int instance = 0;
};

// Tags of data encode instance, flight, stream and piece. The probe's tag is none of them.
inline constexpr int kTagBase = 1 << 30;
inline constexpr int kProbeTag = kTagBase - 1;

// The ranks with which this one exchanges.
std::vector<int> ring_neighbours(const HostLayout& layout);

// Collective: measures the link, unless options.chunk_bytes is set.
std::unique_ptr<Transport> make_ring_transport(GroupContext& context, RingParts parts,
                                               const RingOptions& options, const Agree& agree);

}  // namespace pyruntime
