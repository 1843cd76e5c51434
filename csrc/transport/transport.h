// Moves rows between the ranks of a group, chunk by chunk, and says when they have arrived.
//
// The unit is an op in flight. Its verbs:
//
//     flight = transport.gather(...)      claims memory; other flights of the group may be under way
//     flight.memory(c)  ... write ...     flight.publish(c)      a chunk of this rank may leave
//     flight.wait(c)  ... read flight.memory(c) ...              a chunk of another rank has arrived
//     flight.finish()                     this rank has read all it wanted: the memory may be used again
//
// All ranks of a group must begin the same flights in the same order; otherwise an error names the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/account.h"
#include "transport/dealt_rows.h"
#include "transport/descriptor.h"
#include "transport/group_context.h"

namespace pyruntime {

class DeviceSharing;
struct FusedGemm;

// A gather: every rank offers its rows, and any rank reads any other's.
class GatherFlight {
 public:
  virtual ~GatherFlight() = default;

  // The order to visit chunks in: this rank's rows first, whole; then the others' as they should arrive.
  virtual const std::vector<Chunk>& order() const = 0;
  // This rank's rows in the chunks in which they leave.
  virtual const std::vector<Chunk>& own() const = 0;
  // The chunk's memory: to be written before publish() if it is this rank's, else valid after wait().
  virtual at::Tensor memory(const Chunk& chunk) = 0;
  virtual void publish(const Chunk& chunk) = 0;
  // Publishes chunks of own(). On devices all rows then travel in one operation, or are announced by one
  // signal, and arrive together: each rank's own costs more if nobody uses rows before the last have come.
  virtual void publish_together(const std::vector<Chunk>& own) {
    for (const Chunk& chunk : own) publish(chunk);
  }
  virtual void wait(const Chunk& chunk) = 0;
  // Waits for several chunks of other ranks; on devices of one host in one launch, if they are all of them.
  virtual void wait_together(const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) wait(chunk);
  }
  // Whether wait() would return at once; false also if that is unknown.
  virtual bool has_come(const Chunk& /*chunk*/) const { return false; }
  // The journey of a chunk, after wait() while the ledger is on.
  virtual Travelled travelled(const Chunk& /*chunk*/) const { return {}; }
  // Multiplies all rows in one kernel that waits for the others' rows; `GEMM.a` has this rank's. Called after
  // publish(), once for each weight; only if DeviceSharing::why_not_fused() is empty.
  virtual void multiply(const FusedGemm& gemm);
  virtual void finish() = 0;
};

// A scatter: every rank writes its part of all rows. Each owner gets the sum of its own rows over the ranks
// and then, if requested, everybody's sums.
class ScatterFlight {
 public:
  virtual ~ScatterFlight() = default;

  // The order to write parts in: others' rows first; this rank's last, while the others' parts travel.
  virtual const std::vector<Chunk>& order() const = 0;
  // The memory of this rank's part of the chunk, [row_blocks, chunk.rows * inner, width]; on devices also of
  // several owners' chunks as one, if their memory is one piece.
  virtual at::Tensor part(const Chunk& chunk) = 0;
  virtual void publish(const Chunk& chunk) = 0;
  // Publishes several chunks; see GatherFlight::publish_together().
  virtual void publish_together(const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) publish(chunk);
  }
  // Waits for the others' parts of this rank's rows and sums them, adding bias [width] once, into contiguous
  // out [row_blocks, own rows * inner, width]; with everybody's sums out is not used: see sum().
  virtual void reduce(const at::Tensor& out, const at::Tensor& bias) = 0;
  // Whether reduce() can run on a device beside what the caller's stream gets from now on: only without
  // everybody's sums.
  virtual bool can_reduce_beside() const { return false; }
  // Does so in place of reduce(); the caller's stream waits in finish(). Only if can_reduce_beside().
  virtual void reduce_beside(const at::Tensor& out, const at::Tensor& bias);
  // Whether reduce() would not wait; false also if that is unknown.
  virtual bool parts_have_come() const { return false; }
  // Does all of this in one kernel instead of part(), publish() and reduce(): `GEMM.a` has all rows,
  // `GEMM.out` gets the sums of this rank's. Other ranks need not do the same. Only if
  // DeviceSharing::why_not_fused() is empty.
  virtual void multiply(const FusedGemm& gemm);

  // For all_reduce, after reduce(): the order of the sums of all rows, this rank's first.
  virtual const std::vector<Chunk>& sums_order() const = 0;
  virtual void wait_for_sum(const Chunk& chunk) = 0;
  // Whether wait_for_sum() would return at once; false also if that is unknown.
  virtual bool sum_has_come(const Chunk& /*chunk*/) const { return false; }
  // The journey of a sum, after wait_for_sum() while the ledger is on.
  virtual Travelled travelled(const Chunk& /*chunk*/) const { return {}; }
  virtual at::Tensor sum(const Chunk& chunk) = 0;
  virtual void finish() = 0;
};

// A deal: every rank sends some of its rows to each rank, and all ranks know how many (DealtRows). All rows
// travel together. Views are [row_blocks, rows * inner, width].
class DealFlight {
 public:
  virtual ~DealFlight() = default;

  // Where this rank writes its rows before publish(): those for rank 0 first, then those for rank 1, ...
  virtual at::Tensor leaving() = 0;
  virtual void publish() = 0;
  // Waits for the rows of all ranks.
  virtual void wait() = 0;
  // The rows for this rank, after wait(): those of rank 0 first, then those of rank 1, ...
  virtual at::Tensor arrived() = 0;
  virtual void finish() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) = 0;
  // `all`: everybody's sums will be read; all ranks must agree on this.
  virtual std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) = 0;
  // The same, but only `rows` of the descriptor's rows travel, in ascending order and the same on all ranks.
  // The same rank sums each of them in the same order as it would among all rows. Chunks count these rows.
  // Only if scatters_some(), which is the same on all ranks.
  virtual std::unique_ptr<ScatterFlight> scatter_some(const FlightDescriptor& descriptor, bool all,
                                                      const std::vector<int64_t>& rows);
  virtual bool scatters_some() const { return false; }
  // Only if why_not_deal() is empty. `rows`: the same on all ranks; `descriptor.rows` counts all of them.
  virtual std::unique_ptr<DealFlight> deal(const FlightDescriptor& descriptor, const DealtRows& rows);
  // Says why rows cannot be dealt; empty if they can. The answer is the same on all ranks.
  virtual std::string why_not_deal() const;
  // For how many ranks a gathered row comes from another host at once; a dealt one comes for one.
  virtual int ranks_of_rail() const { return 1; }
  // The number of rows that each rank has; `descriptor.rows` is kUnknownRows.
  virtual std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) = 0;

  // Says why rows travel whole, so that no GEMM can run while some are under way; empty if they travel in
  // chunks. The answer is the same on all ranks.
  virtual std::string why_not_chunked() const { return {}; }
  // Says why a rank's rows cannot travel in that many pieces (FlightDescriptor::pieces); empty if they can.
  // The answer is the same on all ranks.
  virtual std::string why_not_pieces(int pieces) const;
  // Numbers of pieces worth trying besides the one that the transport chooses for such a flight. The answer
  // is the same on all ranks.
  virtual std::vector<int> other_pieces(const FlightDescriptor& /*descriptor*/) const { return {}; }
  // The transport's fused kernels; nullptr without any.
  virtual DeviceSharing* device_sharing() { return nullptr; }

  // Waits until everything that this rank has to send has arrived: peers may still need it.
  virtual void flush() {}
  // Does flush(), then tells the peers that this process will end.
  virtual void leave() {}

  virtual bool crosses_hosts() const = 0;
  // The transport in words, for people: its medium and the number of hosts.
  virtual std::string description() const = 0;
  virtual int64_t workspace_bytes() const = 0;

  GroupContext& context() const { return context_; }
  int rank() const { return context_.rank; }
  int world_size() const { return context_.world_size; }

 protected:
  explicit Transport(GroupContext& context) : context_(context) {}
  GroupContext& context_;
};

}  // namespace pyruntime
