// Transport between hosts: chunks go round a ring of hosts, one chunk's journey under another's GEMM.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/control_line.h"
#include "transport/host_workspace.h"
#include "transport/point_to_point.h"
#include "transport/ring_schedule.h"
#include "transport/transport.h"

namespace pyruntime {

class Arbiter;

// What sending costs between neighbours: seconds for `bytes` are latency_s + bytes * seconds_per_byte.
struct LinkCost {
  double latency_s = 100e-6;
  double seconds_per_byte = 1e-9;
};

struct RingOptions {
  // 0: chosen for each op from the link's cost.
  int64_t chunk_bytes = 0;
  // What partial sums travel as; Undefined: as the operand's dtype.
  c10::ScalarType wire = c10::ScalarType::Undefined;

  bool operator==(const RingOptions& other) const {
    return chunk_bytes == other.chunk_bytes && wire == other.wire;
  }
};

// What a ring is made of; tests make it of threads.
struct RingParts {
  HostLayout layout;
  std::vector<std::string> host_names;  // by host: ranks of one host share a window
  std::unique_ptr<HostWorkspace> workspace;
  std::shared_ptr<PointToPoint> link;
  std::map<int, std::shared_ptr<ControlLine>> lines;  // by the neighbour's rank in the group
  Arbiter* arbiter;
  // Differs between openings and from that of another transport over the same link: keeps their data apart.
  int instance = 0;
};

// Flags that a workspace needs for a ring over the layout.
int ring_flags(int world_size, int hosts);

// Ranks with whom this one exchanges.
std::vector<int> ring_neighbours(const HostLayout& layout);

// Pieces that a chunk is cut into: n minimises filling the pipeline (bytes * seconds_per_byte / n) plus the
// chunks' latencies (n * latency_s), so n = sqrt(bytes * seconds_per_byte / latency_s); derived. Never so
// many that a piece of a product has fewer than a tile's rows, and an even number where two streams share
// them.
int ring_pieces(int64_t bytes, int64_t rows, bool with_matmul, int hosts, const LinkCost& cost,
                const RingOptions& options);

// Why a ring of so many hosts cannot cut chunks into so many pieces; empty where it can.
std::string why_no_ring_of_pieces(int pieces, int hosts);

// Half and twice the usual number of pieces, of these those that a ring of so many hosts can have.
std::vector<int> other_ring_pieces(int usual, int hosts);

// Collective: measures the link, unless options.chunk_bytes makes that needless. `agree` gives the largest of
// the ranks' values to all of them.
std::unique_ptr<Transport> make_ring_transport(
    GroupContext& context, RingParts parts, const RingOptions& options,
    const std::function<std::vector<double>(const std::vector<double>&)>& agree);

}  // namespace pyruntime
