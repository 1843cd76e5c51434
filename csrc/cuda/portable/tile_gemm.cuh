// The persistent tile product that all fused kernels share. A Job holds the schedule of tiles, k, and a bias
// to add before rounding (early_bias(), or nullptr). Its start() gives a Run, which says what must have
// arrived before a tile is read, and where a finished tile goes; all its functions but store() are called by
// all threads:
//
//   bool begin(tile)                before anything is read; false: stop
//   Operand<T> a<layout>(tile), b<layout>(tile)
//   bool before_store(tile)         a barrier, when the product is staged; false: stop
//   void store(tile, row, column, vector)   8 elements of the tile; some may lie beyond its last column
//   void after_store(tile)          a barrier
//   void end()                      by every block, once
//
// The pipeline is that of cp.async (PTX ISA, "Asynchronous copy"): kStages tiles of A and B in shared memory,
// of which one is multiplied while the others arrive.
#pragma once

#include "compat.h"
#include "numbers.cuh"
#include "operand_tile.cuh"
#include "tiles.h"

#if defined(__HIP__) || defined(__HIPCC__) || (defined(PYRUNTIME_HOST_WARP) && PYRUNTIME_HOST_WARP == 64)
#include "mma_mfma.cuh"
#else
#include "mma_ptx.cuh"
#endif

namespace pyruntime::portable {

template <int kRows, int kColumns, int kDown, int kAcross, int kPipeline, int kBlocks>
struct Tiles {
  static constexpr int kTileRows = kRows, kTileColumns = kColumns;
  static constexpr int kWarpsAcross = kAcross;
  static constexpr int kThreads = kDown * kAcross * device::kWarpSize;
  static constexpr int kWarpRows = kRows / kDown, kWarpColumns = kColumns / kAcross;
  static constexpr int kUnitsDown = kWarpRows / 16, kUnitsAcross = kWarpColumns / 16;
  static constexpr int kStages = kPipeline;
  static constexpr int kMinBlocks = kBlocks;  // on a multiprocessor
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 2;
  static constexpr int kResultPitch = kColumns * 2 + 16;  // bytes; 16 more, against conflicts of banks
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kRows * kResultPitch <= kSharedBytes, "the result is staged where the pipeline was");
};

#if defined(__HIP__) || defined(__HIPCC__)
// 64 KB of shared memory, and copies that are not asynchronous.
using SmallTiles = Tiles<64, 128, 2, 2, 2, 1>;
using LargeTiles = Tiles<128, 128, 2, 2, 2, 1>;
#else
// Small ones fit every device from 8.0 on, two blocks on most; large ones need 144 KB: 8.0, 9.0 and up. In
// both a warp's 64 columns by 32 or 64 rows keep the tensor cores busier than shared memory.
using SmallTiles = Tiles<64, 128, 2, 2, 3, 2>;
using LargeTiles = Tiles<128, 256, 2, 4, 3, 1>;
#endif

template <class Config, class T, int kLayout>
struct TileProduct {
  static constexpr bool kAAlongK = kLayout != PYRUNTIME_TN, kBAlongK = kLayout == PYRUNTIME_NT;
  using ATile = OperandTile<T, kAAlongK, Config::kTileRows, Config::kThreads>;
  using BTile = OperandTile<T, kBAlongK, Config::kTileColumns, Config::kThreads>;
  using Sums = typename Mma<T>::Sum[Config::kUnitsDown][Config::kUnitsAcross];
  static constexpr int kStages = Config::kStages;

  static PYRUNTIME_DEVICE unsigned char* stage(unsigned char* shared, int step) {
    return shared + step % kStages * Config::kStageBytes;
  }

  // sums = A B over all k. Ends with a barrier: shared memory is free.
  static PYRUNTIME_DEVICE void run(Sums& sums, unsigned char* shared, const Operand<T>& a,
                                   const Operand<T>& b, int64_t k) {
    const bool a_aligned = is_aligned(a.data) && a.pitch % 8 == 0;
    const bool b_aligned = is_aligned(b.data) && b.pitch % 8 == 0;
    const int steps = static_cast<int>((k + kDepth - 1) / kDepth);
    const auto load = [&](int step) {
      if (step < steps) {
        const int first = step * kDepth, depth = static_cast<int>(k) - first;
        ATile::load(stage(shared, step), a, first, depth, a_aligned);
        BTile::load(stage(shared, step) + ATile::kBytes, b, first, depth, b_aligned);
      }
      device::copy_async_commit();  // empty ones too: the wait below counts groups
    };
    for (int step = 0; step < kStages - 1; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
      device::copy_async_wait<kStages - 2>();
      // All threads' copies of this step are there, and all have read the stage that is filled next.
      __syncthreads();
      load(step + kStages - 1);
      multiply(sums, stage(shared, step));
    }
    device::copy_async_wait<0>();
    __syncthreads();
  }

  static PYRUNTIME_DEVICE void multiply(Sums& sums, const unsigned char* tiles) {
    const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int row = warp / Config::kWarpsAcross * Config::kWarpRows;
    const int column = warp % Config::kWarpsAcross * Config::kWarpColumns;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      typename Mma<T>::A a[Config::kUnitsDown];
      typename Mma<T>::B b[Config::kUnitsAcross];
#pragma unroll
      for (int i = 0; i < Config::kUnitsDown; ++i) {
        Mma<T>::template load_a<ATile, kAAlongK>(a[i], tiles, row + 16 * i, k, lane);
      }
#pragma unroll
      for (int j = 0; j < Config::kUnitsAcross; ++j) {
        Mma<T>::template load_b<BTile, kBAlongK>(b[j], tiles + ATile::kBytes, column + 16 * j, k, lane);
      }
#pragma unroll
      for (int i = 0; i < Config::kUnitsDown; ++i) {
#pragma unroll
        for (int j = 0; j < Config::kUnitsAcross; ++j) Mma<T>::multiply(sums[i][j], a[i], b[j]);
      }
    }
  }

  // Rounds the sums into shared memory, row by row.
  static PYRUNTIME_DEVICE void stage_result(const Sums& sums, unsigned char* shared, const T* bias,
                                            int columns) {
    const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int row = warp / Config::kWarpsAcross * Config::kWarpRows;
    const int column = warp % Config::kWarpsAcross * Config::kWarpColumns;
#pragma unroll
    for (int i = 0; i < Config::kUnitsDown; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kUnitsAcross; ++j) {
        Mma<T>::for_each(sums[i][j], lane, [&](int r, int c, const float* values) {
          const int at = column + 16 * j + c;
          struct alignas(sizeof(T) * Mma<T>::kAdjacent) Rounded {
            T values[Mma<T>::kAdjacent];
          } rounded;
#pragma unroll
          for (int e = 0; e < Mma<T>::kAdjacent; ++e) {
            const float added = bias != nullptr && at + e < columns ? to_float(bias[at + e]) : 0.0f;
            rounded.values[e] = round_to<T>(values[e] + added);
          }
          *reinterpret_cast<Rounded*>(shared + (row + 16 * i + r) * Config::kResultPitch + at * 2) = rounded;
        });
      }
    }
  }
};

template <class Config, class T, int kLayout, class Job>
PYRUNTIME_KERNEL(Config::kThreads, Config::kMinBlocks)
tile_gemm(PYRUNTIME_PARAMETER Job job) {
  using Product = TileProduct<Config, T, kLayout>;
  PYRUNTIME_SHARED(shared);
  auto run = job.start();
  Tile tile;
  for (int64_t number = blockIdx.x; job.schedule.at(number, tile); number += gridDim.x) {
    if (!run.begin(tile)) break;
    typename Product::Sums sums{};
    Product::run(sums, shared, run.template a<kLayout>(tile), run.template b<kLayout>(tile), job.k);
    const T* bias = job.early_bias();
    Product::stage_result(sums, shared, bias == nullptr ? nullptr : bias + tile.column, tile.columns);
    if (!run.before_store(tile)) break;
    constexpr int kVectors = Config::kTileColumns / 8;
    for (int i = threadIdx.x; i < tile.rows * kVectors; i += Config::kThreads) {
      const int row = i / kVectors, column = i % kVectors * 8;
      if (column >= tile.columns) continue;
      const unsigned char* staged = shared + row * Config::kResultPitch + column * 2;
      run.store(tile, row, column, load_vector(reinterpret_cast<const T*>(staged)));
    }
    run.after_store(tile);
  }
  run.end();
}

}  // namespace pyruntime::portable
