#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/compression/fp8_kernels.h"

namespace {

using namespace pyruntime;

// Far apart within a block, so that some are subnormal beside the largest; all are finite as halves.
std::vector<float> values_of(int64_t rows, int64_t width, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-10, 8);
  std::vector<float> values(rows * width);
  for (float& value : values) value = std::ldexp(normal(generator), exponent(generator));
  if (!values.empty()) values[generator() % values.size()] = 0.0f;
  return values;
}

template <typename T>
void check_levels() {
  std::mt19937 generator(std::random_device{}());
  for (const int64_t width : {1, 7, 128, 129, 500}) {
    const int64_t rows = 9, blocks = rows * cpu::fp8_blocks(width);
    const int64_t bytes = rows * (width + cpu::fp8_blocks(width));
    std::vector<T> values;
    for (const float value : values_of(rows, width, generator)) values.push_back(static_cast<T>(value));
    std::vector<uint8_t> plain(bytes), best(bytes);
    cpu::PackFp8::run(values.data(), width, plain.data(), 0, blocks);
    layers::simd_run<cpu::PackFp8>(values.data(), width, best.data(), int64_t{0}, blocks);
    EXPECT(plain == best);
    std::vector<T> one(values.size()), other(values.size());
    cpu::UnpackFp8::run(plain.data(), width, one.data(), 0, blocks);
    layers::simd_run<cpu::UnpackFp8>(plain.data(), width, other.data(), int64_t{0}, blocks);
    EXPECT(one == other);
    // Packed again it is the same, in parts too.
    std::vector<T> again(values.size());
    layers::simd_run<cpu::PackFp8>(one.data(), width, best.data(), int64_t{0}, blocks / 2);
    layers::simd_run<cpu::PackFp8>(one.data(), width, best.data(), blocks / 2, blocks);
    cpu::UnpackFp8::run(best.data(), width, again.data(), 0, blocks);
    EXPECT(again == one);
  }
}

TEST(every_level_of_instructions_gives_the_same_bits) {
  check_levels<float>();
  check_levels<c10::BFloat16>();
  check_levels<c10::Half>();
}

// Blocks of bfloat16 are packed in 16 bits where no code is subnormal: at every scale, with values that are
// near the largest, and with some that are far from it, it is what each value alone is packed as.
TEST(a_block_of_bfloat16_is_what_its_values_are) {
  std::mt19937 generator(std::random_device{}());
  for (int top = 1; top < 255; ++top) {
    for (const int range : {1, 9, 15, 17, 30}) {
      std::vector<c10::BFloat16> values(cpu::kFp8Block), read(cpu::kFp8Block);
      uint32_t largest = 0;
      for (c10::BFloat16& value : values) {
        const auto exponent = static_cast<uint32_t>(std::max(0, top - static_cast<int>(generator() % range)));
        value.x = static_cast<uint16_t>((generator() & 0x807fu) | exponent << 7);
        if (generator() % 16 == 0) value.x &= 0x8000u;
        largest = std::max(largest, static_cast<uint32_t>(value.x & 0x7fffu) << 16);
      }
      std::vector<uint8_t> packed(cpu::kFp8Block + 1);
      layers::simd_run<cpu::PackFp8>(static_cast<const c10::BFloat16*>(values.data()), cpu::kFp8Block,
                                     packed.data(), int64_t{0}, int64_t{1});
      layers::simd_run<cpu::UnpackFp8>(static_cast<const uint8_t*>(packed.data()), cpu::kFp8Block,
                                       read.data(), int64_t{0}, int64_t{1});
      const int exponent = cpu::scale_of(largest);
      EXPECT_EQ(static_cast<int>(packed.back()), exponent);
      for (size_t i = 0; i < values.size(); ++i) {
        const float scaled = layers::load(values[i]) * cpu::power_of_two(254 - exponent);
        EXPECT_EQ(static_cast<int>(packed[i]), exponent == 0 ? 0 : static_cast<int>(cpu::to_e4m3(scaled)));
        c10::BFloat16 expected;
        layers::store(expected, cpu::from_e4m3(packed[i]) * cpu::power_of_two(exponent));
        EXPECT_EQ(read[i].x, expected.x);
      }
    }
  }
}

TEST(every_code_is_what_its_value_is_packed_as) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;  // NaN, which no value is packed as
    EXPECT_EQ(static_cast<int>(cpu::to_e4m3(cpu::from_e4m3(static_cast<uint8_t>(code)))), code);
  }
  EXPECT_EQ(cpu::from_e4m3(0x7e), 448.0f);
  EXPECT_EQ(cpu::from_e4m3(1), 0x1p-9f);
}

TEST(halfway_between_two_codes_the_even_one_is_taken) {
  for (int code = 0; code < 0x7e; ++code) {
    const float middle =
        0.5f * (cpu::from_e4m3(static_cast<uint8_t>(code)) + cpu::from_e4m3(static_cast<uint8_t>(code + 1)));
    EXPECT_EQ(static_cast<int>(cpu::to_e4m3(middle)), code + (code & 1));
  }
}

}  // namespace
