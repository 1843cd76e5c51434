// The kernel's parameter, its shared memory, and the barriers at which its four kinds of warps meet:
//
//   watcher      1 warp   waits for the rows of A of a gather, a tile ahead of the loader
//   loader       1 warp   loads A and B into shared memory, by TMA
//   multipliers  8 warps  two warpgroups with half of the tile each, 64 rows: wgmma. They stage the rounded
//                         result, and sum own tiles of a scatter with the other ranks' parts
//   mover        1 warp   stores staged results at their destination, by TMA, and signals them; waits for
//                         other ranks, while the multipliers continue with the next tile
//
// Loader and multipliers meet in CUTLASS's pipeline. The others meet at these barriers, once for each tile:
//
//   kRows    watcher and loader: the tile's rows of A are here
//
// and once for each half of a tile, one half after the other, because there is room to stage only one:
//
//   kFree    mover and one warpgroup: the half staged before has been read
//   kParts   mover and that warpgroup: the others' parts of this half of an own tile of a scatter are here
//   kStaged  that warpgroup and the mover: the half is staged, or, for an own tile, summed
//
// So one warpgroup runs behind the other by the time to stage a half and read it again. Each has the tensor
// cores to itself while the other rounds.
#pragma once

#include <cuda.h>

#include "cuda/portable/numbers.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "problem.h"

namespace pyruntime::sm90 {

constexpr int kWarpgroup = 128;
constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kThreads = kWarpgroup + kMultipliers;

// We have eight barriers (CUTLASS has the others). From kFree on there is one for each half.
enum Barrier : uint32_t { kRows, kEnd, kFree, kStaged = kFree + 2, kParts = kStaged + 2 };

PYRUNTIME_DEVICE Barrier of_half(Barrier barrier, int half) {
  return static_cast<Barrier>(barrier + half);
}

// Hardware barriers; `threads` counts all threads that come, arriving or waiting.
PYRUNTIME_DEVICE void arrive(Barrier barrier, int threads) {
  cutlass::arch::NamedBarrier::arrive(threads, barrier);
}
PYRUNTIME_DEVICE void wait(Barrier barrier, int threads) {
  cutlass::arch::NamedBarrier::sync(threads, barrier);
}

constexpr int kWatcherAndLoader = 64;
constexpr int kHalfAndMover = kWarpgroup + 32;
constexpr int kAllButWatcher = kMultipliers + 64;

template <class T>
struct CutlassElement;
template <>
struct CutlassElement<portable::Bf16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct CutlassElement<portable::Fp16> {
  using type = cutlass::half_t;
};

// CUTLASS's types for loading operands into shared memory and multiplying them. Its layouts are named as in
// BLAS: "column-major" is contiguous in m for A, and in k for B.
template <class Config, class T, int kLayout>
struct Types {
  using Element = typename CutlassElement<T>::type;
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using LayoutB = std::conditional_t<kLayout == PYRUNTIME_NT, Column, Row>;
  using TileShape = cute::Shape<cute::Int<kBlockRows>, cute::Int<Config::kTileColumns>, cute::Int<kDepth>>;
  using ClusterShape = cute::Shape<cute::Int<Config::kDown>, cute::Int<Config::kAcross>, cute::_1>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element, LayoutB, 8, float,
      TileShape, ClusterShape, cutlass::gemm::collective::StageCount<Config::kStages>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
};

template <class Config_, class T, int kLayout>
struct Gemm {
  using Config = Config_;
  using Element = T;
  using Types = sm90::Types<Config, T, kLayout>;

  typename Types::Mainloop::Params own;     // A at matmul.a, and B
  typename Types::Mainloop::Params others;  // kGather: A in the slot, and B
  // The destination of each owner's rows: a matrix of exactly these; TMA writes nothing beyond.
  CUtensorMap results[PYRUNTIME_MOST_RANKS];

  Work work;
  int m, n, k;
  TileSchedule units;
  Group group;
  const T* bias;
  T* c;
  int64_t ldc, part_elements, part_pitch;

  PYRUNTIME_DEVICE int steps() const { return (k + kDepth - 1) / kDepth; }
  // Whether the tile is summed here with the others' parts.
  PYRUNTIME_DEVICE bool is_summed(const Tile& tile) const {
    return work == Work::kScatter && tile.chunk.owner == group.rank;
  }
  PYRUNTIME_DEVICE uint64_t epoch() const { return group.control().epochs + 1; }
};

template <class Gemm>
struct SharedMemory {
  using Types = typename Gemm::Types;
  alignas(1024) typename Types::Mainloop::TensorStorage operands;
  alignas(1024) unsigned char result[Gemm::Config::kResultBytes];
  typename Types::Mainloop::PipelineStorage pipeline;
  // Set for good after a failed wait: what is staged from then on may be invalid and is not stored. The
  // watcher sets it before the loader begins such a tile, the mover before kParts. Every reader has met the
  // writer at a barrier since.
  uint32_t stopped;

  PYRUNTIME_DEVICE void stop() { *static_cast<volatile uint32_t*>(&stopped) = 1; }
  PYRUNTIME_DEVICE bool is_stopped() const { return *static_cast<const volatile uint32_t*>(&stopped) != 0; }
};

// Calls visit(tile) for all tiles of the block, in the same order in every warp.
template <class Gemm, class Visit>
PYRUNTIME_DEVICE void for_each_tile(const Gemm& gemm, int block_in_cluster, const Visit& visit) {
  using Config = typename Gemm::Config;
  Tile unit;
  for (int64_t number = blockIdx.x / Config::kCluster; gemm.units.at(number, unit);
       number += gridDim.x / Config::kCluster) {
    visit(tile_of_block<Config>(unit, block_in_cluster));
  }
}

}  // namespace pyruntime::sm90
