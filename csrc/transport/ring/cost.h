// What the link to a rank's neighbours costs, and into how many pieces that cuts its rows.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "core/arbiter.h"
#include "transport/group_context.h"

namespace pyruntime {

struct RingParts;

struct RingOptions {
  // 0: chosen for each op from the link's cost.
  int64_t chunk_bytes = 0;
  // What partial sums travel as; Undefined: as the operand's dtype.
  c10::ScalarType wire = c10::ScalarType::Undefined;

  bool operator==(const RingOptions&) const = default;
};

// Gives the largest of the ranks' values to all of them; collective.
using Agree = std::function<std::vector<double>(const std::vector<double>&)>;

// Measured once for a set of hosts, by all ranks; also settles how many bytes may be under way. Collective.
LinkCost settle_link_cost(const GroupContext& context, const RingParts& parts, const Agree& agree);

// From the seconds that `probe` takes to exchange so many bytes with the neighbours; collective.
LinkCost link_cost_of(const std::function<double(int64_t)>& probe, const Agree& agree);

// Flags that a workspace needs for a ring over the layout.
int ring_flags(int world_size, int hosts);

// Pieces that a chunk is cut into: n minimises filling the pipeline (bytes * seconds_per_byte / n) plus the
// chunks' latencies (n * latency_s), so n = sqrt(bytes * seconds_per_byte / latency_s); derived. Never so
// many that a piece for a GEMM has fewer than a tile's rows, and an even number where two streams share
// them.
int ring_pieces(int64_t bytes, int64_t rows, bool with_matmul, int hosts, const LinkCost& cost,
                const RingOptions& options);

// Pieces of what is read whole (a send): nothing is gained by a piece but that more urgent chunks may pass,
// so one takes 8 ms on the link.
int ring_send_pieces(int64_t bytes, int hosts, const LinkCost& cost, const RingOptions& options);

// Why a ring of so many hosts cannot cut chunks into so many pieces; empty where it can.
std::string why_no_ring_of_pieces(int pieces, int hosts);

// Half and twice the usual number of pieces, of these those that a ring of so many hosts can have.
std::vector<int> other_ring_pieces(int usual, int hosts);

}  // namespace pyruntime
