// Products of 16x16x16 by a wave of 64: MFMA of CDNA GPUs, and on the host its emulation (compiled with
// PYRUNTIME_HOST_WARP=64). A lane holds 4 consecutive k of one row of A, or of one column of B.
#pragma once

#include "compat.h"
#include "numbers.cuh"
#if !defined(__HIP__) && !defined(__HIPCC__)
#include "host/instructions.h"
#endif

namespace pyruntime::portable {

#if defined(__HIP__) || defined(__HIPCC__)

typedef short Bf16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 Fp16x4 __attribute__((ext_vector_type(4)));
typedef float Floatx4 __attribute__((ext_vector_type(4)));

template <class Packed>
PYRUNTIME_DEVICE Packed packed(const uint16_t (&values)[4]) {
  Packed result;
  __builtin_memcpy(&result, values, sizeof(result));
  return result;
}

#if defined(__HIP_DEVICE_COMPILE__)
#define PYRUNTIME_MFMA(builtin, Packed)                              \
  Floatx4 sum = {d[0], d[1], d[2], d[3]};                            \
  sum = builtin(packed<Packed>(a), packed<Packed>(b), sum, 0, 0, 0); \
  for (int r = 0; r < 4; ++r) d[r] = sum[r]
#else
// The pass that compiles for the CPU knows no such builtins.
#define PYRUNTIME_MFMA(builtin, Packed) static_cast<void>(d), static_cast<void>(a), static_cast<void>(b)
#endif

PYRUNTIME_DEVICE void multiply_unit(Bf16, float (&d)[4], const uint16_t (&a)[4], const uint16_t (&b)[4]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, Bf16x4);
}

PYRUNTIME_DEVICE void multiply_unit(Fp16, float (&d)[4], const uint16_t (&a)[4], const uint16_t (&b)[4]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, Fp16x4);
}

#undef PYRUNTIME_MFMA

#else

template <class T>
void multiply_unit(T, float (&d)[4], const uint16_t (&a)[4], const uint16_t (&b)[4]) {
  host::mfma_16x16x16(d, a, b, [](uint16_t bits) { return to_float(T{bits}); });
}

#endif

template <class T>
struct Mma {
  struct A {
    uint16_t values[4];
  };
  using B = A;
  struct Sum {
    float values[4];
  };

  // Row `row` of A, or column `row` of B; the layouts are the same.
  template <class Tile, bool kAlongK>
  static PYRUNTIME_DEVICE void load_a(A& a, const unsigned char* tile, int row, int k, int lane) {
    const int r = row + lane % 16, first = k + lane / 16 * 4;
    if constexpr (kAlongK) {
      device::copy_bits(a.values, tile + Tile::offset_of(r, first), sizeof(a.values));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) device::copy_bits(&a.values[e], tile + Tile::offset_of(r, first + e), 2);
    }
  }

  template <class Tile, bool kAlongK>
  static PYRUNTIME_DEVICE void load_b(B& b, const unsigned char* tile, int column, int k, int lane) {
    load_a<Tile, kAlongK>(b, tile, column, k, lane);
  }

  static PYRUNTIME_DEVICE void multiply(Sum& sum, const A& a, const B& b) {
    multiply_unit(T{}, sum.values, a.values, b.values);
  }

  static constexpr int kAdjacent = 1;  // columns that a lane holds side by side

  // Calls store(row, column, values of kAdjacent columns) for what this lane holds.
  template <class Store>
  static PYRUNTIME_DEVICE void for_each(const Sum& sum, int lane, const Store& store) {
#pragma unroll
    for (int r = 0; r < 4; ++r) store(lane / 16 * 4 + r, lane % 16, &sum.values[r]);
  }
};

}  // namespace pyruntime::portable
