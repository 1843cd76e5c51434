#include "all_gather_matmul.cuh"
#include "core/rings.h"
#include "launch.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace pyruntime::portable {

void check_gather(const Group& group, const PyruntimeMatmul* matmul) {
  check_matmul(matmul);
  const int64_t bytes = matmul->m * padded_width(matmul->k) * element_bytes(matmul->dtype);
  require(bytes <= group.layout.slot_bytes, "the rows of all ranks take ", bytes, " bytes and a slot has ",
          group.layout.slot_bytes, "; make a larger workspace.");
  require(
      rows_of_rank(matmul->m, group.world_size(), group.rank) == 0 || matmul->k == 0 || matmul->a != nullptr,
      "a is a null pointer.");
}

namespace {

std::vector<Chunk> order_of_rows(const PyruntimeGroup& group, int64_t rows) {
  const int world_size = group.shape.world_size;
  if (group.rings == 0) return ChunkPlan(rows, world_size, group.rank).gather_order();
  require(group.rings > 0 && group.ring_orders != nullptr && group.pieces == 2 * group.rings,
          "rings=", group.rings, " and pieces=", group.pieces,
          "; around rings there go two pieces for each, and their orders are needed.");
  std::vector<std::vector<int>> orders;
  for (int ring = 0; ring < group.rings; ++ring) {
    const int32_t* order = group.ring_orders + ring * world_size;
    orders.emplace_back(order, order + world_size);
  }
  const Rings rings(std::move(orders));
  const std::string why_not = rings.why_not(world_size);
  require(why_not.empty(), why_not);
  std::vector<Chunk> chunks = rings.gather_order(ChunkPlan(rows, world_size, group.rank, rings.ways()));
  require(chunks.size() <= PYRUNTIME_MOST_RANKS, "rings=", group.rings, " make ", chunks.size(),
          " chunks of what comes to a rank; a fused GEMM takes ", +PYRUNTIME_MOST_RANKS, ".");
  return chunks;
}

}  // namespace
}  // namespace pyruntime::portable

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  return guarded("all_gather_matmul", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    check_gather(view, matmul);
    require(matmul->m == 0 || matmul->n == 0 || matmul->c != nullptr, "c is a null pointer.");
    PyruntimeMatmul request = *matmul;
    // Leaves room for the waits and signals of this rank's own puts. If all multiprocessors, here and on the
    // other ranks, were full of blocks that wait for puts, no rank could send.
    if (view.world_size() > 1 && request.spare_blocks == 0) request.spare_blocks = 1;
    launch_job(request, order_of_rows(*group, request.m), stream,
               [&](const TileSchedule& schedule, auto matrices) {
                 using T = typename decltype(matrices)::Element;
                 return GatherJob<T>{schedule, request.k, matrices, view};
               });
  });
}
