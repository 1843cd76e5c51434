#include "launch.cuh"
#include "matmul_reduce_scatter.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

int64_t signals_of_part(int64_t rows, int64_t n) {
  return (rows + PYRUNTIME_SIGNAL_ROWS - 1) / PYRUNTIME_SIGNAL_ROWS *
         ((n + PYRUNTIME_SIGNAL_COLUMNS - 1) / PYRUNTIME_SIGNAL_COLUMNS);
}

template <class Config>
constexpr bool begins_where_signals_do =
    Config::kTileRows % PYRUNTIME_SIGNAL_ROWS == 0 && Config::kTileColumns % PYRUNTIME_SIGNAL_COLUMNS == 0;
static_assert(begins_where_signals_do<SmallTiles> && begins_where_signals_do<LargeTiles>);

}  // namespace

namespace pyruntime::portable {

int64_t part_elements(int64_t m, int64_t n, int world_size) {
  return rows_of_rank(m, world_size, 0) * part_pitch(n);
}

int64_t part_pitch(int64_t n) {
  return (n + 7) / 8 * 8;
}

void check_scatter(const Group& group, const PyruntimeMatmul& matmul) {
  const int world_size = group.world_size();
  const int64_t bytes =
      world_size * part_elements(matmul.m, matmul.n, world_size) * element_bytes(matmul.dtype);
  const int64_t flags = signals_of_part(rows_of_rank(matmul.m, world_size, 0), matmul.n);
  require(bytes <= group.layout.slot_bytes && flags <= group.layout.flags, "the parts of all ranks take ",
          bytes, " bytes and ", flags, " flags, and a slot has ", group.layout.slot_bytes, " and ",
          group.layout.flags, "; make a larger workspace.");
  require(matmul.m == 0 || matmul.k == 0 || matmul.a != nullptr, "a is a null pointer.");
  require(rows_of_rank(matmul.m, world_size, group.rank) == 0 || matmul.n == 0 || matmul.c != nullptr,
          "c is a null pointer.");
}

}  // namespace pyruntime::portable

int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                    void* stream) {
  return guarded("matmul_reduce_scatter", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MATMUL_REDUCE_SCATTER);
    check_matmul(matmul);
    check_scatter(view, *matmul);
    const ChunkPlan plan(matmul->m, view.world_size(), view.rank);
    launch_job(*matmul, plan.scatter_order(), stream, [&](const TileSchedule& schedule, auto matrices) {
      using T = typename decltype(matrices)::Element;
      return ScatterJob<T>{schedule,
                           matmul->k,
                           matrices,
                           view,
                           part_elements(matmul->m, matmul->n, view.world_size()),
                           part_pitch(matmul->n)};
    });
  });
}
