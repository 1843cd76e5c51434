// One op on its way round the ring: what its threads share.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

#include "core/arbiter.h"
#include "transport/ring.h"

namespace pyruntime {

// Memory that is kept from flight to flight and only grows.
class Scratch {
 public:
  // Contents are undefined, old pointers too.
  char* claim(int64_t bytes);
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
  int64_t bytes_ = 0;
};

enum class FlightKind { kGather, kScatter, kScatterAll };

// A piece that goes one hop.
struct Hop {
  RingPhase phase;
  int owner_host;
  int piece;
  int64_t bytes;
  char* memory;  // where it comes to, or leaves from
  int after;     // a send: the receive that must have come before, or -1
};

struct StreamState {
  RingStream stream;
  std::vector<Hop> sends;
  std::vector<Hop> receives;
  std::unique_ptr<std::atomic<bool>[]> arrived;             // by receive
  std::vector<std::unique_ptr<PendingTransfer>> receiving;  // by receive
  std::atomic<bool> credit{false};                          // the neighbour downstream has room
  std::atomic<size_t> acknowledged{0};                      // sends

  // The arbiter's thread alone:
  struct Sent {
    std::unique_ptr<PendingTransfer> transfer;
    int64_t bytes;
    double at;
  };
  size_t next_send = 0;
  std::deque<Sent> under_way;
};

// Flags of a flight within its host.
//     gather          piece j of host h's rows is there           h * pieces + j
//     scatter         this rank's part of piece j of rank o       o * pieces + j
//     then, for all   the sum of piece j of host h's rows         (P + h) * pieces + j
class RingFlight {
 public:
  RingFlight(GroupContext& context, const HostLayout& layout, FlightKind kind,
             const FlightDescriptor& descriptor, int pieces, c10::ScalarType wire);

  // Bytes that the workspace needs on each rank.
  int64_t workspace_bytes() const;
  // Lays the hops out in memory once the workspace's flight has begun.
  void lay_out(std::unique_ptr<HostFlight> host, Scratch& scratch);

  const FlightDescriptor& descriptor() const { return descriptor_; }
  const ChunkPlan& plan() const { return plan_; }
  FlightKind kind() const { return kind_; }
  c10::ScalarType wire() const { return wire_; }
  uint64_t number() const { return host_->number(); }
  HostFlight& host() const { return *host_; }
  std::vector<std::unique_ptr<StreamState>>& streams() { return streams_; }

  // Chunks to visit, own host's pieces joined where they lie together.
  const std::vector<Chunk>& order() const { return order_; }
  const std::vector<Chunk>& sums_order() const { return sums_order_; }
  std::vector<Chunk> own_chunks() const;

  // Where this rank can read the chunk (gather, or sums of a scatter), or has its part of it (scatter).
  char* rows_at(const Chunk& chunk);
  char* part_at(int local_rank, const Chunk& chunk);
  int rows_flag(int owner, int piece) const;
  int part_flag(int owner, int piece) const { return owner * plan_.pieces() + piece; }
  int sum_flag(int owner, int piece) const;
  std::vector<int> pieces_of(const Chunk& chunk) const;
  // Nothing travels for such a piece, and nobody waits for it.
  bool is_empty(int owner, int piece) const { return wire_bytes(owner, piece, false) == 0; }

  // A received piece: partial sum of this rank's own piece, and where it came.
  struct OwnPartial {
    const char* memory;
    StreamState* stream;
    size_t index;
  };
  const OwnPartial& own_partial(int piece) const { return own_partials_[piece]; }

  // Whether the hop may leave as far as this host is concerned.
  bool part_is_ready(const StreamState& stream, const Hop& hop) const;
  // Makes the bytes of a hop: sums what this host adds to a partial sum.
  const void* prepare(StreamState& stream, const Hop& hop);
  // Tells this host's ranks that a piece has come.
  void announce(const Hop& hop);

  bool all_acknowledged() const;
  bool finished() const { return finished_.load(); }
  void finish();
  // A partial sum has been made of the host's parts.
  void count_prepared();

 private:
  void add_hops(StreamState& state, RingPhase phase, bool sums);
  int64_t wire_bytes(int owner, int piece, bool partial) const;
  int pieces_at_once() const;
  std::vector<Chunk> joined(std::vector<Chunk> order) const;

  GroupContext& context_;
  const HostLayout& layout_;
  FlightKind kind_;
  FlightDescriptor descriptor_;
  ChunkPlan plan_;
  c10::ScalarType wire_;
  std::vector<Chunk> order_;
  std::vector<Chunk> sums_order_;
  std::unique_ptr<HostFlight> host_;
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<OwnPartial> own_partials_;
  std::atomic<bool> finished_{false};
  std::atomic<int> to_prepare_{1};  // hops that still read the host's memory, and the op
};

}  // namespace pyruntime
