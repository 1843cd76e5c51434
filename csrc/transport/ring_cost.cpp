// What the link costs, and into how many pieces that cuts a chunk.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/failure_board.h"
#include "transport/ring_transport.h"

namespace pyruntime {

namespace {

constexpr int kMaxPieces = 64;
constexpr int64_t kTileRows = 64;  // fewer rows than this make a GEMM slow
// Chunks too small to keep the link busy two at a time may be under way in as many bytes as the link carries
// in this many latencies.
constexpr double kWindowLatencies = 4.0;
constexpr int64_t kMostWindowBytes = 1 << 20;
// No link of a process group is faster than 1 TB/s; a measurement may be.
constexpr double kLeastSecondsPerByte = 1e-12;

}  // namespace

int ring_flags(int world_size, int hosts) {
  return (world_size + hosts) * kMaxPieces;
}

int ring_pieces(int64_t bytes, int64_t rows, bool with_matmul, int hosts, const LinkCost& cost,
                const RingOptions& options) {
  const double transfer_s = static_cast<double>(bytes) * cost.seconds_per_byte;
  const double wanted = options.chunk_bytes > 0
                            ? static_cast<double>(bytes) / static_cast<double>(options.chunk_bytes)
                            : std::sqrt(transfer_s / cost.latency_s);
  int64_t pieces = std::clamp<int64_t>(std::llround(std::ceil(wanted)), 1, kMaxPieces);
  const int streams = hosts > 2 ? 2 : 1;
  pieces = (pieces + streams - 1) / streams * streams;
  if (with_matmul && options.chunk_bytes == 0) {
    pieces = std::min(pieces, std::max<int64_t>(1, rows / kTileRows) / streams * streams);
  }
  return static_cast<int>(std::max<int64_t>(streams, pieces));
}

std::string why_no_ring_of_pieces(int pieces, int hosts) {
  if (pieces < 1 || pieces > kMaxPieces)
    return "a rank's rows are cut into 1 to " + std::to_string(kMaxPieces) + " chunks";
  if (hosts > 2 && pieces % 2 != 0)
    return "chunks go both ways round a ring of " + std::to_string(hosts) +
           " hosts, which takes an even number of them";
  return "";
}

std::vector<int> other_ring_pieces(int usual, int hosts) {
  const int streams = hosts > 2 ? 2 : 1;
  const int half = (usual / 2 + streams - 1) / streams * streams;
  std::vector<int> others;
  for (const int pieces : {half, usual * 2}) {
    if (pieces != usual && why_no_ring_of_pieces(pieces, hosts).empty()) others.push_back(pieces);
  }
  return others;
}

std::string RingTransport::why_not_pieces(int pieces) const {
  return why_no_ring_of_pieces(pieces, layout().hosts());
}

std::vector<int> RingTransport::other_pieces(const FlightDescriptor& descriptor) const {
  return other_ring_pieces(pieces_for(descriptor), layout().hosts());
}

int RingTransport::pieces_for(const FlightDescriptor& descriptor) const {
  if (descriptor.pieces > 0) return descriptor.pieces;
  const int64_t rows =
      rows_of_rank(descriptor.rows, world_size(), std::max(0, descriptor.holder), descriptor.holder);
  const bool with_matmul = descriptor.op == Op::kAllGatherMatmul ||
                           descriptor.op == Op::kMatmulReduceScatter || descriptor.op == Op::kMatmulAllReduce;
  return ring_pieces(rows * descriptor.row_bytes(), rows * descriptor.row_blocks * descriptor.inner,
                     with_matmul, layout().hosts(), cost_, options_);
}

// Measured once for a set of hosts; all ranks must know it, or all measure.
void RingTransport::settle_cost(const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
  std::string hosts;
  for (const std::string& name : parts_.host_names) hosts += name + "\n";
  const std::optional<std::pair<double, double>> known = arbiter().known_cost(hosts);
  const LinkCost own = known ? LinkCost{known->first, known->second} : LinkCost{0, 0};
  const std::vector<double> agreed = agree({known ? 0.0 : 1.0, own.latency_s, own.seconds_per_byte});
  if (agreed[0] == 0) {
    cost_ = {agreed[1], agreed[2]};
  } else {
    measure(agree);
    arbiter().remember_cost(hosts, {cost_.latency_s, cost_.seconds_per_byte});
  }
  arbiter().ensure_window_bytes(std::min(
      kMostWindowBytes, static_cast<int64_t>(kWindowLatencies * cost_.latency_s / cost_.seconds_per_byte)));
}

// Every rank sends to its neighbour downstream and receives from the one upstream, so the link is measured
// as it will be used. The time of a small message is the latency; the slope from there to one that takes
// about kProbeSeconds gives the seconds per byte. The least of a few each, as whatever else the machine
// does only ever adds; then the slowest rank's for all.
void RingTransport::measure(const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
  constexpr int64_t kSmall = 1 << 10, kMedium = 1 << 16, kLargest = 1 << 22;
  constexpr double kProbeSeconds = 20e-3;
  constexpr int kRepeats = 8;
  std::vector<char> out(kLargest, 1), in(kLargest);
  const auto least = [&](int64_t bytes) {
    double seconds = exchange_probe(in, out, bytes);
    for (int i = 1; i < kRepeats; ++i) seconds = std::min(seconds, exchange_probe(in, out, bytes));
    return seconds;
  };
  const std::vector<double> first = agree({least(kSmall), least(kMedium)});
  const double scale = std::max(1.0, kProbeSeconds / first[1]);
  const int64_t large = std::min(kLargest, static_cast<int64_t>(scale * kMedium));
  const double latency = std::max(10e-6, first[0]);
  const double slope = (least(large) - first[0]) / static_cast<double>(large - kSmall);
  cost_ = {latency, std::max(kLeastSecondsPerByte, agree({slope})[0])};
}

double RingTransport::exchange_probe(std::vector<char>& in, const std::vector<char>& out, int64_t bytes) {
  const RingStream stream = ring_streams(layout().hosts(), layout().host(), 2).front();
  const double start = monotonic_seconds();
  auto coming = parts_.link->receive(in.data(), bytes, rank_of_host(stream.upstream), kProbeTag);
  auto going = parts_.link->send(out.data(), bytes, rank_of_host(stream.downstream), kProbeTag);
  try {
    coming->wait(context_.deadline_seconds);
    going->wait(context_.deadline_seconds);
  } catch (const std::exception& error) {
    const bool late = monotonic_seconds() - start >= context_.deadline_seconds;
    raise_for_all({late ? CommErrorKind::kTimeout : CommErrorKind::kPeerLost,
                   "opening group '" + context_.name + "', rank " + std::to_string(context_.own_rank()) +
                       " measuring the link to its neighbours: " + first_line(error.what()),
                   context_.name});
  }
  return monotonic_seconds() - start;
}

}  // namespace pyruntime
