#include "expert_kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {

namespace {

// A row [gate | up], or pairs of them.
template <bool interleaved, typename T>
struct GateUp {
  static constexpr int64_t kStep = interleaved ? 2 : 1;
  T *gate, *up;

  PYRUNTIME_INLINE GateUp(T* row, int64_t features) : gate(row), up(row + (interleaved ? 1 : features)) {}
};

template <bool interleaved>
struct WeightedGatingRows {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* gate_up, const acc_t<T>* p, T* y, int64_t rows, int64_t features,
                                   Gating gating) {
    using Row = GateUp<interleaved, const T>;
    const acc_t<T> alpha = gating.alpha, limit = gating.limit, shift = gating.shift;
    for (int64_t row = 0; row < rows; ++row, gate_up += 2 * features, y += features) {
      const Row of(gate_up, features);
      const acc_t<T> weight = p[row];
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < features; ++j) {
        const auto gate = load(of.gate[Row::kStep * j]), up = load(of.up[Row::kStep * j]);
        const auto g = gate > limit ? limit : gate;
        const auto u = (up > limit ? limit : up < -limit ? -limit : up) + shift;
        store(y[j], weight * (g / (1 + fast_exp(-alpha * g)) * u));
      }
    }
  }
};

template <bool interleaved>
struct WeightedGatingRowsBackward {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* grad, const T* gate_up, const acc_t<T>* p, T* dgate_up, T* y,
                                   acc_t<T>* dp, int64_t rows, int64_t features, Gating gating) {
    using Row = GateUp<interleaved, const T>;
    const acc_t<T> alpha = gating.alpha, limit = gating.limit, shift = gating.shift;
    for (int64_t row = 0; row < rows;
         ++row, grad += features, y += features, gate_up += 2 * features, dgate_up += 2 * features) {
      const Row of(gate_up, features);
      const GateUp<interleaved, T> d(dgate_up, features);
      const acc_t<T> weight = p[row];
      acc_t<T> dot = 0;
      PYRUNTIME_SIMD_REDUCE(+, dot)
      for (int64_t j = 0; j < features; ++j) {
        const auto gate = load(of.gate[Row::kStep * j]), up = load(of.up[Row::kStep * j]);
        const auto g = gate > limit ? limit : gate;
        const auto u = (up > limit ? limit : up < -limit ? -limit : up) + shift, dy = load(grad[j]);
        const auto s = 1 / (1 + fast_exp(-alpha * g));
        const auto glu = g * s;
        dot += dy * (glu * u);
        store(y[j], weight * (glu * u));
        const auto dgate = weight * dy * u * s * (1 + alpha * g * (1 - s)), dup = weight * dy * glu;
        store(d.gate[Row::kStep * j], gate > limit ? 0 : dgate);
        store(d.up[Row::kStep * j], up > limit || up < -limit ? 0 : dup);
      }
      dp[row] = dot;
    }
  }
};

// Calls `use` with std::true_type if gate and up are interleaved, else with std::false_type.
template <typename Use>
void by_order(const Gating& gating, Use use) {
  if (gating.interleaved) {
    use(std::true_type());
  } else {
    use(std::false_type());
  }
}

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

namespace {

// The columns of gate (0) or up (1) as a view.
Tensor half_of(const Tensor& gate_up, int64_t half, const Gating& gating) {
  const int64_t columns = gate_up.size(1);
  if (gating.interleaved) return gate_up.slice(1, half, columns, 2);
  return gate_up.narrow(1, half * columns / 2, columns / 2);
}

// Gate and up, limited; sigmoid(alpha * gate); and gate times it. By ATen.
struct Gated {
  Tensor gate, up, sigmoid, glu;

  Gated(const Tensor& gate_up, at::ScalarType precise, const Gating& gating)
      : gate(half_of(gate_up, 0, gating).to(precise)), up(half_of(gate_up, 1, gating).to(precise)) {
    if (std::isfinite(gating.limit)) {
      gate = gate.clamp_max(gating.limit);
      up = up.clamp(-gating.limit, gating.limit);
    }
    if (gating.shift != 0) up = up.add(gating.shift);
    sigmoid = (gating.alpha == 1 ? gate : gate.mul(gating.alpha)).sigmoid();
    glu = gate.mul(sigmoid);
  }
};

}  // namespace

Tensor weighted_gating(const Tensor& gate_up, const Tensor& p, const Gating& gating) {
  if (!gate_up.is_cpu()) {
    const Gated gated(gate_up, p.scalar_type(), gating);
    return gated.glu.mul(gated.up).mul_(p.unsqueeze(-1)).to(gate_up.scalar_type());
  }
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2;
  const Tensor y = at::empty({rows, features}, gate_up.options());
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "weighted_gating", [&] {
    by_order(gating, [&](auto interleaved) {
      run_rows<WeightedGatingRows<interleaved>>(
          rows, features,
          std::tuple(read<scalar_t>(gate_up, 2 * features), read<acc_t<scalar_t>>(p, 1),
                     write<scalar_t>(y, features)),
          gating);
    });
  });
  return y;
}

void weighted_gating_backward(const Tensor& grad, const Tensor& gate_up, const Tensor& p,
                              const Gating& gating, const Tensor& dgate_up, const Tensor& y,
                              const Tensor& dp) {
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2;
  if (!gate_up.is_cpu()) {
    const Gated gated(gate_up, p.scalar_type(), gating);
    const Tensor dy = grad.to(p.scalar_type()), weight = p.unsqueeze(-1), weighted = dy.mul(weight);
    const Tensor product = gated.glu.mul(gated.up);
    dp.copy_(product.mul(dy).sum(-1));
    y.copy_(product.mul_(weight));
    // The derivative of gate * sigmoid is sigmoid + alpha * glu * (1 - sigmoid).
    const Tensor slope = gated.sigmoid.add(gated.glu.mul(1 - gated.sigmoid), gating.alpha);
    Tensor dgate = weighted.mul(gated.up).mul_(slope), dup = weighted.mul(gated.glu);
    if (std::isfinite(gating.limit)) {
      dgate.masked_fill_(half_of(gate_up, 0, gating).gt(gating.limit), 0);
      dup.masked_fill_(half_of(gate_up, 1, gating).abs().gt(gating.limit), 0);
    }
    half_of(dgate_up, 0, gating).copy_(dgate);
    half_of(dgate_up, 1, gating).copy_(dup);
    return;
  }
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "weighted_gating_backward", [&] {
    by_order(gating, [&](auto interleaved) {
      run_rows<WeightedGatingRowsBackward<interleaved>>(
          rows, features,
          std::tuple(read<scalar_t>(grad, features), read<scalar_t>(gate_up, 2 * features),
                     read<acc_t<scalar_t>>(p, 1), write<scalar_t>(dgate_up, 2 * features),
                     write<scalar_t>(y, features), write<acc_t<scalar_t>>(dp, 1)),
          gating);
    });
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
