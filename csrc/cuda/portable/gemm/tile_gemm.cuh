// The persistent tile GEMM of all fused kernels. A Job has the schedule of tiles, k, and early_bias(): a bias
// to add before rounding, or nullptr. Its start() returns a Run, which decides what must have arrived before
// a tile is read and where a finished tile goes. All threads call all functions of a Run except store():
//
//   bool begin(tile)                before the tile is read; false: stop
//   Operand<T> a(tile), b<layout>(tile)
//   bool before_store(tile)         a barrier, after the result is staged; false: stop
//   void store(tile, row, column, vector)   8 elements of the tile; some may be beyond its last column
//   void after_store(tile)          a barrier
//   void end()                      once in every block
#pragma once

#include "cuda/compat.h"
#include "cuda/portable/numbers.cuh"
#include "operand_tile.cuh"
#include "tiles.h"

#if PYRUNTIME_CDNA
#include "mma_mfma.cuh"
#include "pipeline_registers.cuh"
#else
#include "mma_ptx.cuh"
#include "pipeline_async.cuh"
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
  static constexpr int kMinBlocks = kBlocks;  // per multiprocessor
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 2;
  static constexpr int kResultPitch = kColumns * 2 + 16;     // bytes; 16 extra against bank conflicts
  static constexpr int kResultBytes = kRows * kResultPitch;  // staged in the pipeline's memory
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kResultBytes ? kStages * kStageBytes : kResultBytes;
#if PYRUNTIME_CDNA
  static_assert(kSharedBytes + 256 <= 64 * 1024, "256 bytes are what HIP needs for barriers");
#endif
};

#if PYRUNTIME_CDNA
// 64 KB of shared memory fit two blocks of small tiles or one of large ones. Both have two waves a SIMD, each
// with the 64 columns that NN reads at once.
using SmallTiles = Tiles<64, 128, 2, 2, 2, 2>;
using LargeTiles = Tiles<128, 128, 4, 2, 2, 1>;
#else
// Small tiles fit every device from 8.0 on, two blocks on most; large ones need 144 KB: 8.0, 9.0 and up. In
// both, a warp's 64 columns by 32 or 64 rows use the tensor cores more than shared memory.
using SmallTiles = Tiles<64, 128, 2, 2, 3, 2>;
using LargeTiles = Tiles<128, 256, 2, 4, 3, 1>;
#endif

template <class Config, class T, int kLayout>
struct TileGemm {
  static constexpr bool kBAlongK = kLayout == PYRUNTIME_NT;
  using Configuration = Config;
  using ATile = OperandTile<T, true, Config::kTileRows, Config::kThreads>;
  using BTile = OperandTile<T, kBAlongK, Config::kTileColumns, Config::kThreads>;
  static constexpr int kStep = Mma<T>::kDepth;  // elements of k in Operands
  using Sums = typename Mma<T>::Sum[Config::kUnitsDown][Config::kUnitsAcross];

  // A warp's operands for one step of its products.
  struct Operands {
    typename Mma<T>::A a[Config::kUnitsDown];
    typename Mma<T>::B b[Config::kUnitsAcross];
  };

  // sums = A B over all k. Ends with a barrier, after which shared memory is free.
  static PYRUNTIME_DEVICE void run(Sums& sums, unsigned char* shared, const Operand<T>& a,
                                   const Operand<T>& b, int64_t k) {
    run_pipeline<TileGemm>(sums, shared, a, b, k);
  }

  // Reads one step, from k on, of the tiles of A and B at `tiles`.
  static PYRUNTIME_DEVICE void read(Operands& operands, const unsigned char* tiles, int k) {
    const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int row = warp / Config::kWarpsAcross * Config::kWarpRows;
    const int column = warp % Config::kWarpsAcross * Config::kWarpColumns;
#pragma unroll
    for (int i = 0; i < Config::kUnitsDown; ++i) {
      Mma<T>::template load_a<ATile>(operands.a[i], tiles, row + 16 * i, k, lane);
    }
    Mma<T>::template load_b<BTile, kBAlongK>(operands.b, tiles + ATile::kBytes, column, k, lane);
  }

  // Multiplies some rows of units.
  template <int kFirst, int kEnd>
  static PYRUNTIME_DEVICE void multiply(Sums& sums, const Operands& operands) {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kUnitsAcross; ++j) {
        Mma<T>::multiply(sums[i][j], operands.a[i], operands.b[j]);
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
      Mma<T>::template for_each<kBAlongK>(sums[i], lane, [&](int r, int c, const auto& values) {
        constexpr int kAdjacent = sizeof(values) / sizeof(values[0]);
        const int at = column + c;
        struct alignas(sizeof(T) * kAdjacent) Rounded {
          T values[kAdjacent];
        } rounded;
#pragma unroll
        for (int e = 0; e < kAdjacent; ++e) {
          const float added = bias != nullptr && at + e < columns ? to_float(bias[at + e]) : 0.0f;
          rounded.values[e] = round_to<T>(values[e] + added);
        }
        *reinterpret_cast<Rounded*>(shared + (row + 16 * i + r) * Config::kResultPitch + at * 2) = rounded;
      });
    }
  }
};

template <class Config, class T, int kLayout, class Job>
PYRUNTIME_KERNEL(Config::kThreads, Config::kMinBlocks)
tile_gemm(PYRUNTIME_PARAMETER Job parameter) {
  const Job& job = device::first_parameter(parameter);
  using Gemm = TileGemm<Config, T, kLayout>;
  PYRUNTIME_SHARED(shared);
  auto run = job.start();
  Tile tile;
  for (int64_t number = blockIdx.x; job.schedule.at(number, tile); number += gridDim.x) {
    if (!run.begin(tile)) break;
    typename Gemm::Sums sums{};
    Gemm::run(sums, shared, run.a(tile), run.template b<kLayout>(tile), job.k);
    const T* bias = job.early_bias();
    Gemm::stage_result(sums, shared, bias == nullptr ? nullptr : bias + tile.column, tile.columns);
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
