#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/compression/sift.h"

namespace {

using namespace pyruntime;
using cpu::kSiftRun, cpu::Large, cpu::magnitude;

struct Sifted {
  std::vector<float> values, rest;
  std::vector<int32_t> places;
  std::vector<double> lanes;
  bool operator==(const Sifted&) const = default;
};

template <typename Sift>
Sifted sifted(const std::vector<float>& x, uint32_t least, const Sift& sift) {
  const auto room = x.size() + kSiftRun;
  Sifted result{std::vector<float>(room), std::vector<float>(x.size()), std::vector<int32_t>(room),
                std::vector<double>(kSiftRun, 0.1)};
  Large large{result.values.data(), result.places.data(), 0};
  sift(x.data(), static_cast<int64_t>(x.size()), least, 7, &large, result.rest.data(), result.lanes.data());
  result.values.resize(large.number);
  result.places.resize(large.number);
  return result;
}

const auto plain = [](auto... args) { cpu::Sift::run(args...); };
const auto best = [](auto... args) { cpu::sift(args...); };

std::vector<float> normal_numbers(int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(generator);
  return x;
}

TEST(every_level_of_instructions_gives_the_same_bits) {
  std::mt19937 generator(std::random_device{}());
  for (const int64_t count : {0, 1, 15, 16, 17, 500, 512}) {
    const auto x = normal_numbers(count, generator);
    for (const float least : {0.0f, 0.5f, 2.0f, 9.0f}) {
      EXPECT(sifted(x, layers::float_bits(least), plain) == sifted(x, layers::float_bits(least), best));
    }
  }
}

TEST(what_is_large_leaves_zeros_and_the_squares_are_of_the_rest) {
  std::mt19937 generator(std::random_device{}());
  auto x = normal_numbers(100, generator);
  x[3] = std::numeric_limits<float>::infinity();
  x[50] = -4.0f;
  const uint32_t least = layers::float_bits(1.25f);
  const Sifted found = sifted(x, least, best);
  size_t large = 0;
  double squares = 0.1 * kSiftRun;
  for (size_t i = 0; i < x.size(); ++i) {
    const bool is_large = !(std::fabs(x[i]) < 1.25f);
    EXPECT_EQ(found.rest[i], is_large ? 0.0f : x[i]);
    squares += static_cast<double>(found.rest[i]) * found.rest[i];
    if (!is_large) continue;
    EXPECT_EQ(found.values[large], x[i]);
    EXPECT_EQ(found.places[large++], static_cast<int32_t>(i) + 7);
  }
  EXPECT_EQ(found.values.size(), large);
  double sum = 0;
  for (const double lane : found.lanes) sum += lane;
  EXPECT(std::fabs(sum - squares) < 1e-9 * squares);
}

TEST(what_is_large_may_take_the_place_of_the_values) {
  std::mt19937 generator(std::random_device{}());
  for (const int64_t count : {5, 16, 333}) {
    auto x = normal_numbers(count, generator);
    const Sifted expected = sifted(x, layers::float_bits(0.3f), plain);
    x.resize(count + kSiftRun);
    std::vector<int32_t> places(x.size());
    std::vector<double> lanes(kSiftRun, 0.1);
    Large large{x.data(), places.data(), 0};
    cpu::sift(x.data(), count, layers::float_bits(0.3f), 7, &large, nullptr, lanes.data());
    x.resize(large.number);
    EXPECT(x == expected.values && lanes == expected.lanes);
  }
}

}  // namespace
