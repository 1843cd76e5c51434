#include "all_gather_matmul.cuh"
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

}  // namespace pyruntime::portable

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  return guarded("all_gather_matmul", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    check_gather(view, matmul);
    require(matmul->m == 0 || matmul->n == 0 || matmul->c != nullptr, "c is a null pointer.");
    const ChunkPlan plan(matmul->m, view.world_size(), view.rank);
    PyruntimeMatmul request = *matmul;
    // Room for the waits and signals of this rank's own puts: while all multiprocessors are full of blocks
    // that wait for the others' puts, and those of the others likewise, nobody ever sends.
    if (view.world_size() > 1 && request.spare_blocks == 0) request.spare_blocks = 1;
    launch_job(request, plan.gather_order(), stream, [&](const TileSchedule& schedule, auto matrices) {
      using T = typename decltype(matrices)::Element;
      return GatherJob<T>{schedule, request.k, matrices, view};
    });
  });
}
