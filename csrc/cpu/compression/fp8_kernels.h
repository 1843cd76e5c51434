// The loops of fp8.h. Each step is exact or rounded once, so that all instruction sets give the same bits
// (tests/cpp/cpu/test_fp8.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

inline constexpr int64_t kFp8Block = 128;

inline int64_t fp8_blocks(int64_t width) {
  return (width + kFp8Block - 1) / kFp8Block;
}

// Returns the e4m3 code of a value of magnitude at most 448: sign, 4 bits of exponent, 3 of mantissa; rounded
// to the nearest, ties to even.
PYRUNTIME_INLINE uint8_t to_e4m3(float value) {
  const uint32_t bits = layers::float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  // Adding 2^14 rounds to multiples of 2^-9, the step of values below 2^-6.
  const uint32_t subnormal = layers::float_bits(layers::bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  const uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
}

PYRUNTIME_INLINE float from_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float subnormal = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9f;
  const uint32_t normal = (magnitude << 20) + 0x3c000000u;
  const uint32_t bits = magnitude < 8 ? layers::float_bits(subnormal) : normal;
  return layers::bits_float(bits | (code & 0x80u) << 24);
}

// Returns the biased exponent of a block's scale, as in a float: the least power of two that times 448 is at
// least the largest magnitude. largest: the bits of that magnitude. 0: all values become 0. 255: a value is
// not finite.
PYRUNTIME_INLINE int scale_of(uint32_t largest) {
  if (largest >= 0x7f800000u) return 255;
  const int exponent = static_cast<int>(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  return std::max(exponent, 0);
}

PYRUNTIME_INLINE float power_of_two(int exponent) {
  return layers::bits_float(static_cast<uint32_t>(exponent) << 23);
}

// Packs the blocks [begin, end) of values [rows, width], counted over all rows.
struct PackFp8 {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, int64_t width, uint8_t* packed, int64_t begin,
                                   int64_t end) {
    const int64_t blocks = fp8_blocks(width);
    int64_t block = begin % blocks;
    values += begin / blocks * width;
    packed += begin / blocks * (width + blocks);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t first = block * kFp8Block;
      const int count = static_cast<int>(std::min(kFp8Block, width - first));
      pack(values + first, count, packed + first, packed + width + block);
      if (++block == blocks) {
        block = 0;
        values += width;
        packed += width + blocks;
      }
    }
  }

 private:
  template <typename T>
  static PYRUNTIME_INLINE void pack(const T* values, int count, uint8_t* codes, uint8_t* scale) {
    const bool is_whole = count == kFp8Block;
    const int exponent = scale_of(is_whole ? largest_of(values, kFp8Block) : largest_of(values, count));
    *scale = static_cast<uint8_t>(exponent);
    if (exponent == 0 || exponent == 255) {
      std::memset(codes, 0, static_cast<size_t>(count));
    } else if (!is_whole) {
      encode(values, count, exponent, codes);
    } else if (!encode_normal(values, exponent, codes)) {
      encode(values, kFp8Block, exponent, codes);
    }
  }

  // Returns the bits of the largest magnitude; NaN and infinity have the largest bits.
  static PYRUNTIME_INLINE uint32_t largest_of(const float* values, int count) {
    uint32_t largest = 0;
    PYRUNTIME_SIMD_REDUCE(max, largest)
    for (int i = 0; i < count; ++i) {
      const uint32_t magnitude = layers::float_bits(values[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }

  template <typename T>
  static PYRUNTIME_INLINE uint32_t largest_of(const T* values, int count) {
    uint16_t largest = 0;
    PYRUNTIME_SIMD_REDUCE(max, largest)
    for (int i = 0; i < count; ++i) {
      const uint16_t magnitude = values[i].x & 0x7fffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    T found;
    found.x = largest;
    return layers::float_bits(layers::load(found));
  }

  template <typename T>
  static PYRUNTIME_INLINE void encode(const T* values, int count, int exponent, uint8_t* codes) {
    // Converted in a separate loop: loops of mixed vector widths wait for the wider one.
    alignas(64) float x[kFp8Block];
    const float inverse = power_of_two(254 - exponent);
    PYRUNTIME_SIMD
    for (int i = 0; i < count; ++i) x[i] = layers::load(values[i]) * inverse;
    PYRUNTIME_SIMD
    for (int i = 0; i < count; ++i) codes[i] = to_e4m3(x[i]);
  }

  template <typename T>
  static PYRUNTIME_INLINE bool encode_normal(const T*, int, uint8_t*) {
    return false;
  }

  // Encodes a whole block of bfloat16 in 16-bit lanes, twice as many to a vector as 32-bit ones. Returns
  // false if a code would be subnormal (magnitudes from 2^-10 to 2^-6 of the scale), which few blocks have.
  static PYRUNTIME_INLINE bool encode_normal(const c10::BFloat16* values, int exponent, uint8_t* codes) {
    if (exponent < 10) return false;  // 2^-10 of the scale would be subnormal itself
    const auto zero = static_cast<uint16_t>((exponent - 7) << 7);  // its code would be 0
    const auto subnormal = static_cast<uint16_t>(zero - 383);  // the least magnitude with a subnormal code
    uint16_t nearest = 0xffff;
    PYRUNTIME_SIMD_REDUCE(min, nearest)
    for (int i = 0; i < kFp8Block; ++i) {
      const uint16_t magnitude = values[i].x & 0x7fffu;
      const auto above = static_cast<uint16_t>(magnitude - subnormal);
      nearest = above < nearest ? above : nearest;
    }
    if (nearest < 511) return false;
    PYRUNTIME_SIMD
    for (int i = 0; i < kFp8Block; ++i) {
      const uint16_t bits = values[i].x, magnitude = bits & 0x7fffu;
      const auto rounded = static_cast<uint16_t>(magnitude + 7 + (magnitude >> 4 & 1));
      const auto above = static_cast<uint16_t>((rounded > zero ? rounded : zero) - zero);
      codes[i] = static_cast<uint8_t>((bits >> 8 & 0x80) | above >> 4);
    }
    return true;
  }
};

struct UnpackFp8 {
  template <typename T>
  static PYRUNTIME_INLINE void run(const uint8_t* packed, int64_t width, T* out, int64_t begin, int64_t end) {
    const int64_t blocks = fp8_blocks(width);
    int64_t block = begin % blocks;
    out += begin / blocks * width;
    packed += begin / blocks * (width + blocks);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t first = block * kFp8Block;
      const int count = static_cast<int>(std::min(kFp8Block, width - first));
      unpack(packed + first, count, packed[width + block], out + first);
      if (++block == blocks) {
        block = 0;
        out += width;
        packed += width + blocks;
      }
    }
  }

 private:
  template <typename T>
  static PYRUNTIME_INLINE void unpack(const uint8_t* codes, int count, int exponent, T* out) {
    if (count < kFp8Block) {
      decode(codes, count, exponent, out);
    } else if (!decode_normal(codes, exponent, out)) {
      decode(codes, kFp8Block, exponent, out);
    }
  }

  // A block that is not finite has an infinite scale and codes of 0; their product is NaN.
  template <typename T>
  static PYRUNTIME_INLINE void decode(const uint8_t* codes, int count, int exponent, T* out) {
    const float scale = power_of_two(exponent);
    PYRUNTIME_SIMD
    for (int i = 0; i < count; ++i) layers::store(out[i], from_e4m3(codes[i]) * scale);
  }

  template <typename T>
  static PYRUNTIME_INLINE bool decode_normal(const uint8_t*, int, T*) {
    return false;
  }

  // The inverse of encode_normal(). Returns false unless all codes are zero or normal, and their values too.
  static PYRUNTIME_INLINE bool decode_normal(const uint8_t* codes, int exponent, c10::BFloat16* out) {
    if (exponent < 7 || exponent > 246) return false;
    uint8_t nearest = 0xff;
    PYRUNTIME_SIMD_REDUCE(min, nearest)
    for (int i = 0; i < kFp8Block; ++i) {
      const auto above = static_cast<uint8_t>((codes[i] & 0x7f) - 1);
      nearest = above < nearest ? above : nearest;
    }
    if (nearest < 7) return false;
    const auto zero = static_cast<uint16_t>((exponent - 7) << 7);
    PYRUNTIME_SIMD
    for (int i = 0; i < kFp8Block; ++i) {
      const uint16_t code = codes[i], magnitude = code & 0x7fu;
      const auto normal = static_cast<uint16_t>((magnitude << 4) + zero);
      out[i].x = static_cast<uint16_t>((code & 0x80u) << 8 | (magnitude == 0 ? 0 : normal));
    }
    return true;
  }
};

}  // namespace pyruntime::cpu
