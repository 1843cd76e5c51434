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
#include <memory>
#include <string>
#include <vector>

#include "transport/account.h"
#include "transport/descriptor.h"
#include "transport/group_context.h"

namespace pyruntime {

class DeviceSharing;
struct FusedGemm;

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
  // After publish(), as often as there are weights; only where DeviceSharing::why_not_fused() is empty.
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
  // DeviceSharing::why_not_fused() is empty.
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
  // Why a rank's rows cannot travel in so many pieces (FlightDescriptor::pieces); empty where they can. An
  // answer for all ranks.
  virtual std::string why_not_pieces(int pieces) const;
  // Numbers of pieces worth trying beside the one that the transport chooses for such a flight. An answer
  // for all ranks.
  virtual std::vector<int> other_pieces(const FlightDescriptor& /*descriptor*/) const { return {}; }
  // Its fused kernels; none: nullptr.
  virtual DeviceSharing* device_sharing() { return nullptr; }

  // Waits until everything that this rank was asked to send has arrived. Peers may still need it to.
  virtual void flush() {}
  // flush(), and says goodbye: this process will end.
  virtual void leave() {}

  virtual bool crosses_hosts() const = 0;
  // In words, for people: over what, between how many hosts.
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
