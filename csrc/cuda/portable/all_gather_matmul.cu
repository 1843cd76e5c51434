#include "all_gather_matmul.cuh"
#include "launch.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace pyruntime::portable {

void check_gather(const Group& group, const PyruntimeMatmul* matmul) {
  check_matmul(matmul);
  require(matmul->layout != PYRUNTIME_TN, "layout 2 (TN) gathers no rows; use NT or NN.");
  const int64_t bytes = matmul->m * padded_width(matmul->k) * element_bytes(matmul->dtype);
  require(bytes <= group.layout.slot_bytes, "the rows of all ranks take ", bytes, " bytes and a slot has ",
          group.layout.slot_bytes, "; ask pyruntime_gather_workspace() for its shape.");
  require(
      rows_of_rank(matmul->m, group.world_size(), group.rank) == 0 || matmul->k == 0 || matmul->a != nullptr,
      "a is a null pointer.");
}

}  // namespace pyruntime::portable

int pyruntime_gather_workspace(int32_t world_size, int64_t m, int64_t k, int32_t dtype, int32_t pieces,
                               PyruntimeWorkspace* out) {
  return guarded("gather_workspace", [&] {
    check_dtype(dtype, /*with_fp32=*/false);
    require(m >= 0 && k >= 0, "m=", m, ", k=", k, "; sizes must not be negative.");
    require(pieces >= 1, "pieces=", pieces, "; the rows of a rank travel in at least one.");
    require(out != nullptr, "there is nowhere to write the shape.");
    *out = {world_size, pieces, m * padded_width(k) * element_bytes(dtype)};
    check_workspace(out);
  });
}

int pyruntime_gathered(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void** data,
                       int64_t* pitch) {
  return guarded("gathered", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    check_gather(view, matmul);
    require(data != nullptr && pitch != nullptr, "there is nowhere to write the answer.");
    *data = view.data<void>(view.rank);
    *pitch = padded_width(matmul->k);
  });
}

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, int32_t hold,
                                void* stream) {
  return guarded("all_gather_matmul", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    check_gather(view, matmul);
    require(matmul->m == 0 || matmul->n == 0 || matmul->c != nullptr, "c is a null pointer.");
    with_tiles(matmul->tiles, [&](auto tiles) {
      with_dtype(matmul->dtype, [&](auto element) {
        using T = decltype(element);
        using Config = decltype(tiles);
        const ChunkPlan plan(matmul->m, view.world_size(), view.rank);
        const GatherJob<T> job{
            make_schedule(plan.gather_order(), matmul->n, Config::kTileRows, Config::kTileColumns), matmul->k,
            matrices_of<T>(*matmul), view, hold != 0};
        PyruntimeMatmul request = *matmul;
        // Room for this rank's own push and its signals: while all multiprocessors were full of blocks that
        // wait for the others' pushes, and those of the others likewise, nobody would ever send.
        if (view.world_size() > 1 && request.spare_blocks == 0) request.spare_blocks = 1;
        launch_tiles<Config>(job, request, static_cast<runtime::Stream>(stream));
      });
    });
  });
}
