// The inner loops of the bf16 GEMM (bf16_tiles.h) on AVX512-BF16. A panel is [pairs, kPanel, 2] in bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "cpu/bf16_tiles.h"

// gcc 12 warns of values that its own header leaves undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace pyruntime::cpu::avx512 {

#define PYRUNTIME_TARGET \
  __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#define PYRUNTIME_TARGET_INLINE PYRUNTIME_TARGET static inline __attribute__((always_inline))

// kRows x 4 sums, 4 vectors of b and one of a take 29 of 32 registers.
constexpr int kLanes = 16;  // fp32 sums of a vector, or its pairs along k
constexpr int kVectors = kPanel / kLanes;

// --- packing

// Prefetch distance in steps. The operands' rows lie pages apart, so hardware does not prefetch them.
constexpr int64_t kAhead = 8;

// out[j * out_row + i] = in[i * in_row + j], 16 x 16.
PYRUNTIME_TARGET_INLINE void transpose(const int32_t* in, int64_t in_row, int32_t* out, int64_t out_row) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * in_row);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 q + c], quarter l: column 4 l + c of rows 4 q to 4 q + 3.
  constexpr int kEven = 0x88, kOdd = 0xdd;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], kEven);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], kOdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], kEven);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], kOdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], kEven);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], kOdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], kEven);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], kOdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_row, r[i]);
}

PYRUNTIME_TARGET inline void pack_columns(const Bf16* b, int64_t column, int64_t depth, int64_t width,
                                          void* packed) {
  auto* panel = static_cast<int32_t*>(packed);
  const int64_t whole = depth / 2, all = (depth + 1) / 2;
  alignas(64) int32_t padded[kLanes * kLanes];
  for (int64_t pair = 0; pair < all; pair += kLanes) {
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const int64_t columns = std::clamp<int64_t>(width - n, 0, kLanes);
      const Bf16* from = b + n * column + 2 * pair;
      int32_t* to = panel + pair * kPanel + n;
      if (columns == kLanes && pair + kLanes <= whole && column % 2 == 0 &&
          reinterpret_cast<uintptr_t>(from) % sizeof(int32_t) == 0) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) __builtin_prefetch(from + i * column + kAhead * 2 * kLanes);
        transpose(reinterpret_cast<const int32_t*>(from), column / 2, to, kPanel);
        continue;
      }
      std::memset(padded, 0, sizeof(padded));
      const int64_t pairs = std::min<int64_t>(kLanes, all - pair);
      const int64_t elements = std::min<int64_t>(2 * pairs, depth - 2 * pair);
      for (int64_t i = 0; i < columns; ++i) {
        std::memcpy(padded + i * kLanes, from + i * column, elements * sizeof(Bf16));
      }
      for (int64_t j = 0; j < pairs; ++j) {
        for (int64_t i = 0; i < kLanes; ++i) to[j * kPanel + i] = padded[i * kLanes + j];
      }
    }
  }
}

PYRUNTIME_TARGET_INLINE __m512i lanes() {
  return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// Pairs each of up to 32 elements of a row with the one `next` elements further on, or with 0 if `next` is 0.
PYRUNTIME_TARGET_INLINE void interleave(const Bf16* from, int64_t next, int64_t width, __m512i& low,
                                        __m512i& high) {
  // Lane i takes element i of the first vector and of the second; in `of_high` element 16 + i.
  const __m512i of_low =
      _mm512_add_epi32(_mm512_mullo_epi32(lanes(), _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x200000));
  const __m512i of_high = _mm512_add_epi32(of_low, _mm512_set1_epi32(0x100010));
  const int64_t columns = std::clamp<int64_t>(width, 0, 2 * kLanes);
  const auto mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
  const __m512i first = _mm512_maskz_loadu_epi16(mask, from);
  const __m512i second = next != 0 ? _mm512_maskz_loadu_epi16(mask, from + next) : _mm512_setzero_si512();
  low = _mm512_permutex2var_epi16(first, of_low, second);
  high = _mm512_permutex2var_epi16(first, of_high, second);
}

PYRUNTIME_TARGET inline void pack_rows(const Bf16* b, int64_t row, int64_t depth, int64_t width,
                                       void* packed) {
  auto* panel = static_cast<int32_t*>(packed);
  for (int64_t k = 0; k < depth; k += 2, panel += kPanel) {
    for (int64_t n = 0; n < kPanel; n += 2 * kLanes) {
      __builtin_prefetch(b + (k + 2 * kAhead) * row + n);
      __builtin_prefetch(b + (k + 2 * kAhead + 1) * row + n);
      __m512i low, high;
      interleave(b + k * row + n, k + 1 < depth ? row : 0, width - n, low, high);
      _mm512_storeu_si512(panel + n, low);
      _mm512_storeu_si512(panel + n + kLanes, high);
    }
  }
}

PYRUNTIME_TARGET inline void pack_strips(const Bf16* a, int64_t row, int64_t depth, int64_t width,
                                         int32_t* strips) {
  constexpr int kStrips = kStripColumns / kRows, kLoads = kStripColumns / (2 * kLanes);
  const int64_t strip = (depth + 1) / 2 * kRows, count = (width + kRows - 1) / kRows;
  const __m512i lane = lanes();
  for (int64_t k = 0; k < depth; k += 2, strips += kRows) {
    __m512i pairs[2 * kLoads + 1];
#pragma GCC unroll 3
    for (int n = 0; n < kLoads; ++n) {
      interleave(a + k * row + n * 2 * kLanes, k + 1 < depth ? row : 0, width - n * 2 * kLanes, pairs[2 * n],
                 pairs[2 * n + 1]);
    }
    pairs[2 * kLoads] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int s = 0; s < kStrips; ++s) {
      if (s >= count) break;
      const int at = s * kRows;
      const __m512i six = _mm512_permutex2var_epi32(
          pairs[at / kLanes], _mm512_add_epi32(lane, _mm512_set1_epi32(at % kLanes)), pairs[at / kLanes + 1]);
      _mm256_mask_storeu_epi32(strips + s * strip, (1U << kRows) - 1, _mm512_castsi512_si256(six));
    }
  }
}

// --- multiplying

// Up to kRows rows of a band.
struct Strip {
  const int32_t* a;
  int64_t a_row, a_pair;
  int64_t pairs;
  bool has_half;
  const int32_t* panel;
  int64_t columns;
  const Bf16* bias;
  Bf16* out;
  float* wide;
  int64_t out_row;
  bool accumulate;
  bool is_first, is_last;
  float* sums;
};

PYRUNTIME_TARGET_INLINE __m512 load(const Bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

// Returns a mask of the columns of a vector that exist.
PYRUNTIME_TARGET_INLINE __mmask16 columns_of(const Strip& strip, int vector) {
  const int64_t columns = std::clamp<int64_t>(strip.columns - vector * kLanes, 0, kLanes);
  return static_cast<__mmask16>((1U << columns) - 1);
}

template <int Rows>
PYRUNTIME_TARGET void multiply_rows(const Strip& strip) {
  __m512 sum[Rows][kVectors];
  const bool continues = strip.is_first && strip.wide != nullptr && strip.accumulate;
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] =
          strip.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(strip.sums + i * kPanel + j * kLanes);
      if (continues) {
        sum[i][j] = _mm512_maskz_loadu_ps(columns_of(strip, j), strip.wide + i * strip.out_row + j * kLanes);
      }
    }
  }
  // Rows of out also lie pages apart.
  if (strip.is_last && strip.wide == nullptr) {
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      __builtin_prefetch(strip.out + i * strip.out_row, 1);
      __builtin_prefetch(strip.out + i * strip.out_row + kPanel / 2, 1);
    }
  }
  const int32_t *a = strip.a, *b = strip.panel;
  const int64_t a_row = strip.a_row, a_pair = strip.a_pair;
  for (int64_t pair = 0; pair < strip.pairs; ++pair, a += a_pair, b += kPanel) {
    __m512i right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = _mm512_loadu_si512(b + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      int32_t both;
      std::memcpy(&both, a + i * a_row, sizeof(both));
      const __m512i left = _mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
      }
    }
  }
  if (strip.has_half) {
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      uint16_t last;
      std::memcpy(&last, a + i * a_row, sizeof(last));
      const __m512i left = _mm512_set1_epi32(last);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)_mm512_loadu_si512(b + j * kLanes));
      }
    }
  }
  if (!strip.is_last) {
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        _mm512_storeu_ps(strip.sums + i * kPanel + j * kLanes, sum[i][j]);
      }
    }
    return;
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const __mmask16 mask = columns_of(strip, j);
    if (strip.wide != nullptr) {
#pragma GCC unroll 6
      for (int i = 0; i < Rows; ++i) {
        _mm512_mask_storeu_ps(strip.wide + i * strip.out_row + j * kLanes, mask, sum[i][j]);
      }
      continue;
    }
    const __m512 bias = strip.bias != nullptr ? load(strip.bias + j * kLanes, mask) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      Bf16* out = strip.out + i * strip.out_row + j * kLanes;
      __m512 value = sum[i][j];
      if (strip.bias != nullptr) value = _mm512_add_ps(value, bias);
      if (strip.accumulate) value = _mm512_add_ps(value, load(out, mask));
      _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(value));
    }
  }
}

inline void multiply(const Band& band) {
  const LeftBand& left = band.left;
  for_strips(left.offset, left.rows, [&](int64_t row, int64_t count) {
    const int64_t place = left.offset + row, at = row * band.out_row;
    const Strip strip{left.strips + place / kRows * left.strip + place % kRows * left.row,
                      left.row,
                      left.pair,
                      left.pairs,
                      left.has_half,
                      static_cast<const int32_t*>(band.panel) + band.first_pair * kPanel,
                      band.columns,
                      band.bias,
                      band.wide != nullptr ? nullptr : band.out + at,
                      band.wide != nullptr ? band.wide + at : nullptr,
                      band.out_row,
                      band.accumulate,
                      band.is_first,
                      band.is_last,
                      band.sums + row * kPanel};
    with_rows(count, [&]<int Rows>() { multiply_rows<Rows>(strip); });
  });
}

// A panel's part fills half of a level 2 cache if the left operand is read in place, else a level 1 cache.
constexpr Bf16Tiles kTiles{kPanel * 2 * sizeof(Bf16),
                           {1024, kMostRows},
                           {128, 32 * kRows},
                           pack_columns,
                           pack_rows,
                           pack_strips,
                           multiply};

#undef PYRUNTIME_TARGET
#undef PYRUNTIME_TARGET_INLINE

}  // namespace pyruntime::cpu::avx512

#pragma GCC diagnostic pop
