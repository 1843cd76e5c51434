// Tiles of operands on their way into shared memory through registers, for GPUs without asynchronous copies:
// one tile of A and B is multiplied in shared memory while the loads of the next are under way.
#pragma once

#include "operand_tile.cuh"

namespace pyruntime::portable {

// What one thread holds of a tile; as words, so that nothing waits for a load before it is stored.
template <class OperandTile, class T>
struct Held {
  uint4 parts[OperandTile::kParts];

  PYRUNTIME_DEVICE void load(const Operand<T>& from, int first_k, int depth, bool aligned) {
    OperandTile::template each_part<OperandTile::kParts>(
        from, first_k, depth, [&](int i, int, const T* source, int count) {
          const bool whole = aligned && count == Vector<T>::kCount;
          parts[i] = whole ? device::load_streaming(source) : bits_of(load_elements(source, count));
        });
  }

  PYRUNTIME_DEVICE void store(unsigned char* tile) const {
#pragma unroll
    for (int i = 0; i < OperandTile::kParts; ++i) {
      *reinterpret_cast<uint4*>(tile + OperandTile::offset_of_part(i)) = parts[i];
    }
  }
};

// Calls multiply(tiles) for each kDepth of all k, with A's tile and then B's at `tiles`. Ends with a barrier:
// shared memory is free.
template <class Config, class ATile, class BTile, class T, class Multiply>
PYRUNTIME_DEVICE void run_pipeline(unsigned char* shared, const Operand<T>& a, const Operand<T>& b, int64_t k,
                                   const Multiply& multiply) {
  static_assert(Config::kStages == 1);
  const bool a_aligned = takes_vectors(a), b_aligned = takes_vectors(b);
  Held<ATile, T> next_a;
  Held<BTile, T> next_b;
  const auto load = [&](int64_t first_k) {
    const int first = static_cast<int>(first_k), depth = static_cast<int>(k - first_k);
    next_a.load(a, first, depth, a_aligned);
    next_b.load(b, first, depth, b_aligned);
  };
  if (k > 0) load(0);
  for (int64_t first_k = 0; first_k < k; first_k += kDepth) {
    next_a.store(shared);
    next_b.store(shared + ATile::kBytes);
    __syncthreads();
    if (first_k + kDepth < k) load(first_k + kDepth);
    multiply(shared);
    __syncthreads();
  }
}

}  // namespace pyruntime::portable
