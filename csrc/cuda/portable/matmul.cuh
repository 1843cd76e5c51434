// C = A B (+ bias): the tile product with nobody else in it.
#pragma once

#include "tile_gemm.cuh"

namespace pyruntime::portable {

// Where the operands of any product lie.
template <class T>
struct Matrices {
  const T* a;
  const T* b;
  const T* bias;
  T* c;
  int64_t lda, ldb, ldc;
};

// `rows` rows of A from row `first` on, and the columns of B of a tile.
template <int kLayout, class T>
PYRUNTIME_DEVICE Operand<T> operand_a(const T* a, int64_t lda, int64_t first, int rows) {
  return {kLayout == PYRUNTIME_TN ? a + first : a + first * lda, lda, rows};
}

template <int kLayout, class T>
PYRUNTIME_DEVICE Operand<T> operand_b(const Matrices<T>& m, const Tile& tile) {
  return {kLayout == PYRUNTIME_NT ? m.b + tile.column * m.ldb : m.b + tile.column, m.ldb, tile.columns};
}

// Writes the elements of `vector` that exist: `count` of them, as one access where that is possible.
template <class T>
PYRUNTIME_DEVICE void store_existing(T* to, const Vector<T>& vector, int count) {
  if (count >= Vector<T>::kCount && is_aligned(to)) return store_vector(to, vector);
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) {
    if (e < count) to[e] = vector.values[e];
  }
}

template <class T>
struct MatmulJob {
  using Element = T;
  static constexpr bool kTransposesA = true;

  TileSchedule schedule;
  int64_t k;
  Matrices<T> matrices;

  PYRUNTIME_DEVICE const T* early_bias() const { return matrices.bias; }

  struct Run {
    const MatmulJob& job;

    PYRUNTIME_DEVICE bool begin(const Tile&) { return true; }
    template <int kLayout>
    PYRUNTIME_DEVICE Operand<T> a(const Tile& tile) const {
      return operand_a<kLayout>(job.matrices.a, job.matrices.lda, tile.row, tile.rows);
    }
    template <int kLayout>
    PYRUNTIME_DEVICE Operand<T> b(const Tile& tile) const {
      return operand_b<kLayout>(job.matrices, tile);
    }
    PYRUNTIME_DEVICE bool before_store(const Tile&) {
      __syncthreads();
      return true;
    }
    PYRUNTIME_DEVICE void store(const Tile& tile, int row, int column, const Vector<T>& vector) {
      T* to = job.matrices.c + (tile.row + row) * job.matrices.ldc + tile.column + column;
      store_existing(to, vector, tile.columns - column);
    }
    PYRUNTIME_DEVICE void after_store(const Tile&) { __syncthreads(); }
    PYRUNTIME_DEVICE void end() {}
  };

  PYRUNTIME_DEVICE Run start() const { return {*this}; }
};

}  // namespace pyruntime::portable
