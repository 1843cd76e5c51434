#include "transport/ring/cost.h"

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
#include "core/job/failure_board.h"
#include "core/text.h"
#include "transport/flights.h"
#include "transport/ring/ring.h"

namespace pyruntime {

namespace {

constexpr int kMaxPieces = 64;
constexpr int64_t kTileRows = 64;  // fewer rows than this make a GEMM slow
// Chunks too small for two of them to keep the link busy may be under way in larger numbers: as many bytes as
// the link carries in this many latencies.
constexpr double kWindowLatencies = 4.0;
constexpr int64_t kMostWindowBytes = 1 << 20;
constexpr double kSendPieceSeconds = 8e-3;
// No link of a process group is faster than 1 TB/s, but a measurement may say so.
constexpr double kLeastSecondsPerByte = 1e-12;
constexpr int64_t kLargestProbe = 1 << 22;

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
  const int streams = ring_directions(hosts);
  pieces = (pieces + streams - 1) / streams * streams;
  if (with_matmul && options.chunk_bytes == 0) {
    pieces = std::min(pieces, std::max<int64_t>(1, rows / kTileRows) / streams * streams);
  }
  return static_cast<int>(std::max<int64_t>(streams, pieces));
}

int ring_send_pieces(int64_t bytes, int hosts, const LinkCost& cost, const RingOptions& options) {
  RingOptions of_a_send = options;
  if (of_a_send.chunk_bytes == 0) {
    of_a_send.chunk_bytes = std::max<int64_t>(1, std::llround(kSendPieceSeconds / cost.seconds_per_byte));
  }
  return ring_pieces(bytes, /*rows=*/0, /*with_matmul=*/false, hosts, cost, of_a_send);
}

std::string why_no_ring_of_pieces(int pieces, int hosts) {
  if (pieces < 1 || pieces > kMaxPieces)
    return "a rank's rows are cut into 1 to " + std::to_string(kMaxPieces) + " chunks";
  if (pieces % ring_directions(hosts) != 0)
    return "chunks go both ways round a ring of " + std::to_string(hosts) +
           " hosts, which takes an even number of them";
  return "";
}

std::vector<int> other_ring_pieces(int usual, int hosts) {
  const int streams = ring_directions(hosts);
  const int half = (usual / 2 + streams - 1) / streams * streams;
  std::vector<int> others;
  for (const int pieces : {half, usual * 2}) {
    if (pieces != usual && why_no_ring_of_pieces(pieces, hosts).empty()) others.push_back(pieces);
  }
  return others;
}

namespace {

double exchange_probe(const GroupContext& context, const RingParts& parts, std::vector<char>& in,
                      const std::vector<char>& out, int64_t bytes) {
  const HostLayout& layout = parts.layout;
  const RingStream stream = ring_streams(layout.hosts(), layout.host(), 2).front();
  const double start = monotonic_seconds();
  auto coming = parts.link->receive(in.data(), bytes, layout.on_rail(stream.upstream), kProbeTag);
  auto going = parts.link->send(out.data(), bytes, layout.on_rail(stream.downstream), kProbeTag);
  try {
    coming->wait(milliseconds(context.deadline_seconds));
    going->wait(milliseconds(context.deadline_seconds));
  } catch (const std::exception& error) {
    const bool late = monotonic_seconds() - start >= context.deadline_seconds;
    raise_for_all(failure_of(context, late ? CommErrorKind::kTimeout : CommErrorKind::kPeerLost,
                             "opening group '" + context.name + "', " + context.own_name() +
                                 " measuring the link to its neighbours: " + first_line(error.what())));
  }
  return monotonic_seconds() - start;
}

// Sends downstream and receives from upstream, so the link is measured as it will be used.
LinkCost measure(const GroupContext& context, const RingParts& parts, const Agree& agree) {
  std::vector<char> out(kLargestProbe, 1), in(kLargestProbe);
  return link_cost_of([&](int64_t bytes) { return exchange_probe(context, parts, in, out, bytes); }, agree);
}

}  // namespace

// A small message's time is the latency. The slope from it to a message of about kProbeSeconds gives the
// seconds per byte. Each is the least of a few measurements, since other work on the machine only adds time;
// then the slowest rank's counts for all.
// If the large message hardly takes longer, a busy machine or a long route hides the slope, and all is
// measured again with more bytes. In the end the whole time of a message counts as its bytes': more than they
// cost, but a slope of zero would say that they cost nothing.
LinkCost link_cost_of(const std::function<double(int64_t)>& probe, const Agree& agree) {
  constexpr int64_t kSmall = 1 << 10, kMedium = 1 << 16;
  constexpr double kProbeSeconds = 20e-3, kPlainly = 1.5, kAtLeast = 1.1;
  constexpr int kRepeats = 8, kAttempts = 4, kGrowth = 8;
  const auto least = [&](int64_t bytes) {
    double seconds = probe(bytes);
    for (int i = 1; i < kRepeats; ++i) seconds = std::min(seconds, probe(bytes));
    return seconds;
  };
  double small_s = least(kSmall);
  const std::vector<double> first = agree({small_s, least(kMedium)});
  const double scale = std::max(1.0, kProbeSeconds / first[1]);
  int64_t large = std::min(kLargestProbe, static_cast<int64_t>(scale * kMedium));
  for (int attempt = 1;; ++attempt) {
    const std::vector<double> agreed = agree({small_s, least(large)});
    const double latency = std::max(10e-6, agreed[0]), more_s = agreed[1] - agreed[0];
    const bool last = attempt == kAttempts;
    if (agreed[1] >= (last ? kAtLeast : kPlainly) * agreed[0]) {
      return {latency, std::max(kLeastSecondsPerByte, more_s / static_cast<double>(large - kSmall))};
    }
    if (last) return {latency, std::max(kLeastSecondsPerByte, agreed[1] / static_cast<double>(large))};
    small_s = std::min(small_s, least(kSmall));
    large = std::min(kLargestProbe, large * kGrowth);
  }
}

// All ranks must know the cost; otherwise all measure.
LinkCost settle_link_cost(const GroupContext& context, const RingParts& parts, const Agree& agree) {
  std::string hosts;
  for (const std::string& name : parts.host_names) hosts += name + "\n";
  const std::optional<LinkCost> known = parts.arbiter->known_cost(hosts);
  const LinkCost own = known.value_or(LinkCost{0, 0});
  const std::vector<double> agreed = agree({known ? 0.0 : 1.0, own.latency_s, own.seconds_per_byte});
  LinkCost cost{agreed[1], agreed[2]};
  if (agreed[0] != 0) {
    cost = measure(context, parts, agree);
    parts.arbiter->remember_cost(hosts, cost);
  }
  parts.arbiter->ensure_window_bytes(std::min(
      kMostWindowBytes, static_cast<int64_t>(kWindowLatencies * cost.latency_s / cost.seconds_per_byte)));
  return cost;
}

}  // namespace pyruntime
