#include "cpu/compression/top_k.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/compression/checks.h"
#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

namespace {

using layers::float_bits;
using layers::load;

constexpr int64_t kRun = 16;         // values that are looked at together
constexpr size_t kAhead = 16;        // runs that are fetched before they are looked at
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

// Of the k-th largest magnitude a lower bound, to a bin: it is not below the k-th largest of all runs'
// largest.
uint32_t lower_bound_of(const std::vector<uint32_t>& largest, int64_t k) {
  if (k > static_cast<int64_t>(largest.size())) return 0;
  std::array<int64_t, kBins> bins{};
  for (const uint32_t bits : largest) ++bins[bits >> kShift];
  uint32_t bin = kBins - 1;
  for (int64_t left = k; bins[bin] < left; --bin) left -= bins[bin];
  return bin << kShift;
}

struct Candidate {
  uint32_t bits;  // magnitude
  int32_t index;
};

// All values of at least that magnitude, in order. Nothing is asked of a value: which one is large enough
// nobody can predict.
std::vector<Candidate> values_from(uint32_t least, const float* x, int64_t count,
                                   const std::vector<uint32_t>& largest, int64_t expected) {
  std::vector<int32_t> runs(largest.size());
  size_t looked_at = 0;
  for (size_t run = 0; run < largest.size(); ++run) {
    runs[looked_at] = static_cast<int32_t>(run);
    looked_at += largest[run] >= least ? 1 : 0;
  }
  std::vector<Candidate> found(static_cast<size_t>(expected));
  size_t number = 0;
  for (size_t at = 0; at < looked_at; ++at) {
    if (at + kAhead < looked_at) __builtin_prefetch(x + runs[at + kAhead] * kRun);
    if (number + kRun > found.size()) found.resize(2 * found.size() + kRun);
    const int64_t begin = runs[at] * kRun, end = std::min(count, begin + kRun);
    for (int64_t i = begin; i < end; ++i) {
      found[number] = {magnitude(x[i]), static_cast<int32_t>(i)};
      number += found[number].bits >= least ? 1 : 0;
    }
  }
  found.resize(number);
  return found;
}

constexpr uint32_t kInfinity = 0x7f800000;  // as a magnitude's bits; NaNs are above

// What is taken: every magnitude above `least`, and the first `ties` of exactly that.
struct Threshold {
  uint32_t least;
  int64_t ties;
};

Threshold threshold_of(const std::vector<Candidate>& candidates, int64_t k) {
  std::vector<uint32_t> bits;
  bits.reserve(candidates.size());
  for (const Candidate& candidate : candidates) bits.push_back(candidate.bits);
  const auto kth = bits.begin() + (k - 1);
  std::nth_element(bits.begin(), kth, bits.end(), std::greater<>());
  const uint32_t least = *kth;
  return {least, k - std::count_if(bits.begin(), kth, [&](uint32_t each) { return each > least; })};
}

void take(float* x, int64_t count, const std::vector<uint32_t>& largest, int64_t k, uint8_t* packed) {
  const auto candidates = values_from(lower_bound_of(largest, k), x, count, largest, k + k / 4);
  Threshold taken = threshold_of(candidates, k);
  uint8_t *indices = packed, *values = packed + k * static_cast<int64_t>(sizeof(int32_t));
  bool is_finite = true;
  for (const auto& [bits, index] : candidates) {
    if (bits < taken.least || (bits == taken.least && taken.ties-- <= 0)) continue;
    is_finite = is_finite && bits < kInfinity;
    std::memcpy(indices, &index, sizeof(index));
    std::memcpy(values, x + index, sizeof(float));
    indices += sizeof(index);
    values += sizeof(float);
    x[index] = 0;
  }
  // The receiver learns of a value that is not finite by the largest, which is taken; nothing of it is kept.
  if (!is_finite) std::fill_n(x, count, 0.0F);
}

// x = values (+ x, where they are added); the largest magnitude of every run.
std::vector<uint32_t> read_values(const at::Tensor& values, float* x, bool add) {
  const int64_t count = values.numel();
  std::vector<uint32_t> largest(static_cast<size_t>((count + kRun - 1) / kRun));
  const auto read = [&](const auto* from) {
    for (int64_t at = 0; at < count; at += kPiece) {
      layers::simd_run<ReadValues>(from + at, x + at, add, std::min(kPiece, count - at),
                                   largest.data() + at / kRun);
    }
  };
  switch (values.scalar_type()) {
    case at::kFloat:
      read(values.const_data_ptr<float>());
      break;
    case at::kBFloat16:
      read(values.const_data_ptr<c10::BFloat16>());
      break;
    default:
      read(values.const_data_ptr<c10::Half>());
  }
  return largest;
}

void check_k(const at::Tensor& values, int64_t k, std::string_view op) {
  const int64_t count = values.numel();
  TORCH_CHECK_VALUE(k >= 0 && k <= count, op, ": k=", k, " of ", count,
                    " values; use at most as many, and at least 0.");
  TORCH_CHECK_VALUE(count <= std::numeric_limits<int32_t>::max(), op, ": ", count,
                    " values; an index takes 32 bits, so use fewer than 2**31.");
}

struct AddSquares {
  static PYRUNTIME_INLINE void run(const float* x, int64_t count, double* sum) {
    double total = 0;
    PYRUNTIME_SIMD_REDUCE(+, total)
    for (int64_t i = 0; i < count; ++i) total += static_cast<double>(x[i]) * x[i];
    *sum += total;
  }
};

}  // namespace

int64_t top_k_bytes(int64_t k) {
  TORCH_CHECK_VALUE(k >= 0, "top_k: k=", k, "; it must not be negative.");
  return k * static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
}

void top_k(const at::Tensor& values, int64_t k, const at::Tensor& packed,
           const std::optional<at::Tensor>& residual) {
  check_values(values, residual, "top_k");
  check_k(values, k, "top_k");
  check_flat(packed, at::kByte, "top_k", "packed");
  check_size(packed, top_k_bytes(k), "top_k", "packed");
  const int64_t count = values.numel();
  const at::Tensor own = residual ? *residual : at::empty({count}, values.options().dtype(at::kFloat));
  auto* x = own.mutable_data_ptr<float>();
  const auto largest = read_values(values, x, residual.has_value());
  if (k > 0) take(x, count, largest, k, packed.mutable_data_ptr<uint8_t>());
}

std::vector<double> top_k_errors(const at::Tensor& values, const std::vector<int64_t>& ks,
                                 const std::optional<at::Tensor>& residual) {
  check_values(values, residual, "top_k_errors");
  for (const int64_t k : ks) check_k(values, k, "top_k_errors");
  const int64_t count = values.numel();
  const at::Tensor own =
      residual ? residual->clone() : at::empty({count}, values.options().dtype(at::kFloat));
  auto* x = own.mutable_data_ptr<float>();
  read_values(values, x, residual.has_value());
  const auto is_larger = [](float one, float other) { return magnitude(one) > magnitude(other); };
  // From the largest k on, the k largest are sought among those of the k before, and what lies behind is
  // lost.
  std::vector<size_t> order(ks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t one, size_t other) { return ks[one] > ks[other]; });
  std::vector<double> errors(ks.size());
  int64_t end = count;
  double lost = 0;
  for (const size_t i : order) {
    if (ks[i] < end) std::nth_element(x, x + ks[i], x + end, is_larger);
    layers::simd_run<AddSquares>(static_cast<const float*>(x + ks[i]), end - ks[i], &lost);
    errors[i] = lost;
    end = ks[i];
  }
  layers::simd_run<AddSquares>(static_cast<const float*>(x), end, &lost);
  if (!std::isfinite(lost)) std::fill(errors.begin(), errors.end(), lost);
  return errors;
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
