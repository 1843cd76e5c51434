#include "transport/flights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <unistd.h>
#include <utility>

namespace pyruntime {

void GatherFlight::multiply(const FusedGemm&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask DeviceSharing::why_not_fused() first.");
}

void ScatterFlight::multiply(const FusedGemm&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask DeviceSharing::why_not_fused() first.");
}

void ScatterFlight::reduce_beside(const at::Tensor&, const at::Tensor&) {
  TORCH_CHECK(false, "This flight sums on the caller's stream: ask can_reduce_beside() first.");
}

std::unique_ptr<ScatterFlight> Transport::scatter_some(const FlightDescriptor&, bool,
                                                       const std::vector<int64_t>&) {
  TORCH_CHECK(false, "This transport scatters all rows: ask Transport::scatters_some() first.");
}

std::unique_ptr<DealFlight> Transport::deal(const FlightDescriptor&, const DealtRows&) {
  TORCH_CHECK(false, "This transport deals no rows: ask Transport::why_not_deal() first.");
}

std::string Transport::why_not_deal() const {
  return "rows are dealt between devices only, not by " + description();
}

std::string Transport::why_not_pieces(int) const {
  return "the number of chunks is no choice where they travel by " + description();
}

GatherByRank::GatherByRank(const GroupContext& context, const FlightDescriptor& descriptor)
    : descriptor_(descriptor),
      plan_(descriptor.rows, context.world_size, context.rank, /*pieces=*/1, descriptor.holder),
      order_(plan_.gather_order()),
      own_({plan_.own()}) {}

ScatterByRank::ScatterByRank(const GroupContext& context, const FlightDescriptor& descriptor, bool all)
    : ScatterByRank(descriptor, all, ChunkPlan(descriptor.rows, context.world_size, context.rank)) {}

ScatterByRank::ScatterByRank(const FlightDescriptor& descriptor, bool all, ChunkPlan plan)
    : descriptor_(descriptor),
      all_(all),
      plan_(std::move(plan)),
      order_(plan_.scatter_order()),
      sums_order_(plan_.gather_order()) {}

at::Tensor view_of(char* memory, const FlightDescriptor& descriptor, const Chunk& chunk, c10::Device device) {
  const auto options = at::TensorOptions().dtype(descriptor.scalar_type()).device(device);
  const std::vector<int64_t> sizes = descriptor.sizes_of(chunk);
  if (chunk.rows * descriptor.row_elements() == 0) return at::empty(sizes, options);
  // Without target_device torch would ask the driver, for every chunk and while a graph is captured.
  return at::for_blob(memory, sizes).options(options).target_device(device).make_tensor();
}

std::vector<JoinedChunk> joined_on(c10::Device device, const std::vector<Chunk>& order,
                                   const std::function<at::Tensor(const Chunk&)>& memory_of) {
  std::vector<JoinedChunk> result;
  if (device.is_cpu()) {
    for (const Chunk& chunk : order) result.push_back({chunk, {chunk}});
    return result;
  }
  std::vector<const char*> memory;
  int64_t row_bytes = 0;
  for (const Chunk& chunk : order) {
    const at::Tensor rows = memory_of(chunk);
    memory.push_back(static_cast<const char*>(rows.const_data_ptr()));
    if (chunk.rows > 0) row_bytes = static_cast<int64_t>(rows.nbytes()) / chunk.rows;
  }
  for (const std::vector<size_t>& run : joined(order, memory, row_bytes)) {
    JoinedChunk& all = result.emplace_back();
    for (const size_t place : run) all.chunks.push_back(order[place]);
    all.lines = *std::ranges::min_element(all.chunks, {}, &Chunk::begin);
    all.lines.rows = 0;
    for (const Chunk& chunk : all.chunks) all.lines.rows += chunk.rows;
  }
  return result;
}

FlightDescriptor rows_held_descriptor(const FlightDescriptor& descriptor, int world_size) {
  return {descriptor.op, static_cast<int32_t>(c10::ScalarType::Long), world_size, 1, 1, 1, false, 1};
}

std::vector<int64_t> gather_rows_held(GatherFlight& flight, int64_t own_rows, int rank, int world_size) {
  for (const Chunk& chunk : flight.own()) {
    if (chunk.rows > 0) flight.memory(chunk).fill_(own_rows);
    flight.publish(chunk);
  }
  std::vector<int64_t> held(world_size);
  for (const Chunk& chunk : flight.order()) {
    if (chunk.owner != rank) flight.wait(chunk);
    if (chunk.rows > 0) held[chunk.owner] = flight.memory(chunk).item<int64_t>();
  }
  flight.finish();
  return held;
}

void take_sums(ScatterFlight& flight, GroupContext& context, Op op, double begun, const at::Tensor& out,
               int64_t inner) {
  for (const Chunk& chunk : flight.sums_order()) {
    Reading reading(context, op, chunk.owner, begun, out.device());
    flight.wait_for_sum(chunk);
    const at::Tensor sums = flight.sum(chunk);
    if (chunk.owner != context.rank) {
      reading.came(static_cast<int64_t>(sums.nbytes()), flight.travelled(chunk));
    }
    const Spending copying(context, Entered::kCopy, name_of(op), /*peer=*/-1, out.device());
    out.narrow(1, chunk.begin * inner, chunk.rows * inner).copy_(sums);
  }
}

Failure failure_of(const GroupContext& context, CommErrorKind kind, std::string message) {
  return {kind, std::move(message), context.process_group};
}

std::string flight_text(const GroupContext& context, Op op, uint64_t number) {
  return std::string(name_of(op)) + " (op " + std::to_string(number) + " of group '" + context.name + "')";
}

std::string waiting_text(const GroupContext& context, Op op, uint64_t number, int peer,
                         const std::string& what) {
  return flight_text(context, op, number) + ", " + context.own_name() + " waiting for " +
         context.name_of(peer) + " to " + what;
}

std::string disagreement_text(const GroupContext& context, uint64_t number, const FlightDescriptor& ours,
                              int peer, const FlightDescriptor& theirs) {
  const bool other_pass = ours.pass != theirs.pass;
  const auto pass = [&](const FlightDescriptor& of) -> std::string {
    if (!other_pass) return "";
    return (of.pass % 2 == 0 ? " in forward pass " : " in backward pass ") + std::to_string(of.pass / 2 + 1);
  };
  return "Ranks disagree on op " + std::to_string(number) + " of group '" + context.name +
         "': " + context.own_name() + " called " + ours.text() + pass(ours) + " and " +
         context.name_of(peer) + " called " + theirs.text() + pass(theirs) +
         "; all ranks must call the same ops with the same shapes and dtypes, in the same order." +
         (other_pass || ours.failed_passes != theirs.failed_passes
              ? " One of them may have left a forward or backward pass by an exception that was caught: let "
                "such an exception end the program."
              : "");
}

void check_process(const GroupContext& context, pid_t opener) {
  TORCH_CHECK(getpid() == opener, "Group '", context.name, "' was opened by process ", opener,
              " and is used by its fork ", getpid(), "; start ranks as processes of their own.");
}

void check_slot_is_free(const GroupContext& context, bool is_free, Op op, const std::string& where) {
  TORCH_CHECK(is_free, "Group '", context.name, "' already has ", kSlots, " ops in flight", where,
              "; finish one before beginning ", name_of(op), ".");
}

void raise_out_of_step(const GroupContext& context, const std::string& why) {
  raise_comm_error(CommErrorKind::kBroken,
                   "Group '" + context.name +
                       "' cannot go on: its ranks are out of step since an earlier error (" + why +
                       "); close it on all ranks and start anew.");
}

}  // namespace pyruntime
