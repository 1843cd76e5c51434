#include "cpu/compression/top_k.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/compression/checks.h"
#include "cpu/compression/largest.h"

namespace pyruntime::cpu {

namespace {

constexpr uint32_t kInfinity = 0x7f800000;  // as a magnitude's bits; NaNs are above

void check_k(const at::Tensor& values, int64_t k, std::string_view op) {
  const int64_t count = values.numel();
  TORCH_CHECK_VALUE(k >= 0 && k <= count, op, ": k=", k, " of ", count,
                    " values; use at most as many, and at least 0.");
  TORCH_CHECK_VALUE(count <= std::numeric_limits<int32_t>::max(), op, ": ", count,
                    " values; an index takes 32 bits, so use fewer than 2**31.");
}

}  // namespace

int64_t top_k_bytes(int64_t k) {
  TORCH_CHECK_VALUE(k >= 0, "top_k: k=", k, "; it must not be negative.");
  return k * static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
}

void top_k(const at::Tensor& values, int64_t k, const at::Tensor& packed,
           const std::optional<at::Tensor>& residual) {
  check_values(values, residual, at::kCPU, "top_k");
  check_k(values, k, "top_k");
  check_flat(packed, at::kCPU, at::kByte, "top_k", "packed");
  check_size(packed, top_k_bytes(k), "top_k", "packed");
  auto* x = residual ? residual->mutable_data_ptr<float>() : nullptr;
  Largest found = Largest::of(values, x, k, x, false);
  found.settle();
  auto* to = packed.mutable_data_ptr<uint8_t>();
  std::copy_n(found.places(), k, reinterpret_cast<int32_t*>(to));
  std::copy_n(found.values(), k, reinterpret_cast<float*>(to) + k);
  // The largest magnitude tells the receiver of a value that is not finite. The residual must not keep it.
  const auto is_finite = [](float value) { return magnitude(value) < kInfinity; };
  if (x != nullptr && !std::all_of(found.values(), found.values() + k, is_finite)) {
    std::fill_n(x, values.numel(), 0.0F);
  }
}

std::vector<double> top_k_errors(const at::Tensor& values, const std::vector<int64_t>& ks,
                                 const std::optional<at::Tensor>& residual) {
  check_values(values, residual, at::kCPU, "top_k_errors");
  for (const int64_t k : ks) check_k(values, k, "top_k_errors");
  // In descending order of k, so that each search is among the values found for the k before.
  std::vector<size_t> order(ks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t one, size_t other) { return ks[one] > ks[other]; });
  const float* before = residual ? residual->const_data_ptr<float>() : nullptr;
  Largest found = Largest::of(values, before, ks.empty() ? 0 : ks[order.front()], nullptr, true);
  std::vector<double> errors(ks.size());
  for (const size_t i : order) errors[i] = found.squares_of_all_but(ks[i]);
  const double all = found.squares_of_all_but(0);
  if (!std::isfinite(all)) std::fill(errors.begin(), errors.end(), all);
  return errors;
}

void add_top_k(const at::Tensor& packed, const at::Tensor& out) {
  check_flat(out, at::kCPU, at::kFloat, "add_top_k", "out");
  check_flat(packed, at::kCPU, at::kByte, "add_top_k", "packed");
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
