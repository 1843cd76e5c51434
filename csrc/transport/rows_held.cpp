#include "transport/rows_held.h"

namespace pyruntime {

std::vector<int64_t> rows_held_by_gather(Transport& transport, const FlightDescriptor& descriptor) {
  const int64_t ranks = transport.world_size();
  const FlightDescriptor numbers{
      descriptor.op, static_cast<int32_t>(c10::ScalarType::Long), ranks, 1, 1, 1, false, 1};
  const std::unique_ptr<GatherFlight> flight = transport.gather(numbers);
  flight->memory(flight->own().front()).fill_(descriptor.own_rows);
  flight->publish(flight->own().front());
  std::vector<int64_t> held(ranks);
  for (const Chunk& chunk : flight->order()) {
    if (chunk.owner != transport.rank()) flight->wait(chunk);
    held[chunk.owner] = flight->memory(chunk).item<int64_t>();
  }
  flight->finish();
  return held;
}

}  // namespace pyruntime
