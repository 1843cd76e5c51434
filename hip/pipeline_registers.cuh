// Moves tiles of operands through registers into shared memory, for GPUs without asynchronous copies. While
// one tile of A and B is multiplied in shared memory, the next one is stored into the other of two stages,
// and the one after it is being loaded.
#pragma once

#include "cuda/portable/gemm/operand_tile.cuh"

namespace pyruntime::portable {

// One thread's part of a tile, as words, so that nothing waits for a load before the store.
template <class OperandTile, class T>
struct Held {
  uint4 parts[OperandTile::kParts];

  // For tiles that exist completely, in whole vectors: no part needs a check.
  PYRUNTIME_DEVICE void load_whole(const Operand<T>& from, int first_k) {
    OperandTile::template each_part<OperandTile::kParts>(
        from, first_k, kDepth,
        [&](int i, int, const T* source, int) { parts[i] = device::load_streaming(source); });
  }

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

// Computes sums = A B over all k of a Gemm (TileGemm). Ends with a barrier: shared memory is free.
//
// A step begins with its operands in registers. It stores the next tile from registers into the other stage,
// starts to load the one after it, and computes half of the products. After a barrier it starts to read the
// operands of the next step, and the other half of the products hides that latency.
template <class Gemm, class T>
PYRUNTIME_DEVICE void run_pipeline(typename Gemm::Sums& sums, unsigned char* shared, const Operand<T>& a,
                                   const Operand<T>& b, int64_t k) {
  using Config = typename Gemm::Configuration;
  using ATile = typename Gemm::ATile;
  using BTile = typename Gemm::BTile;
  static_assert(Config::kStages == 2 && Gemm::kStep == kDepth);
  constexpr int kHalf = Config::kUnitsDown / 2;
  const bool a_aligned = takes_vectors(a), b_aligned = takes_vectors(b);
  const bool whole = a_aligned && b_aligned && a.rows >= ATile::kTileRows && b.rows >= BTile::kTileRows;
  const int steps = static_cast<int>((k + kDepth - 1) / kDepth);
  Held<ATile, T> next_a;
  Held<BTile, T> next_b;
  const auto load = [&](int step) {
    const int first = step * kDepth, depth = static_cast<int>(k) - first;
    next_a.load(a, first, depth, a_aligned);
    next_b.load(b, first, depth, b_aligned);
  };
  const auto stage = [&](int step) { return shared + step % 2 * Config::kStageBytes; };
  const auto store = [&](int step) {
    next_a.store(stage(step));
    next_b.store(stage(step) + ATile::kBytes);
  };
  if (steps > 0) {
    load(0);
    store(0);
  }
  if (steps > 1) load(1);
  device::shared_barrier();
  if (steps == 0) return;
  typename Gemm::Operands now, next;
  Gemm::read(now, stage(0), 0);
  int step = 0;
  // A separate loop for whole tiles: where two kinds of loads join, the compiler waits for all loads.
  for (; whole && (step + 3) * kDepth <= k; ++step) {
    store(step + 1);
    next_a.load_whole(a, (step + 2) * kDepth);
    next_b.load_whole(b, (step + 2) * kDepth);
    Gemm::template multiply<0, kHalf>(sums, now);
    device::shared_barrier();
    Gemm::read(next, stage(step + 1), 0);
    Gemm::template multiply<kHalf, Config::kUnitsDown>(sums, now);
    now = next;
  }
  for (; step < steps; ++step) {
    if (step + 1 < steps) store(step + 1);
    if (step + 2 < steps) load(step + 2);
    Gemm::template multiply<0, kHalf>(sums, now);
    device::shared_barrier();
    if (step + 1 < steps) Gemm::read(next, stage(step + 1), 0);
    Gemm::template multiply<kHalf, Config::kUnitsDown>(sums, now);
    now = next;
  }
}

}  // namespace pyruntime::portable
