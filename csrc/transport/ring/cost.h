// Measures the cost of the link to a rank's neighbours and chooses how many pieces its rows travel in.
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
  // The dtype in which partial sums travel; Undefined: the operand's.
  c10::ScalarType wire = c10::ScalarType::Undefined;

  bool operator==(const RingOptions&) const = default;
};

// Returns, on all ranks, the largest of the ranks' values; collective.
using Agree = std::function<std::vector<double>(const std::vector<double>&)>;

// The link's cost, measured once for a set of hosts; also sets the bytes that may be under way. Collective.
LinkCost settle_link_cost(const GroupContext& context, const RingParts& parts, const Agree& agree);

// The link's cost by `probe(bytes)`, the seconds to exchange that many bytes with the neighbours; collective.
LinkCost link_cost_of(const std::function<double(int64_t)>& probe, const Agree& agree);

// The number of flags that a workspace needs for a ring.
int ring_flags(int world_size, int hosts);

// The number of pieces that a rank's rows are cut into. Minimises the time to fill the pipeline (bytes *
// seconds_per_byte / n) plus the latencies (n * latency_s): n = sqrt(bytes * seconds_per_byte / latency_s);
// derived. A GEMM's piece has at least a tile's rows, and two streams share an even number.
int ring_pieces(int64_t bytes, int64_t rows, bool with_matmul, int hosts, const LinkCost& cost,
                const RingOptions& options);

// The number of pieces of a message that is read whole (a send). Pieces only let more urgent chunks pass, so
// each takes 8 ms on the link.
int ring_send_pieces(int64_t bytes, int hosts, const LinkCost& cost, const RingOptions& options);

// Says why a ring of that many hosts cannot cut rows into that many pieces; empty if it can.
std::string why_no_ring_of_pieces(int pieces, int hosts);

// Half and twice the usual number of pieces, as far as a ring of that many hosts allows them.
std::vector<int> other_ring_pieces(int usual, int hosts);

}  // namespace pyruntime
