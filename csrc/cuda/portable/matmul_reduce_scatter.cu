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
          group.layout.flags, "; ask pyruntime_scatter_workspace() for its shape.");
  require(matmul.m == 0 || matmul.k == 0 || matmul.a != nullptr, "a is a null pointer.");
  require(rows_of_rank(matmul.m, world_size, group.rank) == 0 || matmul.n == 0 || matmul.c != nullptr,
          "c is a null pointer.");
}

}  // namespace pyruntime::portable

int pyruntime_scatter_workspace(int32_t world_size, int64_t m, int64_t n, int32_t dtype,
                                PyruntimeWorkspace* out) {
  return guarded("scatter_workspace", [&] {
    check_dtype(dtype, /*with_fp32=*/false);
    require(m >= 0 && n >= 0, "m=", m, ", n=", n, "; sizes must not be negative.");
    require(world_size >= 1, "world_size=", world_size, "; a group has at least one rank.");
    require(out != nullptr, "there is nowhere to write the shape.");
    const int64_t flags = signals_of_part(rows_of_rank(m, world_size, 0), n);
    require(flags < int64_t{1} << 31, "a chunk would have ", flags, " signals; cut the product.");
    *out = {world_size, static_cast<int32_t>(flags < 1 ? 1 : flags),
            world_size * part_elements(m, n, world_size) * element_bytes(dtype)};
    check_workspace(out);
  });
}

int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                    void* stream) {
  return guarded("matmul_reduce_scatter", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MATMUL_REDUCE_SCATTER);
    check_matmul(matmul);
    check_scatter(view, *matmul);
    with_tiles(matmul->tiles, [&](auto tiles) {
      with_dtype(matmul->dtype, [&](auto element) {
        using T = decltype(element);
        using Config = decltype(tiles);
        const ChunkPlan plan(matmul->m, view.world_size(), view.rank);
        const ScatterJob<T> job{
            make_schedule(plan.scatter_order(), matmul->n, Config::kTileRows, Config::kTileColumns),
            matmul->k,
            matrices_of<T>(*matmul),
            view,
            part_elements(matmul->m, matmul->n, view.world_size()),
            part_pitch(matmul->n)};
        launch_tiles<Config>(job, *matmul, static_cast<runtime::Stream>(stream));
      });
    });
  });
}
