#include "cpu/compression/largest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace pyruntime::cpu {

namespace {

using layers::load;

constexpr int64_t kTile = 512;         // values of x that are computed, then sifted
constexpr int64_t kRoom = 1 << 13;     // room beyond twice the number sought
constexpr int64_t kSampled = 1 << 10;  // most runs in a sample
constexpr int64_t kDensest = 32;       // one run in so many is sampled, at most
constexpr int kBins = 1 << 11;
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();  // larger than every magnitude

template <typename T>
PYRUNTIME_INLINE float sum(const T& value, const float* before, int64_t at) {
  return before == nullptr ? load(value) : before[at] + load(value);
}

struct SumTile {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, const float* before, int64_t count, float* x) {
    if (before == nullptr) {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) x[i] = load(values[i]);
    } else {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) x[i] = before[i] + load(values[i]);
    }
  }
};

struct Range {
  static PYRUNTIME_INLINE void run(const float* values, int64_t count, uint32_t* least_to,
                                   uint32_t* most_to) {
    uint32_t least = kNone, most = 0;
    PYRUNTIME_PRAGMA(omp simd reduction(min : least) reduction(max : most))
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = magnitude(values[i]);
      least = bits < least ? bits : least;
      most = bits > most ? bits : most;
    }
    *least_to = least;
    *most_to = most;
  }
};

// Returns the k-th largest magnitude, 1 <= k <= count, as a float's bits.
uint32_t kth_magnitude(const float* values, int64_t count, int64_t k) {
  uint32_t least = 0, most = 0;
  layers::simd_run<Range>(values, count, &least, &most);
  int shift = 0;
  while ((most - least) >> shift >= kBins) ++shift;
  std::array<int64_t, kBins> bins{};
  for (int64_t i = 0; i < count; ++i) ++bins[(magnitude(values[i]) - least) >> shift];
  int64_t left = k;
  uint32_t bin = kBins - 1;
  for (; bins[bin] < left; --bin) left -= bins[bin];
  std::vector<uint32_t> in_bin;
  in_bin.reserve(static_cast<size_t>(bins[bin]));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude(values[i]);
    if ((bits - least) >> shift == bin) in_bin.push_back(bits);
  }
  const auto kth = in_bin.begin() + (left - 1);
  std::nth_element(in_bin.begin(), kth, in_bin.end(), std::greater<>());
  return *kth;
}

// Samples one whole run at a random place of each of equal stretches, so that no period of x escapes it.
template <typename T>
std::vector<float> sample_of(const T* values, const float* before, int64_t count) {
  const int64_t runs = std::max(kDensest, count / kSiftRun / kSampled), stretch = runs * kSiftRun;
  std::vector<float> sample;
  sample.reserve(static_cast<size_t>(count / runs));
  for (int64_t first = 0; first + stretch <= count; first += stretch) {
    const int64_t run = layers::random_bits(0, static_cast<uint32_t>(first)) % static_cast<uint32_t>(runs);
    const int64_t begin = first + run * kSiftRun;
    for (int64_t i = begin; i < begin + kSiftRun; ++i) sample.push_back(sum(values[i], before, i));
  }
  return sample;
}

}  // namespace

Largest::Largest(int64_t count, int64_t k, float* rest, bool adds)
    : k_(k),
      room_(std::min(count, 2 * k + kRoom) + kSiftRun),
      rest_(rest),
      adds_(adds),
      values_(new float[room_]),
      places_(new int32_t[room_]),
      large_{values_.get(), places_.get(), 0} {}

Largest Largest::of(const at::Tensor& values, const float* before, int64_t k, float* rest, bool adds) {
  Largest found(values.numel(), k, rest, adds);
  switch (values.scalar_type()) {
    case at::kFloat:
      found.find(values.const_data_ptr<float>(), before, values.numel());
      break;
    case at::kBFloat16:
      found.find(values.const_data_ptr<c10::BFloat16>(), before, values.numel());
      break;
    default:
      found.find(values.const_data_ptr<c10::Half>(), before, values.numel());
  }
  return found;
}

template <typename T>
void Largest::find(const T* values, const float* before, int64_t count) {
  if (k_ == 0) return look_through(values, before, count, kNone);
  const std::vector<float> sample = sample_of(values, before, count);
  const auto size = static_cast<int64_t>(sample.size());
  const double expected = static_cast<double>(size) * static_cast<double>(k_) / static_cast<double>(count);
  // Four standard deviations of caution, for values in random order.
  auto rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected)) + 1;
  const auto least = [&] { return rank > size ? 0 : kth_magnitude(sample.data(), size, rank); };
  look_through(values, before, count, least());
  while (number() < k_) {
    put_back();
    rank *= 4;
    if (rest_ == nullptr) {
      look_through(values, before, count, least());
    } else {  // `rest` now contains x, and may be the array that `before` was
      look_through(static_cast<const float*>(rest_), nullptr, count, least());
    }
  }
}

template <typename T>
void Largest::look_through(const T* values, const float* before, int64_t count, uint32_t least) {
  least_ = least;
  std::fill_n(squares_, kSiftRun, 0.0);
  float x[kTile];
  for (int64_t at = 0; at < count; at += kTile) {
    const int64_t size = std::min(kTile, count - at);
    if (number() + size + kSiftRun > room_) settle();
    layers::simd_run<SumTile>(values + at, before == nullptr ? before : before + at, size,
                              static_cast<float*>(x));
    sift(x, size, least_, static_cast<int32_t>(at), &large_, rest_ == nullptr ? rest_ : rest_ + at,
         adds_ ? squares_ : nullptr);
  }
}

void Largest::put_back() {
  if (rest_ != nullptr) {
    for (int64_t i = 0; i < number(); ++i) rest_[places_[i]] = values_[i];
  }
  large_.number = 0;
}

void Largest::settle() {
  if (number() <= k_) return;
  const uint32_t kth = kth_magnitude(values(), number(), k_);
  int64_t ties =
      k_ - std::count_if(values(), values() + number(), [&](float each) { return magnitude(each) > kth; });
  int64_t kept = 0;
  for (int64_t i = 0; i < number(); ++i) {
    const float value = values_[i];
    const int32_t place = places_[i];
    const uint32_t bits = magnitude(value);
    if (bits > kth || (bits == kth && ties-- > 0)) {
      values_[kept] = value;
      places_[kept++] = place;
      continue;
    }
    if (rest_ != nullptr) rest_[place] = value;
    if (adds_) squares_[0] += static_cast<double>(value) * value;
  }
  large_.number = kept;
  least_ = kth + 1;  // later values equal to the k-th are not among the first
}

double Largest::squares_of_all_but(int64_t k) {
  double ties = 0;
  if (k < number()) {
    const uint32_t kth = k == 0 ? kNone : kth_magnitude(values(), number(), k);
    const int64_t count = std::exchange(large_.number, 0);
    sift(values(), count, kth, 0, &large_, nullptr,
         squares_);  // in place: only elements already read are overwritten
    const double least = layers::bits_float(kth);
    if (number() > k) ties = static_cast<double>(number() - k) * least * least;
  }
  return std::accumulate(squares_, squares_ + kSiftRun, ties);
}

}  // namespace pyruntime::cpu
