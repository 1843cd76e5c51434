// The common parts of all flights: slots, the order of chunks, and error messages.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "core/chunk_plan.h"
#include "core/job/failure_board.h"
#include "transport/transport.h"

namespace pyruntime {

// The number of ops of one group that may be in flight at once. Op number n works in slot n % kSlots.
inline constexpr int kSlots = 4;

// A slot has no memory or at least this much, and grows to powers of two: seldom, as growing is collective.
inline constexpr int64_t kLeastSlotBytes = int64_t{1} << 16;
// The smallest power of two that is not below `size`.
inline int64_t power_of_two(int64_t size) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(size)));
}

// A gather that visits each rank's rows whole, starting with this rank's.
class GatherByRank : public GatherFlight {
 public:
  const std::vector<Chunk>& order() const override { return order_; }
  const std::vector<Chunk>& own() const override { return own_; }

 protected:
  GatherByRank(const GroupContext& context, const FlightDescriptor& descriptor);

  FlightDescriptor descriptor_;
  ChunkPlan plan_;

 private:
  std::vector<Chunk> order_;
  std::vector<Chunk> own_;
};

// A scatter that visits each rank's rows whole, this rank's last; the sums start with this rank's.
class ScatterByRank : public ScatterFlight {
 public:
  const std::vector<Chunk>& order() const override { return order_; }
  const std::vector<Chunk>& sums_order() const override { return sums_order_; }

 protected:
  ScatterByRank(const GroupContext& context, const FlightDescriptor& descriptor, bool all);
  ScatterByRank(const FlightDescriptor& descriptor, bool all, ChunkPlan plan);

  FlightDescriptor descriptor_;
  bool all_;  // every rank wants everybody's sums
  double begun_ = monotonic_seconds();
  ChunkPlan plan_;

 private:
  std::vector<Chunk> order_;
  std::vector<Chunk> sums_order_;
};

// A view of a chunk of a flight in the memory of `device`.
at::Tensor view_of(char* memory, const FlightDescriptor& descriptor, const Chunk& chunk,
                   c10::Device device = c10::kCPU);

// Some chunks of a flight, joined: see joined().
struct JoinedChunk {
  Chunk lines;  // all of them; its owner is the first one's
  std::vector<Chunk> chunks;
};

// `order`, joined where `memory_of` gives one piece of memory on a device; on the CPU as it is.
std::vector<JoinedChunk> joined_on(c10::Device device, const std::vector<Chunk>& order,
                                   const std::function<at::Tensor(const Chunk&)>& memory_of);

// Gathers the row count of each rank, when `rows` is unknown.
FlightDescriptor rows_held_descriptor(const FlightDescriptor& descriptor, int world_size);
std::vector<int64_t> gather_rows_held(GatherFlight& flight, int64_t own_rows, int rank, int world_size);

// Copies the sums of all rows into out [blocks, rows * inner, *] as they arrive, of a flight begun at
// `begun`.
void take_sums(ScatterFlight& flight, GroupContext& context, Op op, double begun, const at::Tensor& out,
               int64_t inner);

// A failure after which the ranks of the group are out of step.
Failure failure_of(const GroupContext& context, CommErrorKind kind, std::string message);
// "all_gather (op 7 of group 'tp')"
std::string flight_text(const GroupContext& context, Op op, uint64_t number);
// "all_gather (op 7 of group 'tp'), rank 0 waiting for rank 1 to WHAT"
std::string waiting_text(const GroupContext& context, Op op, uint64_t number, int peer,
                         const std::string& what);
// Quotes the calls of this rank and of the peer.
std::string disagreement_text(const GroupContext& context, uint64_t number, const FlightDescriptor& ours,
                              int peer, const FlightDescriptor& theirs);

// Raises RuntimeError in a fork of the process that opened the group.
void check_process(const GroupContext& context, pid_t opener);
// Raises RuntimeError if the slot of the next flight is taken; `where` may name a device.
void check_slot_is_free(const GroupContext& context, bool is_free, Op op, const std::string& where = "");
// Raises CommError: no op may begin any more, because of `why`.
[[noreturn]] void raise_out_of_step(const GroupContext& context, const std::string& why);

}  // namespace pyruntime
