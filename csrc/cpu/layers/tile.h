#pragma once

// GEMMs of small matrices in caches, for kernels that use the result right away.
//
//   C [rows, 32] (+)= A [rows, depth] B [depth, 32]
//
// A library's GEMM spends as long on preparing for a matrix of this size as on multiplying it, and computes
// whole rectangles. Here a caller may skip the empty part of a triangular matrix, by tiles of 8 x 32.
//
// Operands are Plain<float> or Plain<double>, or Bf16Pairs: bfloat16 with float32 sums, by an instruction
// that takes two neighbours along the depth (AVX512-BF16). `group` is 1 or 2; strides and depths count
// groups.
//   A: any strides, so that it may be read transposed; rows are a multiple of kTileRows, in padded memory.
//   B: a panel, [depth][kPanel][group] and contiguous; a wider B is a sequence of panels.
//   C: row stride `c_row`, columns contiguous.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define PYRUNTIME_TILE_X86
#include <immintrin.h>
#endif

namespace pyruntime::layers {

constexpr int64_t kTileRows = 8;
constexpr int64_t kPanel = 32;

template <typename T>
struct Tile {
  int64_t rows, depth;
  const T* a;
  int64_t a_row, a_depth;
  const T* b;
  T* c;
  int64_t c_row;
  bool accumulate;
};

template <typename T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes)));
};

// Multiplies one register block of Rows x Columns vectors at a time. This is a macro because a template that
// is inlined into a function with a target attribute already has its vectors split for the baseline.
#define PYRUNTIME_DEFINE_MULTIPLY(NAME, TARGET, BYTES, ROWS, COLUMNS)                          \
  template <typename T>                                                                        \
  TARGET void NAME(const Tile<T>& t) {                                                         \
    using Vector = typename VectorOf<T, BYTES>::type;                                          \
    constexpr int64_t kLanes = BYTES / sizeof(T);                                              \
    for (int64_t column = 0; column < kPanel; column += COLUMNS * kLanes) {                    \
      for (int64_t row = 0; row < t.rows; row += ROWS) {                                       \
        const T *a = t.a + row * t.a_row, *b = t.b + column;                                   \
        T* c = t.c + row * t.c_row + column;                                                   \
        Vector sum[ROWS][COLUMNS];                                                             \
        for (int i = 0; i < ROWS; ++i) {                                                       \
          for (int j = 0; j < COLUMNS; ++j) sum[i][j] = Vector{};                              \
        }                                                                                      \
        for (int64_t k = 0; k < t.depth; ++k, a += t.a_depth, b += kPanel) {                   \
          Vector right[COLUMNS];                                                               \
          for (int j = 0; j < COLUMNS; ++j) {                                                  \
            std::memcpy(&right[j], b + j * kLanes, sizeof(Vector));                            \
          }                                                                                    \
          for (int i = 0; i < ROWS; ++i) {                                                     \
            for (int j = 0; j < COLUMNS; ++j) sum[i][j] += a[i * t.a_row] * right[j];          \
          }                                                                                    \
        }                                                                                      \
        for (int i = 0; i < ROWS; ++i) {                                                       \
          for (int j = 0; j < COLUMNS; ++j) {                                                  \
            Vector old{};                                                                      \
            if (t.accumulate) std::memcpy(&old, c + i * t.c_row + j * kLanes, sizeof(Vector)); \
            old += sum[i][j];                                                                  \
            std::memcpy(c + i * t.c_row + j * kLanes, &old, sizeof(Vector));                   \
          }                                                                                    \
        }                                                                                      \
      }                                                                                        \
    }                                                                                          \
  }

PYRUNTIME_DEFINE_MULTIPLY(multiply_baseline, , 16, 4, 2)

#ifdef PYRUNTIME_TILE_X86

PYRUNTIME_DEFINE_MULTIPLY(multiply_avx2, __attribute__((target("avx2,fma"))), 32, 4, 2)
PYRUNTIME_DEFINE_MULTIPLY(
    multiply_avx512,
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"))), 64, 8, 2)

template <typename T>
void multiply(const Tile<T>& tile) {
  switch (simd_level()) {
    case SimdLevel::avx512:
      return multiply_avx512(tile);
    case SimdLevel::avx2:
      return multiply_avx2(tile);
    case SimdLevel::baseline:
      return multiply_baseline(tile);
  }
}

#else

template <typename T>
void multiply(const Tile<T>& tile) {
  multiply_baseline(tile);
}

#endif

#undef PYRUNTIME_DEFINE_MULTIPLY

// ---- operands ----

// Operands that are not converted.
template <typename A>
struct Plain {
  using accumulate_t = A;
  using element_t = A;
  static constexpr int64_t group = 1;

  static void multiply_panel(int64_t rows, int64_t depth, const A* a, int64_t a_row, int64_t a_depth,
                             const A* b, A* c, int64_t c_row, bool accumulate) {
    multiply(Tile<A>{rows, depth, a, a_row, a_depth, b, c, c_row, accumulate});
  }
};

#ifdef PYRUNTIME_TILE_X86

#define PYRUNTIME_BF16_TARGET \
  __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))

struct Bf16Pairs {
  using accumulate_t = float;
  using element_t = c10::BFloat16;
  static constexpr int64_t group = 2;

  static bool available() {
    static const bool found = simd_level() == SimdLevel::avx512 && __builtin_cpu_supports("avx512bf16");
    return found;
  }

  PYRUNTIME_BF16_TARGET static void multiply_panel(int64_t rows, int64_t depth, const element_t* a_in,
                                                   int64_t a_row, int64_t a_depth, const element_t* b_in,
                                                   float* c_in, int64_t c_row, bool accumulate) {
    constexpr int kRows = 8, kColumns = 2;
    for (int64_t row = 0; row < rows; row += kRows) {
      const element_t *a = a_in + row * a_row * group, *b = b_in;
      float* c = c_in + row * c_row;
      __m512 sum[kRows][kColumns];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kColumns; ++j) {
          sum[i][j] = accumulate ? _mm512_loadu_ps(c + i * c_row + j * 16) : _mm512_setzero_ps();
        }
      }
      for (int64_t k = 0; k < depth; ++k, a += a_depth * group, b += kPanel * group) {
        const __m512i right[kColumns] = {_mm512_loadu_si512(b), _mm512_loadu_si512(b + 32)};
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          int32_t pair;
          std::memcpy(&pair, a + i * a_row * group, sizeof(pair));
          const __m512i left = _mm512_set1_epi32(pair);
          for (int j = 0; j < kColumns; ++j) {
            sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kColumns; ++j) _mm512_storeu_ps(c + i * c_row + j * 16, sum[i][j]);
      }
    }
  }

  // Rounds `rows` x `columns` floats to an operand that is read along its rows. Columns are a multiple of
  // kPanel; `stride` is that of both matrices, in elements.
  PYRUNTIME_BF16_TARGET static void round_rows(const float* in, int64_t stride, int64_t rows, int64_t columns,
                                               element_t* out) {
    for (int64_t row = 0; row < rows; ++row, in += stride, out += stride) {
      for (int64_t j = 0; j < columns; j += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(in + j + 16), _mm512_loadu_ps(in + j));
        _mm512_storeu_si512(out + j, (__m512i)both);
      }
    }
  }

  // The same for an operand that is read along its columns, [rows / 2][stride][2], and, if `along_rows` is
  // not null, for one read along its rows too. The number of rows is even.
  PYRUNTIME_BF16_TARGET static void round_columns(const float* in, int64_t stride, int64_t rows,
                                                  int64_t columns, element_t* along_columns,
                                                  element_t* along_rows) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // Lane i takes elements i and 16 + i.
    const __m512i interleave =
        _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x100000));
    for (int64_t row = 0; row < rows; row += 2, in += 2 * stride, along_columns += 2 * stride) {
      for (int64_t j = 0; j < columns; j += 16) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(in + stride + j), _mm512_loadu_ps(in + j));
        const __m512i bits = (__m512i)both;
        _mm512_storeu_si512(along_columns + 2 * j, _mm512_permutexvar_epi16(interleave, bits));
        if (along_rows) {
          element_t* out = along_rows + row * stride + j;
          // Masked, because the forms without a mask make g++ warn of an uninitialised variable of its own.
          _mm256_storeu_si256((__m256i*)out, _mm512_maskz_extracti64x4_epi64(0xff, bits, 0));
          _mm256_storeu_si256((__m256i*)(out + stride), _mm512_maskz_extracti64x4_epi64(0xff, bits, 1));
        }
      }
    }
  }
};

#endif

}  // namespace pyruntime::layers
