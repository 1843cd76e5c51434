#include "expert_kernels.h"

#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <algorithm>

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {

namespace {

struct WeightedSwigluRows {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* gate_up, const acc_t<T>* p, T* y, int64_t rows,
                                   int64_t features) {
    for (int64_t row = 0; row < rows; ++row, gate_up += 2 * features, y += features) {
      const T *gate = gate_up, *up = gate_up + features;
      const acc_t<T> weight = p[row];
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < features; ++j) {
        const auto g = load(gate[j]);
        store(y[j], weight * (g / (1 + fast_exp(-g)) * load(up[j])));
      }
    }
  }
};

struct WeightedSwigluRowsBackward {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* grad, const T* gate_up, const acc_t<T>* p, T* dgate_up, T* y,
                                   acc_t<T>* dp, int64_t rows, int64_t features) {
    for (int64_t row = 0; row < rows;
         ++row, grad += features, y += features, gate_up += 2 * features, dgate_up += 2 * features) {
      const T *gate = gate_up, *up = gate_up + features;
      T *dgate = dgate_up, *dup = dgate_up + features;
      const acc_t<T> weight = p[row];
      acc_t<T> dot = 0;
      PYRUNTIME_SIMD_REDUCE(+, dot)
      for (int64_t j = 0; j < features; ++j) {
        const auto g = load(gate[j]), u = load(up[j]), dy = load(grad[j]);
        const auto s = 1 / (1 + fast_exp(-g));
        const auto silu = g * s;
        dot += dy * (silu * u);
        store(y[j], weight * (silu * u));
        store(dgate[j], weight * dy * u * s * (1 + g * (1 - s)));
        store(dup[j], weight * dy * silu);
      }
      dp[row] = dot;
    }
  }
};

constexpr int64_t kSummedAtOnce = 128;  // features, in registers

struct SumRows {
  template <typename T>
  static PYRUNTIME_INLINE void run(T* out, const int64_t* begins, int64_t rows, int64_t features,
                                   const T* values, const int64_t* places) {
    for (int64_t row = 0; row < rows; ++row, out += features) {
      for (int64_t first = 0; first < features; first += kSummedAtOnce) {
        const int64_t count = std::min(kSummedAtOnce, features - first);
        acc_t<T> sums[kSummedAtOnce] = {};
        for (int64_t j = begins[row]; j < begins[row + 1]; ++j) {
          const T* value = values + places[j] * features + first;
          PYRUNTIME_SIMD
          for (int64_t f = 0; f < count; ++f) sums[f] += load(value[f]);
        }
        PYRUNTIME_SIMD
        for (int64_t f = 0; f < count; ++f) store(out[first + f], sums[f]);
      }
    }
  }
};

}  // namespace

Tensor weighted_swiglu(const Tensor& gate_up, const Tensor& p) {
  if (!gate_up.is_cpu()) {
    const std::vector<Tensor> halves = gate_up.to(p.scalar_type()).chunk(2, -1);
    return at::silu(halves[0]).mul_(halves[1]).mul_(p.unsqueeze(-1)).to(gate_up.scalar_type());
  }
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2;
  const Tensor y = at::empty({rows, features}, gate_up.options());
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "weighted_swiglu", [&] {
    run_rows<WeightedSwigluRows>(rows, features,
                                 std::tuple(read<scalar_t>(gate_up, 2 * features),
                                            read<acc_t<scalar_t>>(p, 1), write<scalar_t>(y, features)));
  });
  return y;
}

void weighted_swiglu_backward(const Tensor& grad, const Tensor& gate_up, const Tensor& p,
                              const Tensor& dgate_up, const Tensor& y, const Tensor& dp) {
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2;
  if (!gate_up.is_cpu()) {
    const std::vector<Tensor> halves = gate_up.to(p.scalar_type()).chunk(2, -1);
    const Tensor dy = grad.to(p.scalar_type()), weight = p.unsqueeze(-1), silu = at::silu(halves[0]);
    const Tensor product = silu.mul(halves[1]), weighted = dy.mul(weight);
    dp.copy_(product.mul(dy).sum(-1));
    y.copy_(product.mul_(weight));
    dgate_up.narrow(1, 0, features).copy_(at::silu_backward(weighted.mul(halves[1]), halves[0]));
    dgate_up.narrow(1, features, features).copy_(weighted.mul(silu));
    return;
  }
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "weighted_swiglu_backward", [&] {
    run_rows<WeightedSwigluRowsBackward>(
        rows, features,
        std::tuple(read<scalar_t>(grad, features), read<scalar_t>(gate_up, 2 * features),
                   read<acc_t<scalar_t>>(p, 1), write<scalar_t>(dgate_up, 2 * features),
                   write<scalar_t>(y, features), write<acc_t<scalar_t>>(dp, 1)));
  });
}

void sum_rows(const Tensor& out, const Tensor& values, const int64_t* begins, const int64_t* places) {
  const int64_t rows = out.size(0), features = out.size(1);
  PYRUNTIME_DISPATCH_FLOAT(values.scalar_type(), "sum_rows", [&] {
    run_rows<SumRows>(rows, features,
                      std::tuple(write<scalar_t>(out, features), RowsOf<const int64_t>{begins, 1}),
                      values.const_data_ptr<scalar_t>(), places);
  });
}

}  // namespace pyruntime::layers
