// Computes who sends which piece to whom, and in which order, when a group spans hosts. Pure functions of
// numbers: every rank computes the same schedule, so nothing about it is ever negotiated.
//
// Hosts form a ring. Rank l of a host exchanges only with rank l of the two neighbouring hosts (its *rail*),
// so each byte crosses the network once; inside a host the ranks read each other's memory. A group with one
// rank on each host is a ring with one rail.
//
// Two hosts have one stream, from each to the other. More hosts have two, one in each direction, and each
// takes half of the pieces: both directions of a full-duplex link are busy.
//
//     gather    host h sends the rows of h, h - 1, h - 2, ... in its turn (right-going stream)
//     scatter   the sum for host o starts at o + 1, gets each host's part on the way, and ends at o
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

// The places of a group's ranks. Hosts are numbered in the order of their lowest rank.
class HostLayout {
 public:
  // `host_of` names each rank's host, by rank.
  HostLayout(const std::vector<std::string>& host_of, int rank);

  int hosts() const { return static_cast<int>(ranks_.size()); }
  int host() const { return host_; }              // this rank's
  int local_rank() const { return local_rank_; }  // within the host
  // The same number on every host: see even().
  int ranks_per_host() const { return static_cast<int>(ranks_.front().size()); }
  const std::vector<int>& ranks_of(int host) const { return ranks_[host]; }
  int rank_at(int host, int local_rank) const { return ranks_[host][local_rank]; }
  int on_rail(int host) const { return rank_at(host, local_rank_); }  // this rank's counterpart there
  int host_of(int rank) const { return place_[rank].first; }
  int local_rank_of(int rank) const { return place_[rank].second; }
  // Whether every host has the same number of ranks.
  bool even() const;

  // One rank per "host": the layout of a ring that does not use shared memory.
  static HostLayout one_rank_each(int world_size, int rank);

 private:
  std::vector<std::vector<int>> ranks_;
  std::vector<std::pair<int, int>> place_;  // (host, local rank) by rank
  int host_ = 0;
  int local_rank_ = 0;
};

// One direction round the ring.
struct RingStream {
  int index;
  int upstream;             // the host that this one receives from
  int downstream;           // the host that this one sends to
  std::vector<int> pieces;  // the pieces of each chunk that take this direction
};

// The number of directions round a ring of that many hosts.
inline int ring_directions(int hosts) {
  return hosts > 2 ? 2 : 1;
}

std::vector<RingStream> ring_streams(int hosts, int host, int pieces);

struct RingItem {
  int owner_host;
  int piece;
};

enum class RingPhase { kGather, kScatter };

// The items that one host sends and receives on one stream, in order. Item i >= pieces.size() can leave only
// after item i - pieces.size() has arrived: it is the same rows, one hop earlier.
std::vector<RingItem> ring_sends(RingPhase phase, const RingStream& stream, int hosts, int host);
std::vector<RingItem> ring_receives(RingPhase phase, const RingStream& stream, int hosts);

// Cuts `pieces` into runs that are visited together: 1, 1, 2, 4, .. and then `most` again and again. A GEMM
// of many rows is faster than many of few. But the link idles until the first piece of a scatter is there,
// and the last piece of a gather has no transfer left to hide its GEMM under.
std::vector<int> growing_runs(int pieces, int most);

// gather: this rank's own rows whole, then its host's, then the others' as the ring brings them, up to `most`
// pieces at once, the last ones one by one.
std::vector<Chunk> ring_gather_order(const HostLayout& layout, const ChunkPlan& plan, int most = 1);
// scatter: first what the ring takes first, one by one and then up to `most` at once; this rank's own rows
// last.
std::vector<Chunk> ring_scatter_order(const HostLayout& layout, const ChunkPlan& plan, int most = 1);

}  // namespace pyruntime
