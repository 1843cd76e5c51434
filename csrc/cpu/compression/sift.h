// Separates large values from the rest, in memory order. All instruction sets give the same bits
// (tests/cpp/cpu/test_sift.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/layers/simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define PYRUNTIME_SIFT_X86
#include <immintrin.h>
// gcc 12 warns of values that its own header leaves undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace pyruntime::cpu {

inline constexpr int64_t kSiftRun = 16;  // values examined together

PYRUNTIME_INLINE uint32_t magnitude(float value) {
  return layers::float_bits(value) & 0x7fffffffu;
}

// The large values found so far, in order, and their places.
struct Large {
  float* values;
  int32_t* places;
  int64_t number;
};

// Appends the values of x [count] of at least the magnitude `least` to `large`, which has room for all of x
// and kSiftRun more; x[0] is at place `first`. Writes x with zeros in their place to rest [count], and adds
// the squares of these to lanes [kSiftRun], x[i] to lane i mod kSiftRun. rest and lanes may be null.
struct Sift {
  static PYRUNTIME_INLINE void run(const float* x, int64_t count, uint32_t least, int32_t first, Large* large,
                                   float* rest, double* lanes) {
    for (int64_t at = 0; at < count; at += kSiftRun) {
      const int64_t size = std::min(kSiftRun, count - at);
      float kept[kSiftRun] = {};
      std::memcpy(kept, x + at, size * sizeof(float));
      uint32_t most = 0;
      PYRUNTIME_SIMD_REDUCE(max, most)
      for (int64_t i = 0; i < kSiftRun; ++i) most = magnitude(kept[i]) > most ? magnitude(kept[i]) : most;
      if (most >= least) {
        // Without branches: which values are large cannot be predicted.
        int64_t number = large->number;
        for (int64_t i = 0; i < size; ++i) {
          const bool is_large = magnitude(kept[i]) >= least;
          large->values[number] = kept[i];
          large->places[number] = first + static_cast<int32_t>(at + i);
          number += is_large ? 1 : 0;
          kept[i] = is_large ? 0.0f : kept[i];
        }
        large->number = number;
      }
      if (rest != nullptr) std::memcpy(rest + at, kept, size * sizeof(float));
      if (lanes == nullptr) continue;
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < kSiftRun; ++i) lanes[i] += static_cast<double>(kept[i]) * kept[i];
    }
  }
};

#ifdef PYRUNTIME_SIFT_X86

// Compresses whole runs in registers: compressing into memory takes ten times as long on Zen 4.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,popcnt"))) inline void sift_avx512(
    const float* x, int64_t count, uint32_t least, int32_t first, Large* large, float* rest, double* lanes) {
  const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(least));
  const __m512i step = _mm512_set1_epi32(kSiftRun);
  __m512i place = _mm512_add_epi32(_mm512_set1_epi32(first),
                                   _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  __m512d low = lanes == nullptr ? _mm512_setzero_pd() : _mm512_loadu_pd(lanes);
  __m512d high = lanes == nullptr ? _mm512_setzero_pd() : _mm512_loadu_pd(lanes + 8);
  float* values = large->values + large->number;
  int32_t* places = large->places + large->number;
  const int64_t whole = count / kSiftRun * kSiftRun;
  for (int64_t at = 0; at < whole; at += kSiftRun) {
    const __m512 here = _mm512_loadu_ps(x + at);
    const __m512i bits = _mm512_andnot_si512(sign, _mm512_castps_si512(here));
    const __mmask16 is_large = _mm512_cmpge_epu32_mask(bits, bound);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(is_large, here));
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi32(is_large, place));
    const int number = __builtin_popcount(is_large);
    values += number;
    places += number;
    place = _mm512_add_epi32(place, step);
    const __m512 kept = _mm512_maskz_mov_ps(static_cast<__mmask16>(~is_large), here);
    if (rest != nullptr) _mm512_storeu_ps(rest + at, kept);
    if (lanes == nullptr) continue;
    const __m512d one = _mm512_cvtps_pd(_mm512_castps512_ps256(kept));
    const __m512d other = _mm512_cvtps_pd(_mm512_extractf32x8_ps(kept, 1));
    low = _mm512_fmadd_pd(one, one, low);  // a square is exact in fp64
    high = _mm512_fmadd_pd(other, other, high);
  }
  large->number = values - large->values;
  if (lanes != nullptr) {
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
  }
  Sift::run(x + whole, count - whole, least, first + static_cast<int32_t>(whole), large,
            rest == nullptr ? nullptr : rest + whole, lanes);
}

#endif

inline void sift(const float* x, int64_t count, uint32_t least, int32_t first, Large* large, float* rest,
                 double* lanes) {
#ifdef PYRUNTIME_SIFT_X86
  if (layers::simd_level() == layers::SimdLevel::avx512) {
    return sift_avx512(x, count, least, first, large, rest, lanes);
  }
#endif
  layers::simd_run<Sift>(x, count, least, first, large, rest, lanes);
}

}  // namespace pyruntime::cpu
