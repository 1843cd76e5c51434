#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/reduce.h"

namespace {

using pyruntime::cpu::sum_in_rank_order;

template <typename T>
std::vector<T> random_values(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(normal(generator));
  return values;
}

// What the header promises, element by element: fp32 (fp64) additions in rank order and one rounding.
template <typename T, typename Accumulator>
T expected_at(const std::vector<std::vector<T>>& parts, const std::vector<T>& bias, int64_t i) {
  Accumulator sum = 0;
  for (const auto& part : parts) sum += static_cast<Accumulator>(part[i]);
  if (!bias.empty()) sum += static_cast<Accumulator>(bias[i % static_cast<int64_t>(bias.size())]);
  return static_cast<T>(sum);
}

template <typename T, typename Accumulator>
void check_sums(c10::ScalarType dtype) {
  std::mt19937 generator(std::random_device{}());
  for (const int64_t width : {1, 7, 33, 500}) {
    for (const int64_t rows : {0, 1, 9, 17}) {
      for (const int ranks : {1, 2, 5}) {
        for (const bool with_bias : {false, true}) {
          const int64_t count = rows * width;
          std::vector<std::vector<T>> parts;
          for (int rank = 0; rank < ranks; ++rank) parts.push_back(random_values<T>(count, generator));
          const std::vector<T> bias = random_values<T>(with_bias ? width : 0, generator);
          std::vector<const void*> pointers;
          for (const auto& part : parts) pointers.push_back(part.data());
          std::vector<T> out(count);
          sum_in_rank_order(dtype, out.data(), pointers, count, with_bias ? bias.data() : nullptr, width);
          int64_t wrong = 0;
          for (int64_t i = 0; i < count; ++i) wrong += out[i] != expected_at<T, Accumulator>(parts, bias, i);
          EXPECT_EQ(wrong, 0);
        }
      }
    }
  }
}

TEST(fp32_sums_are_exact_to_the_bit) {
  check_sums<float, float>(c10::ScalarType::Float);
}
TEST(fp64_sums_are_exact_to_the_bit) {
  check_sums<double, double>(c10::ScalarType::Double);
}
TEST(bf16_sums_are_exact_to_the_bit) {
  check_sums<c10::BFloat16, float>(c10::ScalarType::BFloat16);
}
TEST(fp16_sums_are_exact_to_the_bit) {
  check_sums<c10::Half, float>(c10::ScalarType::Half);
}

TEST(the_output_may_be_one_of_the_parts) {
  std::mt19937 generator(std::random_device{}());
  const int64_t count = 5000;
  const std::vector<std::vector<float>> parts = {random_values<float>(count, generator),
                                                 random_values<float>(count, generator)};
  std::vector<float> out = parts[1];
  sum_in_rank_order(c10::ScalarType::Float, out.data(), {parts[0].data(), out.data()}, count, nullptr, count);
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong += out[i] != expected_at<float, float>(parts, {}, i);
  EXPECT_EQ(wrong, 0);
}

TEST(infinities_and_nans_stay_what_they_are_in_bf16) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<c10::BFloat16> values = {infinity, -infinity, std::nanf(""), 3.3895e38f, -3.3895e38f};
  std::vector<c10::BFloat16> out(values.size());
  sum_in_rank_order(c10::ScalarType::BFloat16, out.data(), {values.data(), values.data()},
                    static_cast<int64_t>(values.size()), nullptr, 1);
  EXPECT_EQ(static_cast<float>(out[0]), infinity);
  EXPECT_EQ(static_cast<float>(out[1]), -infinity);
  EXPECT(std::isnan(static_cast<float>(out[2])));
  EXPECT_EQ(static_cast<float>(out[3]), infinity);
  EXPECT_EQ(static_cast<float>(out[4]), -infinity);
}

TEST(a_dtype_that_cannot_be_summed_is_named) {
  int32_t out = 0;
  EXPECT_THROWS(sum_in_rank_order(c10::ScalarType::Int, &out, {&out}, 1, nullptr, 1), "Cannot sum Int");
}

}  // namespace
