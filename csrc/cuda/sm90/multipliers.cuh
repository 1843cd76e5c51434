// The multipliers: two warpgroups that keep the tensor cores busy, stage rounded results in shared memory,
// and sum own tiles of a scatter.
#pragma once

#include "async_proxy.cuh"
#include "cuda/portable/gemm/matmul_reduce_scatter.cuh"
#include "gemm.cuh"
#include "rounding.cuh"
#include "staging.h"

namespace pyruntime::sm90 {

// Rounds the sums (+ bias) of one thread of a warpgroup and stages them.
template <class Config, class T, class Sums>
PYRUNTIME_DEVICE void stage_result(const Sums& sums, unsigned char* result, int thread, const T* bias,
                                   int columns) {
#pragma unroll
  for (int piece = 0; piece < Config::kTileColumns / 8; piece += 2) {
    uint32_t rounded[4];
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const int column = summed_column(thread, piece + next), at = (piece + next) * 4;
      float left = 0.0f, right = 0.0f;
      if (bias != nullptr) {
        if (column < columns) left = portable::to_float(bias[column]);
        if (column + 1 < columns) right = portable::to_float(bias[column + 1]);
      }
      rounded[2 * next] = round_pair<T>(sums(at) + left, sums(at + 1) + right);
      rounded[2 * next + 1] = round_pair<T>(sums(at + 2) + left, sums(at + 3) + right);
    }
    unsigned char* to = result + staged_at(stored_row(thread), stored_piece(thread, piece));
    cute::SM90_U32x4_STSM_N::copy(rounded[0], rounded[1], rounded[2], rounded[3],
                                  *reinterpret_cast<cute::uint128_t*>(to));
  }
}

// C = this rank's staged part plus the others' parts, for one warpgroup's half of a tile.
template <class Gemm>
PYRUNTIME_DEVICE void sum_tile(const Gemm& gemm, const Tile& tile, const unsigned char* result, int thread) {
  using T = typename Gemm::Element;
  constexpr int kPieces = Gemm::Config::kTileColumns / 8;
  const T* parts = gemm.group.template data<T>(gemm.group.rank);
  for (int i = thread; i < tile.rows * kPieces; i += kWarpgroup) {
    const int row = i / kPieces, piece = i % kPieces, column = tile.column + piece * 8;
    const int existing = tile.columns - piece * 8;
    if (existing <= 0) continue;
    const auto own = portable::load_vector(reinterpret_cast<const T*>(result + staged_at(row, piece)));
    const T* bias = gemm.bias == nullptr ? nullptr : gemm.bias + column;
    const auto sum = portable::sum_of_parts(parts + (tile.row + row) * gemm.part_pitch + column,
                                            gemm.part_elements, gemm.group, own, bias, existing);
    portable::store_existing(gemm.c + (tile.row + row) * gemm.ldc + column, sum, existing);
  }
}

template <class Gemm, class Shared, class Pipeline>
PYRUNTIME_DEVICE void multiply_tiles(const Gemm& gemm, Shared& shared, Pipeline& pipeline, int block) {
  using namespace cute;
  using Types = typename Gemm::Types;
  using Config = typename Gemm::Config;
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroup;
  const int half = thread / kWarpgroup, in_half = thread % kWarpgroup;
  typename Types::Mainloop mainloop;
  typename Types::Mainloop::PipelineState state;

  for_each_tile(gemm, block, [&](const Tile& tile) {
    auto sums =
        partition_fragment_C(typename Types::Mainloop::TiledMma{}, take<0, 2>(typename Types::TileShape{}));
    mainloop.mma(pipeline, state, sums, gemm.steps(), thread, shared.operands, gemm.own);
    mainloop.mma_tail(pipeline, state, gemm.steps());
    state.advance(gemm.steps());

    // Waits for the mover, after whose read the other warpgroup's half may be overwritten, and for this
    // warpgroup's threads, which have finished with their earlier half.
    wait(of_half(kFree, half), kHalfAndMover);
    const bool early = gemm.bias != nullptr && gemm.work != Work::kScatter;
    stage_result<Config>(sums, shared.result, in_half, early ? gemm.bias + tile.column : nullptr,
                         tile.columns);
    if (gemm.is_summed(tile)) {
      wait(of_half(kParts, half), kHalfAndMover);  // also: all threads of this warpgroup have staged
      if (!shared.is_stopped()) sum_tile(gemm, half_of(tile, half), shared.result, in_half);
    } else {
      fence_async_shared();
    }
    // From here on the staged memory belongs to the mover, then to the other warpgroup.
    arrive(of_half(kStaged, half), kHalfAndMover);
  });
}

}  // namespace pyruntime::sm90
