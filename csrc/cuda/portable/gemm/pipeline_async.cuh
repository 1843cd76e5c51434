// Loads operand tiles into shared memory by cp.async (PTX ISA, "Asynchronous copy"): of kStages tiles of A
// and B, one is multiplied while the others arrive.
#pragma once

#include "operand_tile.cuh"

namespace pyruntime::portable {

template <class OperandTile, class T>
PYRUNTIME_DEVICE void load_tile(unsigned char* tile, const Operand<T>& from, int first_k, int depth,
                                bool aligned) {
  if (aligned) {
    OperandTile::template each_part<OperandTile::kParts>(
        from, first_k, depth, [&](int, int to, const T* source, int count) {
          // Copies nothing if no element exists, but still needs a valid address.
          device::copy_async(tile + to, count > 0 ? source : from.data, count * 2);
        });
  } else {
    OperandTile::template each_part<1>(from, first_k, depth, [&](int, int to, const T* source, int count) {
      store_vector(reinterpret_cast<T*>(tile + to), load_elements(source, count));
    });
  }
}

// sums = A B over all k of a Gemm (TileGemm). Ends with a barrier, after which shared memory is free.
template <class Gemm, class T>
PYRUNTIME_DEVICE void run_pipeline(typename Gemm::Sums& sums, unsigned char* shared, const Operand<T>& a,
                                   const Operand<T>& b, int64_t k) {
  using Config = typename Gemm::Configuration;
  using ATile = typename Gemm::ATile;
  using BTile = typename Gemm::BTile;
  constexpr int kStages = Config::kStages;
  const bool a_aligned = takes_vectors(a), b_aligned = takes_vectors(b);
  const int steps = static_cast<int>((k + kDepth - 1) / kDepth);
  const auto stage = [&](int step) { return shared + step % kStages * Config::kStageBytes; };
  const auto load = [&](int step) {
    if (step < steps) {
      const int first = step * kDepth, depth = static_cast<int>(k) - first;
      load_tile<ATile>(stage(step), a, first, depth, a_aligned);
      load_tile<BTile>(stage(step) + ATile::kBytes, b, first, depth, b_aligned);
    }
    device::copy_async_commit();  // also empty groups, because the wait below counts groups
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    device::copy_async_wait<kStages - 2>();
    // All threads' copies of this step have arrived, and all threads have read the stage that is filled next.
    __syncthreads();
    load(step + kStages - 1);
#pragma unroll
    for (int k = 0; k < kDepth; k += Gemm::kStep) {
      typename Gemm::Operands operands;
      Gemm::read(operands, stage(step), k);
      Gemm::template multiply<0, Config::kUnitsDown>(sums, operands);
    }
  }
  device::copy_async_wait<0>();
  __syncthreads();
}

}  // namespace pyruntime::portable
