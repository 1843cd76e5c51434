// GEMMs of 16x16x16 by a warp of 32 lanes: mma.sync on NVIDIA GPUs, and its emulation on the host. B is two
// halves of 8 columns.
#pragma once

#include "cuda/compat.h"
#include "cuda/portable/numbers.cuh"

namespace pyruntime::portable {

#if defined(__CUDACC__)

template <bool kTransposed>
PYRUNTIME_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
  const uint32_t address = device::shared_address(row);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
  }
}

#define PYRUNTIME_MMA(type)                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

PYRUNTIME_DEVICE void multiply_half(Bf16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  PYRUNTIME_MMA("bf16");
}

PYRUNTIME_DEVICE void multiply_half(Fp16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  PYRUNTIME_MMA("f16");
}

#undef PYRUNTIME_MMA

#else

using host::load_matrices;

template <class T>
void multiply_half(T, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  host::mma_m16n8k16(d, a, b, [](uint16_t bits) { return to_float(T{bits}); });
}

#endif

template <class T>
struct Mma {
  static constexpr int kDepth = 16;  // elements of k in one step

  struct A {
    uint32_t words[4];
  };
  using B = A;
  struct Sum {
    float halves[2][4];
  };

  // A and B are read in the same way: as 8x8 matrices, one for every 8 lanes.
  template <class Tile>
  static PYRUNTIME_DEVICE void load_a(A& a, const unsigned char* tile, int row, int k, int lane) {
    const int matrix = lane / 8, line = lane % 8;
    load_matrices<false>(a.words, tile + Tile::offset_of(row + matrix % 2 * 8 + line, k + matrix / 2 * 8));
  }

  // Loads B for kUnits adjacent GEMMs, from `column` on.
  template <class Tile, bool kAlongK, int kUnits>
  static PYRUNTIME_DEVICE void load_b(B (&b)[kUnits], const unsigned char* tile, int column, int k,
                                      int lane) {
    const int matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int first = column + 16 * j + matrix / 2 * 8;
      const int r = kAlongK ? first + line : first;
      const int c = kAlongK ? k + matrix % 2 * 8 : k + matrix % 2 * 8 + line;
      load_matrices<!kAlongK>(b[j].words, tile + Tile::offset_of(r, c));
    }
  }

  static PYRUNTIME_DEVICE void multiply(Sum& sum, const A& a, const B& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t right[2] = {b.words[2 * half], b.words[2 * half + 1]};
      multiply_half(T{}, sum.halves[half], a.words, right);
    }
  }

  // Calls store(row, column, values) for this lane's sums of adjacent GEMMs; values are adjacent in a row.
  template <bool kAlongK, int kUnits, class Store>
  static PYRUNTIME_DEVICE void for_each(const Sum (&sums)[kUnits], int lane, const Store& store) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* held = sums[j].halves[half];
        const float above[2] = {held[0], held[1]}, below[2] = {held[2], held[3]};
        const int column = 16 * j + half * 8 + lane % 4 * 2;
        store(lane / 4, column, above);
        store(lane / 4 + 8, column, below);
      }
    }
  }
};

}  // namespace pyruntime::portable
