#include "transport/ring/schedule.h"

#include <algorithm>
#include <map>
#include <string>

namespace pyruntime {

namespace {

int around(int host, int hosts) {
  return ((host % hosts) + hosts) % hosts;
}

// +1 for the stream that goes to higher hosts, -1 for the other.
int direction(const RingStream& stream) {
  return stream.index == 0 ? 1 : -1;
}

std::vector<RingItem> items(const RingStream& stream, int hosts, int first_owner) {
  std::vector<RingItem> result;
  for (int step = 0; step + 1 < hosts; ++step) {
    const int owner = around(first_owner - direction(stream) * step, hosts);
    for (const int piece : stream.pieces) result.push_back({owner, piece});
  }
  return result;
}

std::vector<int> shrinking_runs(int pieces, int most) {
  std::vector<int> runs = growing_runs(pieces, most);
  std::reverse(runs.begin(), runs.end());
  return runs;
}

// Runs of one size; the last may be shorter.
std::vector<int> even_runs(int pieces, int most) {
  std::vector<int> runs;
  for (int left = pieces; left > 0; left -= runs.back()) runs.push_back(std::min(most, left));
  return runs;
}

// Appends the chunks of all other hosts in the order of the ring's steps, the streams in turn, on each host
// this rail's rank first. Rows arrive in this order (from ever farther upstream), and parts leave in it (the
// sum for the upstream neighbour has the longest route).
template <typename RunsOfStep>
void append_in_ring_order(std::vector<Chunk>& order, const HostLayout& layout, const ChunkPlan& plan,
                          const RunsOfStep& runs_of_step) {
  const int ranks = layout.ranks_per_host();
  const std::vector<RingStream> streams = ring_streams(layout.hosts(), layout.host(), plan.pieces());
  for (int step = 1; step < layout.hosts(); ++step) {
    std::vector<int> done(streams.size(), 0);
    for (const int run : runs_of_step(step, static_cast<int>(streams.front().pieces.size()))) {
      for (const RingStream& stream : streams) {
        int& first = done[stream.index];
        const int count = std::min(run, static_cast<int>(stream.pieces.size()) - first);
        if (count <= 0) continue;
        const int host = around(layout.host() - direction(stream) * step, layout.hosts());
        for (int rail = 0; rail < ranks; ++rail) {
          const int owner = layout.rank_at(host, (layout.local_rank() + rail) % ranks);
          order.push_back(plan.run(owner, stream.pieces[first], count));
        }
        first += count;
      }
    }
  }
}

// Appends the pieces of this host's ranks, from the next one after this rank to the one `last` ranks after
// it.
void append_own_host(std::vector<Chunk>& order, const HostLayout& layout, const ChunkPlan& plan, int last) {
  for (int step = 1; step <= last; ++step) {
    const int owner = layout.rank_at(layout.host(), (layout.local_rank() + step) % layout.ranks_per_host());
    for (int piece = 0; piece < plan.pieces(); ++piece) order.push_back(plan.piece(owner, piece));
  }
}

}  // namespace

HostLayout::HostLayout(const std::vector<std::string>& host_of, int rank) {
  std::map<std::string, int> known;
  for (size_t peer = 0; peer < host_of.size(); ++peer) {
    const auto [found, is_new] = known.emplace(host_of[peer], static_cast<int>(ranks_.size()));
    if (is_new) ranks_.emplace_back();
    std::vector<int>& ranks = ranks_[found->second];
    place_.emplace_back(found->second, static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(peer));
  }
  host_ = place_[rank].first;
  local_rank_ = place_[rank].second;
}

bool HostLayout::even() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [this](const auto& ranks) { return ranks.size() == ranks_.front().size(); });
}

HostLayout HostLayout::one_rank_each(int world_size, int rank) {
  std::vector<std::string> names;
  for (int peer = 0; peer < world_size; ++peer) names.push_back(std::to_string(peer));
  return HostLayout(names, rank);
}

std::vector<RingStream> ring_streams(int hosts, int host, int pieces) {
  std::vector<RingStream> streams;
  const int count = ring_directions(hosts);
  for (int index = 0; index < count; ++index) {
    const int step = index == 0 ? 1 : -1;
    RingStream stream{index, around(host - step, hosts), around(host + step, hosts), {}};
    // The first stream takes the larger half of an odd number.
    const int begin = index == 0 ? 0 : (pieces + 1) / 2;
    const int end = count == 1 || index == 1 ? pieces : (pieces + 1) / 2;
    for (int piece = begin; piece < end; ++piece) stream.pieces.push_back(piece);
    streams.push_back(std::move(stream));
  }
  return streams;
}

std::vector<RingItem> ring_sends(RingPhase phase, const RingStream& stream, int hosts, int host) {
  return items(stream, hosts, phase == RingPhase::kGather ? host : host - direction(stream));
}

std::vector<RingItem> ring_receives(RingPhase phase, const RingStream& stream, int hosts) {
  // The same that the upstream neighbour sends.
  return ring_sends(phase, stream, hosts, stream.upstream);
}

std::vector<int> growing_runs(int pieces, int most) {
  std::vector<int> runs;
  for (int done = 0; done < pieces; done += runs.back()) {
    runs.push_back(std::min({std::max(1, done), most, pieces - done}));
  }
  return runs;
}

std::vector<Chunk> ring_gather_order(const HostLayout& layout, const ChunkPlan& plan, int most) {
  std::vector<Chunk> order{plan.own()};
  append_own_host(order, layout, plan, layout.ranks_per_host() - 1);
  append_in_ring_order(order, layout, plan, [&](int step, int pieces) {
    return step + 1 == layout.hosts() ? shrinking_runs(pieces, most) : even_runs(pieces, most);
  });
  return order;
}

std::vector<Chunk> ring_scatter_order(const HostLayout& layout, const ChunkPlan& plan, int most) {
  std::vector<Chunk> order;
  append_in_ring_order(order, layout, plan, [&](int step, int pieces) {
    return step == 1 ? growing_runs(pieces, most) : even_runs(pieces, most);
  });
  append_own_host(order, layout, plan, layout.ranks_per_host());
  return order;
}

}  // namespace pyruntime
