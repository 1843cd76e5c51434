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
