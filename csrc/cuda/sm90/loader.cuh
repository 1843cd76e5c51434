// The loader: one warp that brings A and B into shared memory; and the watcher, one that waits for rows which
// are still on their way.
#pragma once

#include "async_proxy.cuh"
#include "cuda/portable/gemm/all_gather_matmul.cuh"
#include "gemm.cuh"

namespace pyruntime::sm90 {

// The watcher is a tile ahead of the loader, so that the loader need not stand still for as long as it takes
// to look at a flag that has long been set.
template <class Gemm, class Shared>
PYRUNTIME_DEVICE void watch_tiles(const Gemm& gemm, Shared& shared, int block) {
  if (gemm.work != Work::kGather) return;
  const uint64_t epoch = gemm.epoch();
  const bool elected = threadIdx.x % 32 == 0;
  for_each_tile(gemm, block, [&](const Tile& tile) {
    if (elected && !portable::rows_arrived(gemm.group, tile, epoch)) shared.stop();
    __syncwarp();
    wait(kRows, kWatcherAndLoader);  // passes on what the elected lane has acquired
  });
}

// After a failed wait everything goes on as before, but for waits, which end at once, and for results, which
// go nowhere: a loader that left would leave behind the other block of its cluster, which needs its half of
// B.
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
      // Others' rows were written by ordinary stores or by a copy engine and are about to be read through the
      // async proxy. Every lane fences, since CUTLASS chooses the one that loads.
      if (!is_own) fence_async();
    }

    // A tile begins at any row, because chunks do. It may reach into rows of the next chunk, which may not be
    // there yet: their results are not kept.
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
  mainloop.load_tail(pipeline, state);  // the other block of the cluster may still arrive at our barriers
  __syncwarp();
}

}  // namespace pyruntime::sm90
