// One op on its way round the ring: the state that its threads share.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/flights.h"
#include "transport/host/host_workspace.h"
#include "transport/host/scratch.h"
#include "transport/ring/point_to_point.h"
#include "transport/ring/schedule.h"

namespace pyruntime {

class Arbiter;
class Control;

enum class FlightKind { kGather, kScatter, kScatterAll };

// A piece on one hop.
struct Hop {
  RingPhase phase;
  int owner_host;
  int piece;
  int64_t bytes;
  char* memory;  // where it arrives, or leaves from
  int after;     // for a send: the receive that must have arrived before; else -1
};

struct StreamState {
  RingStream stream;
  std::vector<Hop> sends;
  std::vector<Hop> receives;
  std::unique_ptr<std::atomic<bool>[]> arrived;  // by receive
  std::vector<Travelled> travelled;              // by receive; valid once it has arrived
  std::vector<PendingTransfer> receiving;        // by receive
  std::atomic<bool> credit{false};               // the downstream neighbour has room
  std::atomic<size_t> acknowledged{0};           // number of sends acknowledged

  bool all_acknowledged() const { return acknowledged.load() == sends.size(); }

  // Only the arbiter's thread:
  struct Sent {
    PendingTransfer transfer;
    int64_t bytes;
    double at;
  };
  size_t next_send = 0;
  std::deque<Sent> under_way;
};

// A flight within a ring. Its flags within the host:
//     gather          piece j of host h's rows is there           h * pieces + j
//     scatter         this rank's part of piece j of rank o       o * pieces + j
//     then, for all   the sum of piece j of host h's rows         (P + h) * pieces + j
class RingFlight {
 public:
  // `announced` is the descriptor that ranks compare.
  RingFlight(const HostLayout& layout, FlightKind kind, const FlightDescriptor& descriptor,
             const FlightDescriptor& announced, ChunkPlan plan, c10::ScalarType wire);

  // The bytes that the workspace needs on each rank.
  int64_t workspace_bytes() const;
  // Lays the hops out in memory once the workspace's flight has begun.
  void lay_out(std::unique_ptr<HostFlight> host, Scratch& scratch);

  const FlightDescriptor& descriptor() const { return descriptor_; }
  const FlightDescriptor& announced() const { return announced_; }
  const ChunkPlan& plan() const { return plan_; }
  FlightKind kind() const { return kind_; }
  c10::ScalarType wire() const { return wire_; }
  uint64_t number() const { return host_->number(); }
  double begun() const { return begun_; }
  HostFlight& host() const { return *host_; }
  std::vector<std::unique_ptr<StreamState>>& streams() { return streams_; }

  // The chunks to visit; pieces of this host are joined if they are contiguous.
  const std::vector<Chunk>& order() const { return order_; }
  const std::vector<Chunk>& sums_order() const { return sums_order_; }
  std::vector<Chunk> own_chunks() const;

  // The memory where this rank reads the chunk (gather, or sums), or has its part of it (scatter).
  char* rows_at(const Chunk& chunk);
  char* part_at(int local_rank, const Chunk& chunk);
  // The flag that says that the rows, or in a scatter their sums, are there.
  int rows_flag(int owner, int piece) const;
  int part_flag(int owner, int piece) const { return owner * plan_.pieces() + piece; }
  std::vector<int> pieces_of(const Chunk& chunk) const;
  // The bytes of a piece on the wire; `partial`: of its partial sums.
  int64_t wire_bytes(int owner, int piece, bool partial) const;
  // Whether nothing travels for this piece, so that nobody waits for it.
  bool is_empty(int owner, int piece) const { return wire_bytes(owner, piece, false) == 0; }

  // A received partial sum of this rank's own piece, and its arrival.
  struct OwnPartial {
    const char* memory;
    StreamState* stream;
    size_t index;
  };
  const OwnPartial& own_partial(int piece) const { return own_partials_[piece]; }

  // The journey of the chunk's piece that arrived last, or of its sums, while the ledger is on.
  Travelled travelled(const Chunk& chunk) const;

  // Whether the hop may leave, as far as this host is concerned.
  bool part_is_ready(const StreamState& stream, const Hop& hop) const;
  // Makes the bytes of a hop: adds this host's parts to a partial sum.
  const void* prepare(StreamState& stream, const Hop& hop);
  // Tells this host's ranks that a piece has arrived.
  void announce(const Hop& hop);

  // Notes that the downstream neighbour has room for what this rank sends it.
  void give_credit(int peer);
  bool all_acknowledged() const;
  bool finished() const { return finished_.load(); }
  void finish();
  // Counts a partial sum that has been made of the host's parts.
  void count_prepared();

 private:
  void add_hops(StreamState& state, RingPhase phase, bool sums);
  int pieces_at_once() const;
  std::vector<Chunk> joined(std::vector<Chunk> order) const;

  const HostLayout& layout_;
  double begun_ = monotonic_seconds();
  FlightKind kind_;
  FlightDescriptor descriptor_;
  FlightDescriptor announced_;
  ChunkPlan plan_;
  c10::ScalarType wire_;
  std::vector<Chunk> order_;
  std::vector<Chunk> sums_order_;
  std::unique_ptr<HostFlight> host_;
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<OwnPartial> own_partials_;
  std::atomic<bool> finished_{false};
  std::atomic<int> to_prepare_{1};  // hops that still read the host's memory, plus the op
};

// The flights under way. Only the op's thread changes them, so it may look at them without the lock.
class FlightSlots {
 public:
  struct Slot {
    std::shared_ptr<RingFlight> flight;  // the latest flight in the slot
    Scratch scratch;                     // used by the op's thread
  };

  // --- the op's thread
  Slot& of(uint64_t number) { return slots_[number % kSlots]; }
  std::array<Slot, kSlots>& all() { return slots_; }
  const std::array<Slot, kSlots>& all() const { return slots_; }
  void put(const std::shared_ptr<RingFlight>& flight);

  // --- any thread: nullptr if this rank has not begun the flight, or has reused its slot
  std::shared_ptr<RingFlight> find(uint64_t number) const;

 private:
  mutable std::mutex mutex_;  // guards the pointers
  std::array<Slot, kSlots> slots_;
};

// A flight as an op sees it. For the op's thread only.
std::unique_ptr<GatherFlight> make_ring_gather(Control& control, Arbiter& arbiter,
                                               std::shared_ptr<RingFlight> flight);
std::unique_ptr<ScatterFlight> make_ring_scatter(Control& control, Arbiter& arbiter,
                                                 std::shared_ptr<RingFlight> flight);

}  // namespace pyruntime
