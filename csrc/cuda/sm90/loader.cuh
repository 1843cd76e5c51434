// The loader, one warp that loads A and B into shared memory, and the watcher, one that waits for rows that
// have not yet arrived.
#pragma once

#include "async_proxy.cuh"
#include "cuda/portable/gemm/all_gather_matmul.cuh"
#include "gemm.cuh"

namespace pyruntime::sm90 {

// Runs a tile ahead of the loader, so that reading a long-set flag does not stall the loader.
template <class Gemm, class Shared>
PYRUNTIME_DEVICE void watch_tiles(const Gemm& gemm, Shared& shared, int block) {
  if (gemm.work != Work::kGather) return;
  const uint64_t epoch = gemm.epoch();
  const bool elected = threadIdx.x % 32 == 0;
  for_each_tile(gemm, block, [&](const Tile& tile) {
    if (elected && !portable::rows_arrived(gemm.group, tile, epoch)) shared.stop();
    __syncwarp();
    wait(kRows, kWatcherAndLoader);  // makes visible what the elected lane has acquired
  });
}

// After a failed wait the loader continues, but waits end at once and results are not stored. If it left, the
// other block of its cluster would miss its half of B.
template <class Gemm, class Shared, class Pipeline>
PYRUNTIME_DEVICE void load_tiles(const Gemm& gemm, Shared& shared, Pipeline& pipeline, int block) {
  using namespace cute;
  using Types = typename Gemm::Types;
  typename Types::Mainloop mainloop;
  auto state = cutlass::make_producer_start_state<Pipeline>();
  const auto shape_a = make_shape(gemm.m, gemm.k, 1), shape_b = make_shape(gemm.n, gemm.k, 1);

  for_each_tile(gemm, block, [&](const Tile& tile) {
    const bool gathers = gemm.work == Work::kGather;
    const bool is_own = tile.chunk.owner == gemm.group.rank;
    if (gathers) {
      wait(kRows, kWatcherAndLoader);
      // Others' rows were written by ordinary stores or a copy engine, and are now read through the async
      // proxy. Every lane fences, because CUTLASS chooses the loading lane.
      if (!is_own) fence_async();
    }

    // A tile begins at any row, because chunks do. It may reach into the next chunk's rows, which may not
    // have arrived: their results are discarded.
    const auto& inputs = gathers && !is_own ? gemm.others : gemm.own;
    const int row = static_cast<int>(gathers && is_own ? 0 : tile.chunk.begin) + tile.row;
    const auto all = make_coord(_, _, _);
    const auto a = local_tile(domain_offset(make_coord(row, 0, 0), inputs.tma_load_a.get_tma_tensor(shape_a)),
                              typename Types::TileShape{}, all, Step<_1, Underscore, _1>{});
    const auto b =
        local_tile(domain_offset(make_coord(tile.column, 0, 0), inputs.tma_load_b.get_tma_tensor(shape_b)),
                   typename Types::TileShape{}, all, Step<Underscore, _1, _1>{});
    mainloop.load(inputs, pipeline, state, cute::make_tuple(a, b), make_coord(0, 0, _, 0),
                  make_coord_iterator(shape<3>(a)), gemm.steps(), static_cast<int>(threadIdx.x),
                  static_cast<uint32_t>(block), shared.operands);
    state.advance(gemm.steps());
  });
  mainloop.load_tail(pipeline,
                     state);  // the other block of the cluster may still arrive at this block's barriers
  __syncwarp();
}

}  // namespace pyruntime::sm90
