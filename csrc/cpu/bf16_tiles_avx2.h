// The inner loops of the bf16 GEMM (bf16_tiles.h) on processors without bf16 instructions. Both operands are
// widened to fp32, a panel when it is packed and a strip of rows once for a panel, so a step has
// multiply-adds and loads only: with operands of bf16 in the inner loop it ran at half the rate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "cpu/bf16_tiles.h"

namespace pyruntime::cpu::avx2 {

#define PYRUNTIME_TARGET __attribute__((target("avx2,fma")))
#define PYRUNTIME_TARGET_INLINE PYRUNTIME_TARGET static inline __attribute__((always_inline))

constexpr int kLanes = 8, kVectors = 2;
// 6 x 2 sums, 2 vectors of b and one of a take 15 of 16 registers. A panel is [kPanel / kTile, 2 * pairs,
// kTile] in fp32.
constexpr int64_t kTile = kVectors * kLanes;
constexpr int64_t kBlock = 128;            // pairs of a part of the depth, at most
constexpr int64_t kBandRows = 17 * kRows;  // rows of a band, with those that its first strip lacks, at most

PYRUNTIME_TARGET_INLINE __m256 even_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
PYRUNTIME_TARGET_INLINE __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
PYRUNTIME_TARGET_INLINE __m256 widened(const Bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// --- packing

// r[j], lane i = in[i * in_row + j], 8 x 8.
PYRUNTIME_TARGET_INLINE void transpose(const int32_t* in, int64_t in_row, __m256i (&r)[8]) {
  __m256i t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i * in_row));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

PYRUNTIME_TARGET inline void pack_columns(const Bf16* b, int64_t column, int64_t depth, int64_t width,
                                          void* panel) {
  const int64_t whole = depth / 2, all = (depth + 1) / 2;
  alignas(32) int32_t padded[kLanes * kLanes];
  for (int64_t n = 0; n < kPanel; n += kLanes) {
    auto* tile = static_cast<float*>(panel) + n / kTile * kTile * 2 * all + n % kTile;
    const int64_t columns = std::clamp<int64_t>(width - n, 0, kLanes);
    for (int64_t pair = 0; pair < all; pair += kLanes) {
      const Bf16* from = b + n * column + 2 * pair;
      const int64_t pairs = std::min<int64_t>(kLanes, all - pair);
      __m256i read[kLanes];
      if (columns == kLanes && pair + kLanes <= whole && column % 2 == 0 &&
          reinterpret_cast<uintptr_t>(from) % sizeof(int32_t) == 0) {
        transpose(reinterpret_cast<const int32_t*>(from), column / 2, read);
      } else {
        std::memset(padded, 0, sizeof(padded));
        const int64_t elements = std::min<int64_t>(2 * pairs, depth - 2 * pair);
        for (int64_t i = 0; i < columns; ++i) {
          std::memcpy(padded + i * kLanes, from + i * column, elements * sizeof(Bf16));
        }
        transpose(padded, kLanes, read);
      }
      float* to = tile + 2 * pair * kTile;
      for (int64_t j = 0; j < pairs; ++j, to += 2 * kTile) {
        _mm256_storeu_ps(to, even_of(read[j]));
        _mm256_storeu_ps(to + kTile, odd_of(read[j]));
      }
    }
  }
}

PYRUNTIME_TARGET inline void pack_rows(const Bf16* b, int64_t row, int64_t depth, int64_t width,
                                       void* panel) {
  const int64_t all = depth + depth % 2;
  Bf16 padded[kPanel] = {};
  for (int64_t k = 0; k < all; ++k) {
    auto* to = static_cast<float*>(panel) + k * kTile;
    const Bf16* from = b + k * row;
    if (width < kPanel || k == depth) {
      if (k < depth) std::memcpy(padded, from, width * sizeof(Bf16));
      if (k == depth) std::memset(padded, 0, sizeof(padded));
      from = padded;
    }
#pragma GCC unroll 8
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      _mm256_storeu_ps(to + n / kTile * kTile * all + n % kTile, widened(from + n));
    }
  }
}

PYRUNTIME_TARGET inline void pack_strips(const Bf16* a, int64_t row, int64_t depth, int64_t width,
                                         int32_t* strips) {
  const int64_t strip = (depth + 1) / 2 * kRows, count = (width + kRows - 1) / kRows;
  Bf16 padded[2][kStripColumns] = {};
  alignas(16) int32_t pairs[kStripColumns];
  for (int64_t k = 0; k < depth; k += 2, strips += kRows) {
    const Bf16 *first = a + k * row, *second = first + row;
    if (width < kStripColumns || k + 1 == depth) {
      std::memcpy(padded[0], first, width * sizeof(Bf16));
      if (k + 1 < depth) std::memcpy(padded[1], second, width * sizeof(Bf16));
      if (k + 1 == depth) std::memset(padded[1], 0, sizeof(padded[1]));
      first = padded[0], second = padded[1];
    }
    for (int64_t n = 0; n < count * kRows; n += kLanes) {
      const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + n));
      const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + n));
      _mm_store_si128(reinterpret_cast<__m128i*>(pairs + n), _mm_unpacklo_epi16(low, high));
      _mm_store_si128(reinterpret_cast<__m128i*>(pairs + n + kLanes / 2), _mm_unpackhi_epi16(low, high));
    }
    for (int64_t s = 0; s < count; ++s) std::memcpy(strips + s * strip, pairs + s * kRows, kRows * 4);
  }
}

// --- multiplying

// A band's left operand in fp32: [strips, pairs, 2, kRows], even and odd elements along k. A step of the
// product reads at fixed distances from one address.
constexpr int64_t kStep = 2 * kRows;
struct Wide {
  static constexpr int64_t kSlack = kLanes - kRows;  // whole vectors are stored
  alignas(32) float strips[kBandRows * 2 * (kBlock + 1) + kSlack];
  int64_t strip;  // distance
};

PYRUNTIME_TARGET_INLINE void widen(__m256i pairs, float* to) {
  _mm256_storeu_ps(to, even_of(pairs));
  _mm256_storeu_ps(to + kRows, odd_of(pairs));
}

PYRUNTIME_TARGET inline void widen(const LeftBand& left, Wide& wide) {
  const int64_t pairs = left.pairs + (left.has_half ? 1 : 0);
  wide.strip = pairs * kStep;
  if (left.pair != 1) {
    const __m256i six = _mm256_set_epi32(0, 0, -1, -1, -1, -1, -1, -1);
    for (int64_t s = 0; s * kRows < left.offset + left.rows; ++s) {
      const int32_t* from = left.strips + s * left.strip;
      float* to = wide.strips + s * wide.strip;
      for (int64_t p = 0; p < pairs; ++p) widen(_mm256_maskload_epi32(from + p * kRows, six), to + p * kStep);
    }
    return;
  }
  alignas(32) int32_t padded[kLanes * kLanes] = {};
  __m256i read[kLanes];
  for (int64_t row = 0; row < left.rows; row += kRows) {
    const int64_t count = std::min(kRows, left.rows - row);
    const int32_t* from = left.strips + row * left.row;
    float* to = wide.strips + row / kRows * wide.strip;
    for (int64_t p = 0; p < pairs; p += kLanes, to += kLanes * kStep) {
      const int64_t some = std::min<int64_t>(kLanes, pairs - p);
      const bool has_half = left.has_half && p + some == pairs;
      if (some == kLanes && count == kRows && !has_half) {
        for (int64_t i = 0; i < kRows; ++i) {
          const auto* eight = reinterpret_cast<const __m256i*>(from + i * left.row + p);
          _mm256_store_si256(reinterpret_cast<__m256i*>(padded + i * kLanes), _mm256_loadu_si256(eight));
        }
      } else {
        std::memset(padded, 0, sizeof(padded));
        for (int64_t i = 0; i < count; ++i) {
          std::memcpy(padded + i * kLanes, from + i * left.row + p,
                      some * sizeof(int32_t) - (has_half ? sizeof(Bf16) : 0));
        }
      }
      transpose(padded, kLanes, read);
      for (int64_t j = 0; j < some; ++j) widen(read[j], to + j * kStep);
    }
  }
}

// Rounds to nearest, ties to even, and keeps NaN a NaN.
PYRUNTIME_TARGET_INLINE __m128i rounded(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

// Up to kRows rows of a band with kTile columns of a panel.
struct Tile {
  const float *a, *b;
  int64_t pairs;
  int64_t columns;  // that exist in out
  const Bf16* bias;
  Bf16* out;
  float* wide;
  int64_t out_row;
  bool accumulate, is_first, is_last;
  float* sums;
};

template <int Rows>
PYRUNTIME_TARGET void multiply_rows(const Tile& tile) {
  __m256 sum[Rows][kVectors];
  alignas(32) float whole[Rows * kTile];  // of tiles that lie in out in part
  const float* from = tile.sums;
  int64_t from_row = kPanel;
  bool is_zero = tile.is_first;
  if (tile.is_first && tile.wide != nullptr && tile.accumulate) {
    std::memset(whole, 0, sizeof(whole));
    for (int64_t i = 0; i < Rows; ++i) {
      std::memcpy(whole + i * kTile, tile.wide + i * tile.out_row, tile.columns * sizeof(float));
    }
    from = whole, from_row = kTile, is_zero = false;
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
    sum[i][0] = is_zero ? _mm256_setzero_ps() : _mm256_loadu_ps(from + i * from_row);
    sum[i][1] = is_zero ? _mm256_setzero_ps() : _mm256_loadu_ps(from + i * from_row + kLanes);
  }
  const float *a = tile.a, *b = tile.b;
  for (int64_t pair = 0; pair < tile.pairs; ++pair, a += kStep, b += 2 * kTile) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 low = _mm256_loadu_ps(b + half * kTile), high = _mm256_loadu_ps(b + half * kTile + kLanes);
#pragma GCC unroll 6
      for (int i = 0; i < Rows; ++i) {
        const __m256 left = _mm256_broadcast_ss(a + half * kRows + i);
        sum[i][0] = _mm256_fmadd_ps(left, low, sum[i][0]);
        sum[i][1] = _mm256_fmadd_ps(left, high, sum[i][1]);
      }
    }
  }
  float* to = tile.is_last ? whole : tile.sums;
  const int64_t to_row = tile.is_last ? kTile : kPanel;
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
    _mm256_storeu_ps(to + i * to_row, sum[i][0]);
    _mm256_storeu_ps(to + i * to_row + kLanes, sum[i][1]);
  }
  if (!tile.is_last) return;
  Bf16 bias[kTile] = {}, old[kTile] = {};
  if (tile.bias != nullptr) std::memcpy(bias, tile.bias, tile.columns * sizeof(Bf16));
  for (int64_t i = 0; i < Rows; ++i) {
    if (tile.wide != nullptr) {
      std::memcpy(tile.wide + i * tile.out_row, whole + i * kTile, tile.columns * sizeof(float));
      continue;
    }
    Bf16* out = tile.out + i * tile.out_row;
    if (tile.accumulate) std::memcpy(old, out, tile.columns * sizeof(Bf16));
    alignas(32) Bf16 result[kTile];
#pragma GCC unroll 2
    for (int64_t j = 0; j < kTile; j += kLanes) {
      __m256 value = _mm256_load_ps(whole + i * kTile + j);
      if (tile.bias != nullptr) value = _mm256_add_ps(value, widened(bias + j));
      if (tile.accumulate) value = _mm256_add_ps(value, widened(old + j));
      _mm_store_si128(reinterpret_cast<__m128i*>(result + j), rounded(value));
    }
    std::memcpy(out, result, tile.columns * sizeof(Bf16));
  }
}

inline void multiply(const Band& band) {
  Wide left;
  widen(band.left, left);
  for (int64_t n = 0; n < band.columns; n += kTile) {
    const float* b =
        static_cast<const float*>(band.panel) + n * 2 * band.all_pairs + band.first_pair * 2 * kTile;
    for_strips(band.left.offset, band.left.rows, [&](int64_t row, int64_t count) {
      const int64_t place = band.left.offset + row, at = row * band.out_row + n;
      const Tile tile{left.strips + place / kRows * left.strip + place % kRows,
                      b,
                      left.strip / kStep,
                      std::min(kTile, band.columns - n),
                      band.bias != nullptr ? band.bias + n : nullptr,
                      band.wide != nullptr ? nullptr : band.out + at,
                      band.wide != nullptr ? band.wide + at : nullptr,
                      band.out_row,
                      band.accumulate,
                      band.is_first,
                      band.is_last,
                      band.sums + row * kPanel + n};
      with_rows(count, [&]<int Rows>() { multiply_rows<Rows>(tile); });
    });
  }
}

// A tile's part of a panel stays in half of a level 1 cache, a band's left operand in a level 2 cache.
constexpr Bf16Tiles kTiles{kPanel * 2 * sizeof(float),
                           {kBlock, kBandRows - kRows},
                           {kBlock, kBandRows - kRows},
                           pack_columns,
                           pack_rows,
                           pack_strips,
                           multiply};

#undef PYRUNTIME_TARGET
#undef PYRUNTIME_TARGET_INLINE

}  // namespace pyruntime::cpu::avx2
