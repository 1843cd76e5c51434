// GEMMs of 16x16x32 by a wave of 64: MFMA on CDNA GPUs, and its emulation on the host (compiled with
// PYRUNTIME_HOST_WARP=64). A lane has 8 consecutive k of one row of A, or of one column of B, which is one
// access of 16 bytes if k is contiguous. gfx950 takes all 8 at once, at twice the rate. Older GPUs have
// instructions for 16 k with 4 in each lane: the first instruction gets the first 4 of every lane, the second
// the others. That permutes k, in the same way for A and B.
//
// If columns of B are contiguous, a lane reads four of them at once for each of its k: 16 lanes read 64
// columns, which use all banks. Two k of a column are then packed in registers. Each of the four columns goes
// to a separate GEMM: the first computes columns 0, 4, 8, .., the second 1, 5, 9, .. and so on.
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

// Returns four of a lane's values, in two words from `first` on.
template <class Packed>
PYRUNTIME_DEVICE Packed packed(const uint32_t (&words)[4], int first) {
  Packed result;
  __builtin_memcpy(&result, words + first, sizeof(result));
  return result;
}

#define PYRUNTIME_MFMA(depth_16, Packed4, depth_32, Packed8)                  \
  Floatx4 sum = {d[0], d[1], d[2], d[3]};                                     \
  sum = depth_16(packed<Packed4>(a, 0), packed<Packed4>(b, 0), sum, 0, 0, 0); \
  sum = depth_16(packed<Packed4>(a, 2), packed<Packed4>(b, 2), sum, 0, 0, 0); \
  for (int r = 0; r < 4; ++r) d[r] = sum[r]

#else

// The pass that compiles for the CPU lacks these builtins.
#define PYRUNTIME_MFMA(depth_16, Packed4, depth_32, Packed8) \
  static_cast<void>(d), static_cast<void>(a), static_cast<void>(b)

#endif

PYRUNTIME_DEVICE void multiply_unit(Bf16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, Bf16x4, __builtin_amdgcn_mfma_f32_16x16x32_bf16,
                 Bf16x8);
}

PYRUNTIME_DEVICE void multiply_unit(Fp16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  PYRUNTIME_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, Fp16x4, __builtin_amdgcn_mfma_f32_16x16x32_f16,
                 Fp16x8);
}

#undef PYRUNTIME_MFMA

#else

template <class T>
void multiply_unit(T, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const auto convert = [](uint16_t bits) { return to_float(T{bits}); };
  for (int half = 0; half < 2; ++half) {
    uint16_t left[4], right[4];
    std::memcpy(left, a + 2 * half, sizeof(left));
    std::memcpy(right, b + 2 * half, sizeof(right));
    host::mfma_16x16x16(d, left, right, convert);
  }
}

#endif

// Pack halves of two words, those of `first` below. The builtin is one instruction; plain code becomes two.
#if defined(__HIP_DEVICE_COMPILE__)
PYRUNTIME_DEVICE uint32_t lower_halves(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x05040100);
}
PYRUNTIME_DEVICE uint32_t upper_halves(uint32_t first, uint32_t second) {
  return __builtin_amdgcn_perm(second, first, 0x07060302);
}
#else
PYRUNTIME_DEVICE uint32_t lower_halves(uint32_t first, uint32_t second) {
  return (first & 0xffff) | second << 16;
}
PYRUNTIME_DEVICE uint32_t upper_halves(uint32_t first, uint32_t second) {
  return first >> 16 | (second & 0xffff0000);
}
#endif

template <class T>
struct Mma {
  static constexpr int kDepth = 32;  // k of one instruction

  struct A {
    uint32_t words[4];  // 8 k of a row, in order
  };
  using B = A;
  struct Sum {
    float values[4];
  };

  template <class Tile>
  static PYRUNTIME_DEVICE void load_a(A& a, const unsigned char* tile, int row, int k, int lane) {
    device::copy_bits(a.words, tile + Tile::offset_of(row + lane % 16, k + lane / 16 * 8), sizeof(a.words));
  }

  // Loads B of kUnits adjacent GEMMs, from `column` on.
  template <class Tile, bool kAlongK, int kUnits>
  static PYRUNTIME_DEVICE void load_b(B (&b)[kUnits], const unsigned char* tile, int column, int k,
                                      int lane) {
    if constexpr (kAlongK) {
#pragma unroll
      for (int j = 0; j < kUnits; ++j) load_a<Tile>(b[j], tile, column + 16 * j, k, lane);
    } else {
      static_assert(kUnits == 4, "a lane reads four columns at once");
      static_assert(!Tile::kSwizzled);
      // One address for all lines: the offset of a line is in the instruction.
      const unsigned char* from = tile + Tile::offset_of(column + lane % 16 * 4, k + lane / 16 * 8);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        uint32_t even[2], odd[2];  // four columns at a k, and at the next
        device::copy_bits(even, from + e * Tile::kLineBytes, sizeof(even));
        device::copy_bits(odd, from + (e + 1) * Tile::kLineBytes, sizeof(odd));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          b[2 * j].words[e / 2] = lower_halves(even[j], odd[j]);
          b[2 * j + 1].words[e / 2] = upper_halves(even[j], odd[j]);
        }
      }
    }
  }

  static PYRUNTIME_DEVICE void multiply(Sum& sum, const A& a, const B& b) {
    multiply_unit(T{}, sum.values, a.words, b.words);
  }

  // Calls store(row, column, values) for this lane's sums of adjacent GEMMs; the values are contiguous in a
  // row.
  template <bool kAlongK, int kUnits, class Store>
  static PYRUNTIME_DEVICE void for_each(const Sum (&sums)[kUnits], int lane, const Store& store) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 16 * 4 + r;
      if constexpr (kAlongK) {
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          const float value[1] = {sums[j].values[r]};
          store(row, 16 * j + lane % 16, value);
        }
      } else {
        const float values[4] = {sums[0].values[r], sums[1].values[r], sums[2].values[r], sums[3].values[r]};
        store(row, lane % 16 * 4, values);
      }
    }
  }
};

}  // namespace pyruntime::portable
