// C = A B on one rank's matrices; nothing travels. Tuning times other tiles than the library's with it
// (pyruntime/cuda/nvrtc_tiles.py).
#pragma once

#include "matrices.cuh"
#include "tile_gemm.cuh"

namespace pyruntime::portable {

// A schedule with all rows as one chunk.
template <class Config>
struct OneChunk {
  int64_t rows, columns;

  PYRUNTIME_DEVICE bool at(int64_t number, Tile& tile) const {
    TileSchedule schedule;
    schedule.visits = 1;
    schedule.tile_rows = Config::kTileRows;
    schedule.tile_columns = Config::kTileColumns;
    schedule.columns = static_cast<int>(columns);
    schedule.visit[0] = {0, static_cast<int32_t>(rows), 0};
    return schedule.at(number, tile);
  }
};

// Python passes it as an array, 8 bytes a field, in this order. It is its own Run.
template <class Config, class T>
struct OneRankJob {
  OneChunk<Config> schedule;
  int64_t k;
  Matrices<T> matrices;

  PYRUNTIME_DEVICE const T* early_bias() const { return matrices.bias; }

  PYRUNTIME_DEVICE OneRankJob start() const { return *this; }
  PYRUNTIME_DEVICE bool begin(const Tile&) { return true; }
  PYRUNTIME_DEVICE Operand<T> a(const Tile& tile) const {
    return operand_a(matrices.a, matrices.lda, tile.row, tile.rows);
  }
  template <int kLayout>
  PYRUNTIME_DEVICE Operand<T> b(const Tile& tile) const {
    return operand_b<kLayout>(matrices, tile);
  }
  PYRUNTIME_DEVICE bool before_store(const Tile&) {
    __syncthreads();
    return true;
  }
  PYRUNTIME_DEVICE void store(const Tile& tile, int row, int column, const Vector<T>& vector) {
    T* to = matrices.c + (tile.row + row) * matrices.ldc + tile.column + column;
    store_existing(to, vector, tile.columns - column);
  }
  PYRUNTIME_DEVICE void after_store(const Tile&) { __syncthreads(); }
  PYRUNTIME_DEVICE void end() {}
};

}  // namespace pyruntime::portable
