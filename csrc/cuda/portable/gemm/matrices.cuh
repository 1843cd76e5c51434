// The operands of a fused GEMM in memory, and the storing of its results.
#pragma once

#include "operand_tile.cuh"
#include "tiles.h"

namespace pyruntime::portable {

template <class T>
struct Matrices {
  using Element = T;

  const T* a;
  const T* b;
  const T* bias;
  T* c;
  int64_t lda, ldb, ldc;
};

// operand_a: `rows` rows of A from row `first` on; operand_b: a tile's columns of B.
template <class T>
PYRUNTIME_DEVICE Operand<T> operand_a(const T* a, int64_t lda, int64_t first, int rows) {
  return {a + first * lda, lda, rows};
}

template <int kLayout, class T>
PYRUNTIME_DEVICE Operand<T> operand_b(const Matrices<T>& m, const Tile& tile) {
  return {kLayout == PYRUNTIME_NT ? m.b + tile.column * m.ldb : m.b + tile.column, m.ldb, tile.columns};
}

// Writes the first `count` elements of `vector`, which exist; as one access if possible.
template <class T>
PYRUNTIME_DEVICE void store_existing(T* to, const Vector<T>& vector, int count) {
  if (count >= Vector<T>::kCount && is_aligned(to)) return store_vector(to, vector);
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) {
    if (e < count) to[e] = vector.values[e];
  }
}

}  // namespace pyruntime::portable
