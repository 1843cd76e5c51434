// Packing as e4m3 and quantizing, against their definitions value by value (csrc/cpu/compression).
#include <limits>

#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

// Values of very different sizes, among them zeros and, as asked, one that is not finite.
template <class T>
std::vector<T> uneven_values(int64_t count, uint64_t seed, float strange = 0) {
  std::vector<T> values = random_values<T>(count, seed);
  for (int64_t i = 0; i < count; ++i) {
    const float size = i % 13 == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(i * 7 % 19) - 12);
    values[i] = portable::round_to<T>(to_float(values[i]) * size);
  }
  if (strange != 0 && count > 3) values[count / 3] = portable::round_to<T>(strange);
  return values;
}

template <class T>
bool same_bits(const T& one, const T& other) {
  return (std::isnan(to_float(one)) && std::isnan(to_float(other))) ||
         std::memcmp(&one, &other, sizeof(T)) == 0;
}

// ---- fp8 ----

double value_of_code(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// The nearest of all codes up to 448; of two as near the even one.
int code_of_value(double value) {
  int best = 0;
  for (int code = 0; code < 127; ++code) {
    const double far = std::fabs(value_of_code(code) - std::fabs(value));
    const double least = std::fabs(value_of_code(best) - std::fabs(value));
    if (far < least || (far == least && code % 2 == 0)) best = code;
  }
  return std::signbit(value) ? best | 0x80 : best;
}

// The exponent of the least power of two that times 448 is at least `largest`, biased as in a float.
int exponent_for(double largest) {
  if (!std::isfinite(largest)) return 255;
  int exponent = -127;
  while (std::ldexp(448.0, exponent) < largest) ++exponent;
  return exponent + 127;
}

template <class T>
void packs(int64_t rows, int64_t width, int64_t shift, float strange = 0) {
  const int64_t blocks = (width + 127) / 128, pitch = width + blocks;
  const std::vector<T> values = uneven_values<T>(shift + rows * width, rows * width, strange);
  std::vector<uint8_t> packed(shift + rows * pitch + 1, 0xaa);
  std::vector<T> read = poison<T>(shift + rows * width + 1);
  EXPECT_OK(
      pyruntime_pack_fp8(values.data() + shift, dtype_of<T>(), rows, width, packed.data() + shift, nullptr));
  EXPECT_OK(
      pyruntime_unpack_fp8(packed.data() + shift, rows, width, read.data() + shift, dtype_of<T>(), nullptr));
  for (int64_t at = 0; at < rows * blocks; ++at) {
    const int64_t row = at / blocks, first = at % blocks * 128, count = std::min<int64_t>(128, width - first);
    const T* block = values.data() + shift + row * width + first;
    const uint8_t* bytes = packed.data() + shift + row * pitch;
    double largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double size = std::fabs(to_float(block[i]));
      largest = std::isnan(size) ? INFINITY : std::max(largest, size);
    }
    const int exponent = exponent_for(largest);
    if (bytes[width + at % blocks] != exponent) {
      return check::fail(__FILE__, __LINE__, "the scale of block " + std::to_string(at));
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool is_zero = exponent == 0 || exponent == 255;
      const int code = is_zero ? 0 : code_of_value(std::ldexp(to_float(block[i]), 127 - exponent));
      const double value = exponent == 255 ? NAN : std::ldexp(value_of_code(code), exponent - 127);
      const T wanted = portable::round_to<T>(static_cast<float>(value));
      const T& found = read[shift + row * width + first + i];
      if (bytes[first + i] != code || !same_bits(found, wanted)) {
        return check::fail(__FILE__, __LINE__,
                           "value " + std::to_string(first + i) + " of row " + std::to_string(row));
      }
    }
  }
  EXPECT_EQ(int{packed.back()}, 0xaa);
  EXPECT(std::isnan(to_float(read.back())));
}

TEST(rows_are_packed_as_the_nearest_e4m3_of_their_block) {
  std::mt19937_64 draw(kSeed);
  packs<Bf16>(3, 512, 0);  // four values of a lane at once
  packs<float>(2, 1024, 0);
  packs<Fp16>(5, 512, 0);
  packs<Bf16>(4, 130, 0);
  packs<float>(9, 7, 1);
  packs<Fp16>(2, 513, 3);
  packs<float>(1, 1, 0);
  packs<Bf16>(2, 512, 2);  // not aligned
  for (int round = 0; round < 4; ++round)
    packs<Bf16>(random_size(draw, 1, 9), random_size(draw, 1, 700), random_size(draw, 0, 3));
}

TEST(a_block_that_is_not_finite_reads_as_nan_and_tiny_ones_as_zero) {
  packs<float>(2, 300, 0, INFINITY);
  packs<Bf16>(2, 512, 0, NAN);
  packs<Fp16>(2, 300, 1, -INFINITY);
  packs<float>(1, 128, 0, 3e38f);
  const std::vector<float> tiny(200, 1e-37f);
  std::vector<uint8_t> packed(202, 0xaa);
  EXPECT_OK(pyruntime_pack_fp8(tiny.data(), PYRUNTIME_FP32, 1, 200, packed.data(), nullptr));
  EXPECT(std::all_of(packed.begin(), packed.end(), [](uint8_t byte) { return byte == 0; }));
}

// ---- quantizing ----

uint32_t random_number(uint32_t seed, uint32_t index) {
  uint32_t x = index * 0x9e3779b9u + seed;
  for (int round = 0; round < 2; ++round) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
  }
  return x;
}

struct Asked {
  int bits;
  bool with_residual = true, is_random = false;
  int64_t shift = 0;  // of the first byte that is packed
  float strange = 0;
};

// What a block becomes; x becomes what it loses. Returns the step.
float codes_by_definition(std::vector<float>& x, int64_t first, const Asked& asked, uint8_t* codes) {
  const int middle = asked.bits == 1 ? 1 : (1 << (asked.bits - 1)) - 1;
  const int top = asked.bits == 1 ? 1 : 2 * middle, stride = asked.bits == 1 ? 2 : 1;
  float largest = 0, sums[64] = {};
  bool is_finite = true;
  for (size_t i = 0; i < x.size(); ++i) {
    is_finite = is_finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
    sums[i % 64] += std::fabs(x[i]);
  }
  if (!is_finite) {
    std::fill(codes, codes + 512, 0);
    std::fill(x.begin(), x.end(), 0.0f);
    return NAN;
  }
  for (int half = 32; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  const float mean = sums[0] / static_cast<float>(x.size());
  float step = largest / static_cast<float>(middle);
  if (!asked.is_random && asked.bits == 1) step = mean;
  if (!asked.is_random && asked.bits == 2) step = std::min(largest, 2 * mean);
  float scale = 1 / (asked.bits == 1 ? 2 * largest : step);
  if (largest < 1e-30f) step = scale = 0;
  for (int i = 0; i < 512; ++i) {  // also those that fill up the last block
    const float value = i < static_cast<int>(x.size()) ? x[i] : 0;
    const uint32_t noise = random_number(77, 5 + static_cast<uint32_t>(first + i));
    const float up = asked.is_random ? static_cast<float>(noise >> 8) * 0x1p-24f : 0.5f;
    const int code = static_cast<int>(std::fma(value, scale, 0.5f * static_cast<float>(top) + up));
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0, top));
    if (i < static_cast<int>(x.size()))
      x[i] = std::fma(-static_cast<float>(codes[i] * stride - middle), step, x[i]);
  }
  return step;
}

template <class T>
void quantizes(int64_t count, const Asked& asked) {
  const int64_t blocks = (count + 511) / 512;
  const std::vector<T> values = uneven_values<T>(count, count + asked.bits, asked.strange);
  const std::vector<float> before = random_values<float>(count, 3);
  std::vector<float> residual = before;
  const int64_t bytes = 4 * blocks + count / 512 * 64 * asked.bits + (count % 512 + 7) / 8 * asked.bits;
  std::vector<uint8_t> packed(asked.shift + bytes + 1, 0xaa), wanted(bytes, 0);
  const PyruntimeQuantized operands{dtype_of<T>(),
                                    asked.bits,
                                    count,
                                    values.data(),
                                    asked.with_residual ? residual.data() : nullptr,
                                    packed.data() + asked.shift,
                                    asked.is_random ? 1 : 0,
                                    77,
                                    5};
  EXPECT_OK(pyruntime_quantize(&operands, nullptr));
  const std::vector<float> sums = random_values<float>(count, 4);
  std::vector<float> read = poison<float>(count), added = sums;
  EXPECT_OK(pyruntime_dequantize(packed.data() + asked.shift, asked.bits, read.data(), count, 0, nullptr));
  EXPECT_OK(pyruntime_dequantize(packed.data() + asked.shift, asked.bits, added.data(), count, 1, nullptr));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * 512, size = std::min<int64_t>(512, count - first), plane = (size + 7) / 8;
    std::vector<float> x(size);
    for (int64_t i = 0; i < size; ++i) {
      x[i] = to_float(values[first + i]) + (asked.with_residual ? before[first + i] : 0.0f);
    }
    uint8_t codes[512];
    const float step = codes_by_definition(x, first, asked, codes);
    std::memcpy(wanted.data() + 4 * block, &step, 4);
    uint8_t* planes = wanted.data() + 4 * blocks + block * 64 * asked.bits;
    for (int64_t i = 0; i < 8 * plane; ++i) {
      for (int bit = 0; bit < asked.bits; ++bit)
        planes[bit * plane + i % plane] |= static_cast<uint8_t>((codes[i] >> bit & 1) << (i / plane));
    }
    const int middle = asked.bits == 1 ? 1 : (1 << (asked.bits - 1)) - 1, stride = asked.bits == 1 ? 2 : 1;
    for (int64_t i = 0; i < size; ++i) {
      const auto steps = static_cast<float>(codes[i] * stride - middle);
      const float sum = std::fma(steps, step, sums[first + i]);
      const bool right = same_bits(read[first + i], steps * step) && same_bits(added[first + i], sum) &&
                         (!asked.with_residual || same_bits(residual[first + i], x[i]));
      if (!right) return check::fail(__FILE__, __LINE__, "value " + std::to_string(first + i));
    }
  }
  for (int64_t i = 0; i < bytes; ++i) {
    if (packed[asked.shift + i] != wanted[i]) {
      return check::fail(__FILE__, __LINE__,
                         "byte " + std::to_string(i) + " with bits=" + std::to_string(asked.bits));
    }
  }
  EXPECT_EQ(int{packed.back()}, 0xaa);
}

TEST(values_are_quantized_as_defined_and_the_residual_is_what_was_lost) {
  std::mt19937_64 draw(kSeed);
  for (int bits = 1; bits <= 8; ++bits) {
    quantizes<float>(1024 + random_size(draw, 0, 600), {bits});
    quantizes<Bf16>(random_size(draw, 1, 1100), {bits, true, true});
  }
  quantizes<Fp16>(512 * 9, {4});  // several blocks for each warp
  quantizes<float>(777, {3, /*with_residual=*/false, /*is_random=*/false, /*shift=*/1});
  quantizes<float>(1, {2});
}

TEST(a_block_that_is_not_finite_has_no_step_and_leaves_no_residual) {
  for (const float strange : {INFINITY, -INFINITY, NAN}) quantizes<float>(1300, {4, true, false, 0, strange});
}

TEST(the_order_of_threads_changes_nothing) {
  for (const unsigned order : {1u, 2u, 3u}) {
    host::set_schedule(order);
    quantizes<float>(1300, {2});
    packs<Bf16>(3, 300, 0);
  }
  host::set_schedule(0);
}

TEST(compression_kernels_check_their_arguments) {
  float x[8] = {};
  uint8_t bytes[16] = {};
  EXPECT_EQ(pyruntime_pack_fp8(x, 7, 1, 8, bytes, nullptr), static_cast<int>(PYRUNTIME_INVALID));
  EXPECT_EQ(pyruntime_pack_fp8(nullptr, PYRUNTIME_FP32, 1, 8, bytes, nullptr),
            static_cast<int>(PYRUNTIME_INVALID));
  EXPECT_EQ(pyruntime_dequantize(bytes, 9, x, 8, 0, nullptr), static_cast<int>(PYRUNTIME_INVALID));
  EXPECT(std::string(pyruntime_error()).find("bits=9; a value takes 1 to 8 bits.") != std::string::npos);
  EXPECT_OK(pyruntime_dequantize(nullptr, 4, nullptr, 0, 0, nullptr));
}

}  // namespace
