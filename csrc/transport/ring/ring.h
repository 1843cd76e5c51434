// Transport between hosts: chunks go round a ring of hosts, one chunk's journey under another's GEMM.
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

// What a ring is made of; tests make it of threads.
struct RingParts {
  HostLayout layout;
  std::vector<std::string> host_names;  // by host: ranks of one host share a window
  std::unique_ptr<HostWorkspace> workspace;
  std::shared_ptr<PointToPoint> link;
  ControlLines lines;
  Arbiter* arbiter;
  // Differs between rendezvous and from that of another transport over the same link: keeps their data
  // apart.
  int instance = 0;
};

// Tags of data: which instance, which flight, which stream, which piece. The probe's is none of them.
inline constexpr int kTagBase = 1 << 30;
inline constexpr int kProbeTag = kTagBase - 1;

// Ranks with whom this one exchanges.
std::vector<int> ring_neighbours(const HostLayout& layout);

// Collective: measures the link, unless options.chunk_bytes makes that needless.
std::unique_ptr<Transport> make_ring_transport(GroupContext& context, RingParts parts,
                                               const RingOptions& options, const Agree& agree);

}  // namespace pyruntime
