#include "cpu/compression/top_k.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "cpu/compression/checks.h"
#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

namespace {

using layers::float_bits;
using layers::load;

constexpr int64_t kRun = 64;  // values that are looked at together
constexpr int kBinBits = 12;  // of a magnitude, the highest ones
constexpr int kBins = 1 << kBinBits, kShift = 31 - kBinBits;

PYRUNTIME_INLINE uint32_t magnitude(float value) {
  return float_bits(value) & 0x7fffffffu;
}

// x = values (+ x, where they are added), and the largest magnitude of every run.
struct ReadValues {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, float* x, bool add, int64_t count, uint32_t* largest) {
    for (int64_t at = 0; at < count; at += kRun) {
      const int size = static_cast<int>(std::min(kRun, count - at));
      uint32_t most = 0;
      if (add) {
        PYRUNTIME_SIMD_REDUCE(max, most)
        for (int i = 0; i < size; ++i) {
          x[at + i] += load(values[at + i]);
          const uint32_t bits = magnitude(x[at + i]);
          most = bits > most ? bits : most;
        }
      } else {
        PYRUNTIME_SIMD_REDUCE(max, most)
        for (int i = 0; i < size; ++i) {
          x[at + i] = load(values[at + i]);
          const uint32_t bits = magnitude(x[at + i]);
          most = bits > most ? bits : most;
        }
      }
      *largest++ = most;
    }
  }
};

// What is taken: every magnitude above `least`, and the first `ties` of exactly that.
struct Threshold {
  uint32_t least;
  int64_t ties;
};

// f(index, magnitude) for every value whose magnitude is at least `least`.
template <typename F>
void for_values_from(uint32_t least, const float* x, int64_t count, const std::vector<uint32_t>& largest,
                     const F& f) {
  for (size_t run = 0; run < largest.size(); ++run) {
    if (largest[run] < least) continue;
    const int64_t begin = static_cast<int64_t>(run) * kRun, end = std::min(count, begin + kRun);
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = magnitude(x[i]);
      if (bits >= least) f(i, bits);
    }
  }
}

// Of the k-th largest magnitude no run's largest can be below the k-th largest of all runs, so that most
// values are not counted.
uint32_t lower_bound_of(const std::vector<uint32_t>& largest, int64_t k) {
  if (k > static_cast<int64_t>(largest.size())) return 0;
  std::vector<uint32_t> sorted = largest;
  std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
  return sorted[static_cast<size_t>(k - 1)];
}

Threshold threshold_of(const float* x, int64_t count, const std::vector<uint32_t>& largest, int64_t k) {
  const uint32_t bound = lower_bound_of(largest, k);
  std::array<int64_t, kBins> bins{};
  for_values_from(bound, x, count, largest, [&](int64_t, uint32_t bits) { ++bins[bits >> kShift]; });
  int64_t left = k;
  int bin = kBins - 1;
  for (; bins[static_cast<size_t>(bin)] < left; --bin) left -= bins[static_cast<size_t>(bin)];
  std::vector<uint32_t> within;
  within.reserve(static_cast<size_t>(bins[static_cast<size_t>(bin)]));
  const uint32_t low = std::max(bound, static_cast<uint32_t>(bin) << kShift);
  for_values_from(low, x, count, largest, [&](int64_t, uint32_t bits) {
    if (static_cast<int>(bits >> kShift) == bin) within.push_back(bits);
  });
  std::nth_element(within.begin(), within.begin() + (left - 1), within.end(), std::greater<>());
  const uint32_t least = within[static_cast<size_t>(left - 1)];
  const auto above = std::count_if(within.begin(), within.end(), [&](uint32_t bits) { return bits > least; });
  return {least, left - above};
}

void take(float* x, int64_t count, const std::vector<uint32_t>& largest, int64_t k, uint8_t* packed) {
  Threshold taken = threshold_of(x, count, largest, k);
  uint8_t *indices = packed, *values = packed + k * static_cast<int64_t>(sizeof(int32_t));
  for_values_from(taken.least, x, count, largest, [&](int64_t i, uint32_t bits) {
    if (bits == taken.least && taken.ties-- <= 0) return;
    const int32_t index = static_cast<int32_t>(i);
    std::memcpy(indices, &index, sizeof(index));
    std::memcpy(values, x + i, sizeof(float));
    indices += sizeof(index);
    values += sizeof(float);
    x[i] = 0;
  });
}

template <typename T>
void top_k_values(const at::Tensor& values, int64_t k, uint8_t* packed, float* x, bool add) {
  const int64_t count = values.numel();
  std::vector<uint32_t> largest(static_cast<size_t>((count + kRun - 1) / kRun));
  layers::simd_run<ReadValues>(values.const_data_ptr<T>(), x, add, count, largest.data());
  if (k > 0) take(x, count, largest, k, packed);
}

}  // namespace

int64_t top_k_bytes(int64_t k) {
  TORCH_CHECK_VALUE(k >= 0, "top_k: k=", k, "; it must not be negative.");
  return k * static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
}

void top_k(const at::Tensor& values, int64_t k, const at::Tensor& packed,
           const std::optional<at::Tensor>& residual) {
  check_values(values, residual, "top_k");
  const int64_t count = values.numel();
  TORCH_CHECK_VALUE(k <= count, "top_k: k=", k, " of ", count, " values; use at most as many.");
  TORCH_CHECK_VALUE(count <= std::numeric_limits<int32_t>::max(), "top_k: ", count,
                    " values; an index takes 32 bits, so use fewer than 2**31.");
  check_flat(packed, at::kByte, "top_k", "packed");
  check_size(packed, top_k_bytes(k), "top_k", "packed");
  const at::Tensor own = residual ? *residual : at::empty({count}, values.options().dtype(at::kFloat));
  auto* x = own.mutable_data_ptr<float>();
  auto* to = packed.mutable_data_ptr<uint8_t>();
  switch (values.scalar_type()) {
    case at::kFloat:
      return top_k_values<float>(values, k, to, x, residual.has_value());
    case at::kBFloat16:
      return top_k_values<c10::BFloat16>(values, k, to, x, residual.has_value());
    default:
      return top_k_values<c10::Half>(values, k, to, x, residual.has_value());
  }
}

void add_top_k(const at::Tensor& packed, const at::Tensor& out) {
  check_flat(out, at::kFloat, "add_top_k", "out");
  check_flat(packed, at::kByte, "add_top_k", "packed");
  const int64_t k = packed.numel() / top_k_bytes(1), count = out.numel();
  check_size(packed, top_k_bytes(k), "add_top_k", "packed");
  const uint8_t* indices = packed.const_data_ptr<uint8_t>();
  const uint8_t* values = indices + k * static_cast<int64_t>(sizeof(int32_t));
  auto* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < k; ++i) {
    int32_t index;
    float value;
    std::memcpy(&index, indices + i * static_cast<int64_t>(sizeof(index)), sizeof(index));
    std::memcpy(&value, values + i * static_cast<int64_t>(sizeof(value)), sizeof(value));
    TORCH_CHECK_INDEX(index >= 0 && index < count, "add_top_k: packed has a value for place ", index,
                      ", and out has ", count, " elements.");
    to[index] += value;
  }
}

}  // namespace pyruntime::cpu
