// The mover: one warp that stores staged results at their destination and signals them, and that waits for
// other ranks while the multipliers continue.
#pragma once

#include "async_proxy.cuh"
#include "gemm.cuh"
#include "multipliers.cuh"

namespace pyruntime::sm90 {

// A stored result whose signal has not been sent.
struct UnderWay {
  bool any = false;
  int owner;
  Signals signals;
};

// Waits until the result is written, then signals it; called by the thread that stored it.
template <class Gemm>
PYRUNTIME_DEVICE void settle(const Gemm& gemm, UnderWay& result, uint64_t epoch) {
  if (!result.any) return;
  result.any = false;
  wait_until_written();
  if (gemm.work != Work::kScatter) return;
  fence_async();  // orders the bulk stores before the release
  portable::raise_signals(gemm.group, result.owner, result.signals, epoch);
}

// Stores half a tile; called by one thread.
template <class Gemm>
PYRUNTIME_DEVICE void store_result(const Gemm& gemm, const Tile& tile, const unsigned char* result) {
  const CUtensorMap* map = &gemm.results[tile.chunk.owner];
  constexpr int kBoxes = Gemm::Config::kTileColumns / kBoxColumns;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    if (box * kBoxColumns >= tile.columns) break;
    cute::SM90_TMA_STORE_2D::copy(map, result + box * kBoxBytes, tile.column + box * kBoxColumns, tile.row);
  }
  cute::tma_store_arrive();
}

// Waits for the parts of half an own tile, each lane for its peers. False: stop.
template <class Gemm>
PYRUNTIME_DEVICE bool parts_are_here(const Gemm& gemm, const Tile& tile, uint64_t epoch) {
  const Group& group = gemm.group;
  const Signals signals = signals_of(tile, gemm.n);
  bool here = !portable::has_failed(group);
  for (int peer = static_cast<int>(threadIdx.x) % 32; here && peer < group.world_size(); peer += 32) {
    if (peer == group.rank) continue;
    for (int i = 0; here && i < signals.count(); ++i) {
      const int index = signals.number(i);
      here = portable::wait_for(group, group.flag(group.rank, peer, index), epoch, peer, index);
    }
  }
  return __all_sync(0xffffffffu, here);
}

// Waits for the credit to write the tile into its owner's slot; called by one thread. `granted` remembers
// whose credit has come: it then holds for all of that owner's tiles. Unless the owner is late, it comes long
// before the result.
template <class Gemm>
PYRUNTIME_DEVICE bool may_write(const Gemm& gemm, const Tile& tile, uint64_t epoch, int& granted) {
  if (tile.rows == 0 || tile.columns == 0) return false;
  if (gemm.work != Work::kScatter) return true;
  const int owner = tile.chunk.owner;
  if (granted == owner) return !portable::has_failed(gemm.group);
  if (!portable::wait_for_credit(gemm.group, owner, epoch)) return false;
  granted = owner;
  return true;
}

template <class Gemm, class Shared>
PYRUNTIME_DEVICE void move_tiles(const Gemm& gemm, Shared& shared, int block) {
  using Config = typename Gemm::Config;
  const uint64_t epoch = gemm.epoch();
  const bool elected = threadIdx.x % 32 == 0;
  UnderWay under_way;  // this and `granted` belong to the elected lane
  int granted = -1;

  for_each_tile(gemm, block, [&](const Tile& tile) {
    // No thread comes to a barrier twice before the others come once: this warp reaches kFree of a half again
    // only after kStaged of that half, which its warpgroup reaches after kFree.
    arrive(of_half(kFree, 0), kHalfAndMover);
    // Before this warp waits for other ranks, it has signalled everything that they may wait for. Between the
    // halves of a tile it waits only for its own block. Before it waits for parts it must have signalled its
    // tiles for others; so it does that only in own tiles, which have no signals.
    if (elected) settle(gemm, under_way, epoch);
    __syncwarp();
    const bool sums = gemm.is_summed(tile);
    const bool moves = !sums && elected && may_write(gemm, tile, epoch, granted);
    __syncwarp();
    for (int half = 0; half < 2; ++half) {
      const Tile part = half_of(tile, half);
      if (half > 0) arrive(of_half(kFree, half), kHalfAndMover);
      if (sums) {
        if (!parts_are_here(gemm, part, epoch)) shared.stop();
        wait(of_half(kParts, half), kHalfAndMover);  // makes visible what the lanes have acquired
      }
      wait(of_half(kStaged, half), kHalfAndMover);
      if (moves && part.rows > 0 && !shared.is_stopped()) {
        store_result(gemm, part, shared.result);
        // The signals of both halves: in a scatter only this warp stops, and not between them.
        under_way = {true, tile.chunk.owner, signals_of(tile, gemm.n)};
        wait_until_read();  // before the other half is staged in its place
      }
      __syncwarp();
    }
  });
  if (elected) settle(gemm, under_way, epoch);
  __syncwarp();
}

}  // namespace pyruntime::sm90
