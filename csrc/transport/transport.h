// Moves rows between the ranks of a group, chunk by chunk, and says when they have arrived.
//
// The unit is an op in flight. Its verbs:
//
//     flight = transport.gather(...)      claims memory; other flights of the group may be under way
//     flight.memory(c)  ... write ...     flight.publish(c)      a chunk of this rank may leave
//     flight.wait(c)  ... read flight.memory(c) ...              a chunk of another rank has arrived
//     flight.finish()                     this rank has read all it wanted: the memory may be used again
//
// All ranks of a group must begin the same flights in the same order; a rank that does not is told so by
// name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include "core/chunk_plan.h"
#include "core/deadline.h"
#include "core/job_ranks.h"
#include "core/ledger.h"
#include "core/traffic.h"

namespace pyruntime {

enum class Op : int32_t {
  kAllGather = 1,
  kReduceScatter,
  kAllReduce,
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kMatmulAllReduce,
  kSend,
  kAllToAll,  // by the process group's own collectives alone
};

const char* name_of(Op op);

// What one rank is about to do. The fields that all ranks must share are compared when ranks first meet in a
// flight.
struct FlightDescriptor {
  Op op;
  int32_t dtype;       // c10::ScalarType
  int64_t rows;        // of the whole operand, over all ranks; kUnknownRows: exchanged through own_rows
  int64_t row_blocks;  // product of the dimensions before the cut one (batch, for dim = 1)
  int64_t inner;       // product of the dimensions between the cut one and the last
  int64_t width;       // size of the last dimension of what travels
  bool with_bias;      // the owners of rows add one to their sums
  int64_t own_rows;    // rows that this rank holds; may differ between ranks
  int32_t holder = kEveryRank;  // the rank that holds all rows
  int64_t agreement = 0;        // of whatever else the ranks must agree on, a digest
  int32_t pieces = 0;           // that a rank's rows travel in; 0: as the transport chooses
  int32_t pass = 0;             // which of the group's forward and backward passes the op is of; see Passes
  int32_t failed_passes = 0;    // see GroupContext

  c10::ScalarType scalar_type() const { return static_cast<c10::ScalarType>(dtype); }
  // Of one row, over all blocks.
  int64_t row_elements() const { return row_blocks * inner * width; }
  int64_t row_bytes() const;
  // One chunk as it lies in memory: contiguous, [row_blocks, chunk.rows * inner, width].
  std::vector<int64_t> sizes_of(const Chunk& chunk) const { return {row_blocks, chunk.rows * inner, width}; }
  // Whether the ranks agree on the op.
  bool agrees_with(const FlightDescriptor& other) const;
  std::string text() const;
  // The same flight of some of the rows, in whose numbers the ranks must agree.
  FlightDescriptor of_some(const std::vector<int64_t>& rows) const;
};

inline constexpr int64_t kUnknownRows = -1;

// The forward and backward passes that a group's ops are of, counted: an even number is a forward pass, an
// odd one a backward pass. A rank that leaves a backward pass by an exception counts fewer ops of it than the
// others, and what it calls next is then of another pass than what they call.
struct Passes {
  int32_t count = 0;
  int graph_task = -1;  // of autograd, -1 in a forward pass
  // The pass that an op of this thread is of, which begins now.
  int32_t now();
};

// Which thread runs an op of a group; see Inside.
struct Occupied {
  pid_t thread = 0;        // 0: none. Atomic
  bool contended = false;  // another tried to begin one meanwhile. Atomic
  int depth = 0;
  Op op = Op::kAllGather;
};

// What a group and its transport share.
struct GroupContext {
  std::string name;
  int rank;
  int world_size;
  double deadline_seconds;
  TrafficClass traffic_class = TrafficClass::kTp;
  int within_class = 0;  // chunks of a lower one leave first
  CommStats stats = {};
  bool link_is_broken = false;  // an op failed with chunks under way, which the link may still hold
  // The group's ranks in its process group, of which it may have some only, and in the job. Empty: the same
  // numbers.
  std::vector<int> process_group_ranks = {};
  std::vector<int> job_ranks = {};
  // Whose ranks are out of step where an op of this group fails: that of its process group.
  std::string process_group = {};
  Occupied inside = {};
  Passes passes = {};
  // Forward passes of a model whose ops are of this group, and backward passes whose gradients travel in it,
  // that this rank has left by an exception. Ranks that have left as many may go on.
  int32_t failed_passes = 0;

  // By which figures and ledgers know it.
  int process_group_rank(int of) const {
    return process_group_ranks.empty() ? of : process_group_ranks.at(of);
  }
  int job_rank(int of) const { return job_ranks.empty() ? of : job_ranks.at(of); }
  // What messages call this rank and another: see JobRanks.
  std::string own_name() const { return JobRanks::instance().name(job_rank(rank)); }
  std::string name_of(int peer) const { return JobRanks::instance().name_and_place(job_rank(peer)); }
};

// A scope in which this rank's thread waits for `peer`, copies or sums for an op of the group: its time is
// counted, and entered in the ledger. What the thread's filler did meanwhile is no waiting.
class Spending {
 public:
  // kind: kWait, kCopy or kSum. `op`: its name, a literal.
  Spending(GroupContext& context, Entered kind, const char* op, int peer = -1)
      : context_(context), kind_(kind), op_(op), peer_(peer), begin_(monotonic_seconds()) {
    take_filled();  // that of waits which nobody counts
  }
  ~Spending();
  Spending(const Spending&) = delete;
  Spending& operator=(const Spending&) = delete;

 private:
  void count(double begin, double end);

  GroupContext& context_;
  Entered kind_;
  const char* op_;
  int peer_;
  double begin_;
};

// How bytes came to this rank from another host: from which rank of the group, when they left it (seconds of
// its host's clock) and when they were here. No rank: another rank received them, or nothing travelled.
struct Travelled {
  int from = -1;
  double left = 0, arrived = 0;
};

// Bytes of a peer that an op of the group reads, from now on wanted. `begin`: when the op began.
class Reading {
 public:
  Reading(GroupContext& context, Op op, int peer, double begin)
      : context_(context),
        op_(op),
        peer_(peer),
        begin_(begin),
        wanted_(Ledger::is_on() ? monotonic_seconds() : 0) {}
  // They are there: they are counted, and entered in the ledger.
  void came(int64_t bytes, const Travelled& travelled = {});

 private:
  GroupContext& context_;
  Op op_;
  int peer_;
  double begin_, wanted_;
};

// Enters bytes of a chunk that went to a peer on another host or came from it.
void enter_transfer(Entered kind, const GroupContext& context, Op op, int peer, int64_t bytes, double begin,
                    double end);

// Counts an op that the process group itself did while this rank's thread waited, from `begin` until now, and
// that brought `bytes` of others; enters it in the ledger.
void count_collective(GroupContext& context, Op op, int64_t bytes, double begin);

// A GEMM whose rows move between the ranks while one kernel computes it: out = a weight^T (+ bias), or
// a weight. Matrices, of one dtype.
struct FusedGemm {
  at::Tensor a;       // [rows, K]
  at::Tensor weight;  // [N, K] where it is transposed, else [K, N]
  bool transposed;
  at::Tensor bias;  // [N] or undefined
  at::Tensor out;   // [rows, N], contiguous
  // One of Transport::tiles(); empty: by the kernel's rule.
  std::string tiles;
};

// Every rank shows its rows; any rank reads any other's.
class GatherFlight {
 public:
  virtual ~GatherFlight() = default;

  // This rank's rows first, whole; then the others' as they are expected to arrive.
  virtual const std::vector<Chunk>& order() const = 0;
  // This rank's rows as they leave.
  virtual const std::vector<Chunk>& own() const = 0;
  // Of this rank, to be written before publish(); of another, valid after wait().
  virtual at::Tensor memory(const Chunk& chunk) = 0;
  virtual void publish(const Chunk& chunk) = 0;
  virtual void wait(const Chunk& chunk) = 0;
  // Whether wait() would return at once; false also where that cannot be told.
  virtual bool has_come(const Chunk& /*chunk*/) const { return false; }
  // After wait(), while the ledger is on.
  virtual Travelled travelled(const Chunk& /*chunk*/) const { return {}; }
  // The GEMM of all rows, of which `GEMM.a` has this rank's, in one kernel that waits for the others'.
  // After publish(), as often as there are weights; only where Transport::why_not_fused() is empty.
  virtual void multiply(const FusedGemm& gemm);
  virtual void finish() = 0;
};

// Every rank writes its part of all rows; each owner gets the sum of its own rows over the ranks, and after
// that, where it was asked for, everybody's sums.
class ScatterFlight {
 public:
  virtual ~ScatterFlight() = default;

  // What others wait for comes first; this rank's own rows last, while the others' parts travel.
  virtual const std::vector<Chunk>& order() const = 0;
  // Where this rank writes its part of the chunk, [row_blocks, chunk.rows * inner, width].
  virtual at::Tensor part(const Chunk& chunk) = 0;
  virtual void publish(const Chunk& chunk) = 0;
  // Waits for the others' parts of this rank's rows and sums them, with bias [width] added once, into
  // out [row_blocks, own rows * inner, width], contiguous. Where everybody's sums are asked for, out is not
  // used: see sum().
  virtual void reduce(const at::Tensor& out, const at::Tensor& bias) = 0;
  // Whether reduce() would not wait; false also where that cannot be told.
  virtual bool parts_have_come() const { return false; }
  // All of that in one kernel, instead of part(), publish() and reduce(): `GEMM.a` has all rows,
  // `GEMM.out` gets the sums of this rank's. Other ranks need not do the same. Only where
  // Transport::why_not_fused() is empty.
  virtual void multiply(const FusedGemm& gemm);

  // For all_reduce, after reduce(): the sums of all rows, this rank's first.
  virtual const std::vector<Chunk>& sums_order() const = 0;
  virtual void wait_for_sum(const Chunk& chunk) = 0;
  // Whether wait_for_sum() would return at once; false also where that cannot be told.
  virtual bool sum_has_come(const Chunk& /*chunk*/) const { return false; }
  // After wait_for_sum(), while the ledger is on.
  virtual Travelled travelled(const Chunk& /*chunk*/) const { return {}; }
  virtual at::Tensor sum(const Chunk& chunk) = 0;
  virtual void finish() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) = 0;
  // `all`: everybody's sums will be asked for, in which all ranks agree.
  virtual std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) = 0;
  // The same, in which only `rows` of the descriptor's travel, in ascending order and the same on all ranks:
  // each is summed by the rank and in the order that it is summed in among all. Chunks count these rows.
  // Only where scatters_some(), an answer for all ranks.
  virtual std::unique_ptr<ScatterFlight> scatter_some(const FlightDescriptor& descriptor, bool all,
                                                      const std::vector<int64_t>& rows);
  virtual bool scatters_some() const { return false; }
  // The rows that every rank holds; `descriptor.rows` is kUnknownRows.
  virtual std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) = 0;

  // Why rows travel whole, so that no GEMM can run while some of them are under way; empty where they travel
  // in chunks. An answer for all ranks.
  virtual std::string why_not_chunked() const { return {}; }

  // Why multiply() cannot be asked of such a flight; empty where it can. An answer for all ranks.
  virtual std::string why_not_fused(const FlightDescriptor& descriptor) const;

  // Why the kernel of a GEMM [rows, *] x [*, n] that could be asked for would find no room beside others
  // that are under way on this rank's device, or may be; empty where it would. Rows are of all ranks. It is
  // asked for all the same where the caller insists, and then waits for them, or cannot be captured.
  virtual std::string why_crowded(int64_t /*rows*/, int64_t /*n*/) const { return {}; }
  // Ops that would have been fused and were not, as why_crowded() said; by rows and n.
  struct Crowding {
    int64_t ops = 0;
    std::string why;  // of the last one
  };
  std::map<std::pair<int64_t, int64_t>, Crowding>& crowding() { return crowding_; }

  // Why a rank's rows cannot travel in so many pieces (FlightDescriptor::pieces); empty where they can. An
  // answer for all ranks.
  virtual std::string why_not_pieces(int pieces) const;
  // Numbers of pieces worth trying beside the one that the transport chooses for such a flight. An answer
  // for all ranks.
  virtual std::vector<int> other_pieces(const FlightDescriptor& /*descriptor*/) const { return {}; }
  // Names of the tiles that a fused GEMM may be asked to be made of (FusedGemm::tiles).
  virtual std::vector<std::string> tiles() const { return {}; }
  // Those that are not what the kernel's rule takes for [rows, k] x [k, n], rows being of all ranks.
  virtual std::vector<std::string> other_tiles(int64_t /*rows*/, int64_t /*n*/, int64_t /*k*/) const {
    return {};
  }

  // Waits until everything that this rank was asked to send has arrived. Peers may still need it to.
  virtual void flush() {}
  // flush(), and says goodbye: this process will end.
  virtual void leave() {}

  virtual bool crosses_hosts() const = 0;
  // Whether what the caller's stream is given goes into a graph, and does not run now.
  virtual bool is_capturing() const { return false; }
  // In words, for people: over what, between how many hosts.
  virtual std::string description() const = 0;
  virtual int64_t workspace_bytes() const = 0;

  GroupContext& context() const { return context_; }
  CommStats& stats() const { return context_.stats; }
  int rank() const { return context_.rank; }
  int world_size() const { return context_.world_size; }

 protected:
  explicit Transport(GroupContext& context) : context_(context) {}
  GroupContext& context_;

 private:
  std::map<std::pair<int64_t, int64_t>, Crowding> crowding_;
};

}  // namespace pyruntime
