// GEMMs of 16x16x32 by a wave of 64: MFMA of CDNA GPUs, and on the host its emulation (compiled with
// PYRUNTIME_HOST_WARP=64). A lane holds 8 consecutive k of one row of A, or of one column of B, which is one
// access of 16 bytes where k lies side by side. gfx950 takes them at once, at twice the rate; before it there
// are instructions of 16 k, whose lanes have 4 each: one gets the first 4 of every lane and one the others.
// That is another order of k than the one in memory, the same for A and B. 32x32x8 would read shared memory
// just as often at the same rate, so there is no second shape.
#pragma once

#include "cuda/compat.h"
#include "cuda/portable/numbers.cuh"

namespace pyruntime::portable {

#if defined(__HIP__) || defined(__HIPCC__)

typedef short Bf16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 Fp16x4 __attribute__((ext_vector_type(4)));
typedef float Floatx4 __attribute__((ext_vector_type(4)));

#if defined(__gfx950__)

typedef __bf16 Bf16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 Fp16x8 __attribute__((ext_vector_type(8)));

#define PYRUNTIME_MFMA(depth_16, Packed4, depth_32, Packed8)                                    \
  Floatx4 sum = {d[0], d[1], d[2], d[3]};                                                       \
  sum = depth_32(__builtin_bit_cast(Packed8, a), __builtin_bit_cast(Packed8, b), sum, 0, 0, 0); \
  for (int r = 0; r < 4; ++r) d[r] = sum[r]

#elif defined(__HIP_DEVICE_COMPILE__)

// Four of a lane's values, from `first` on.
template <class Packed>
PYRUNTIME_DEVICE Packed packed(const uint16_t (&values)[8], int first) {
  Packed result;
  __builtin_memcpy(&result, values + first, sizeof(result));
  return result;
}

#define PYRUNTIME_MFMA(depth_16, Packed4, depth_32, Packed8)                  \
  Floatx4 sum = {d[0], d[1], d[2], d[3]};                                     \
  sum = depth_16(packed<Packed4>(a, 0), packed<Packed4>(b, 0), sum, 0, 0, 0); \
  sum = depth_16(packed<Packed4>(a, 4), packed<Packed4>(b, 4), sum, 0, 0, 0); \
  for (int r = 0; r < 4; ++r) d[r] = sum[r]

#else

// The pass that compiles for the CPU knows no such builtins.
#define PYRUNTIME_MFMA(depth_16, Packed4, depth_32, Packed8) \
  static_cast<void>(d), static_cast<void>(a), static_cast<void>(b)

#endif

PYRUNTIME_DEVICE void multiply_unit(Bf16, float (&d)[4], const uint16_t (&a)[8], const uint16_t (&b)[8]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, Bf16x4, __builtin_amdgcn_mfma_f32_16x16x32_bf16,
                 Bf16x8);
}

PYRUNTIME_DEVICE void multiply_unit(Fp16, float (&d)[4], const uint16_t (&a)[8], const uint16_t (&b)[8]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, Fp16x4, __builtin_amdgcn_mfma_f32_16x16x32_f16,
                 Fp16x8);
}

#undef PYRUNTIME_MFMA

#else

template <class T>
void multiply_unit(T, float (&d)[4], const uint16_t (&a)[8], const uint16_t (&b)[8]) {
  const auto convert = [](uint16_t bits) { return to_float(T{bits}); };
  for (int half = 0; half < 2; ++half) {
    uint16_t left[4], right[4];
    std::memcpy(left, a + 4 * half, sizeof(left));
    std::memcpy(right, b + 4 * half, sizeof(right));
    host::mfma_16x16x16(d, left, right, convert);
  }
}

#endif

template <class T>
struct Mma {
  static constexpr int kDepth = 32;  // of k at once

  struct A {
    uint16_t values[8];
  };
  using B = A;
  struct Sum {
    float values[4];
  };

  template <class Tile>
  static PYRUNTIME_DEVICE void load_a(A& a, const unsigned char* tile, int row, int k, int lane) {
    load_b<Tile, true>(a, tile, row, k, lane);
  }

  template <class Tile, bool kAlongK>
  static PYRUNTIME_DEVICE void load_b(B& b, const unsigned char* tile, int column, int k, int lane) {
    const int c = column + lane % 16, first = k + lane / 16 * 8;
    if constexpr (kAlongK) {
      device::copy_bits(b.values, tile + Tile::offset_of(c, first), sizeof(b.values));
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) device::copy_bits(&b.values[e], tile + Tile::offset_of(c, first + e), 2);
    }
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
