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

constexpr int64_t kRun = 16;         // values that are looked at together
constexpr int64_t kPiece = 1 << 12;  // that stay in the cache between two passes
constexpr int kBinBits = 12;         // of a magnitude, the highest ones
constexpr int kBins = 1 << kBinBits, kShift = 31 - kBinBits;

PYRUNTIME_INLINE uint32_t magnitude(float value) {
  return float_bits(value) & 0x7fffffffu;
}

// x = values (+ x, where they are added), and the largest magnitude of every run.
struct ReadValues {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, float* x, bool add, int64_t count, uint32_t* largest) {
    if (add) {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) x[i] += load(values[i]);
    } else {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) x[i] = load(values[i]);
    }
    int64_t at = 0;
    for (; at + kRun <= count; at += kRun) *largest++ = largest_of(x + at, kRun);
    if (at < count) *largest = largest_of(x + at, count - at);
  }

 private:
  static PYRUNTIME_INLINE uint32_t largest_of(const float* x, int64_t count) {
    uint32_t most = 0;
    PYRUNTIME_SIMD_REDUCE(max, most)
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = magnitude(x[i]);
      most = bits > most ? bits : most;
    }
    return most;
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

using Bins = std::array<int64_t, kBins>;

// The bin of the k-th largest; k becomes its place among those of that bin.
int bin_of(const Bins& bins, int64_t& k) {
  int bin = kBins - 1;
  for (; bins[static_cast<size_t>(bin)] < k; --bin) k -= bins[static_cast<size_t>(bin)];
  return bin;
}

// The k-th largest magnitude is not below the k-th largest of all runs' largest: most values need no look.
uint32_t lower_bound_of(const std::vector<uint32_t>& largest, int64_t k) {
  if (k > static_cast<int64_t>(largest.size())) return 0;
  Bins bins{};
  for (const uint32_t bits : largest) ++bins[bits >> kShift];
  return static_cast<uint32_t>(bin_of(bins, k)) << kShift;
}

Threshold threshold_of(const float* x, int64_t count, const std::vector<uint32_t>& largest, int64_t k) {
  const uint32_t bound = lower_bound_of(largest, k);
  Bins bins{};
  for_values_from(bound, x, count, largest, [&](int64_t, uint32_t bits) { ++bins[bits >> kShift]; });
  const uint32_t bin = static_cast<uint32_t>(bin_of(bins, k));
  std::vector<uint32_t> within;
  within.reserve(static_cast<size_t>(bins[bin]));
  for_values_from(bin << kShift, x, count, largest, [&](int64_t, uint32_t bits) {
    if (bits >> kShift == bin) within.push_back(bits);
  });
  std::nth_element(within.begin(), within.begin() + (k - 1), within.end(), std::greater<>());
  const uint32_t least = within[static_cast<size_t>(k - 1)];
  const auto above = std::count_if(within.begin(), within.end(), [&](uint32_t bits) { return bits > least; });
  return {least, k - above};
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
  const T* from = values.const_data_ptr<T>();
  for (int64_t at = 0; at < count; at += kPiece) {
    layers::simd_run<ReadValues>(from + at, x + at, add, std::min(kPiece, count - at),
                                 largest.data() + at / kRun);
  }
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
