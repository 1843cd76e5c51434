// Gate and up of an expert's rows joined and multiplied by the rows' weights p. With g = min(gate, limit),
// u = clamp(up, -limit, limit) + shift, s = 1 / (1 + exp(-alpha g)):
//
//   y = p * g * s * u                      dp = sum over the row of dy * g * s * u
//   dgate = p * dy * u * s * (1 + alpha * g * (1 - s)), 0 beyond the limit
//   dup = p * dy * g * s, 0 beyond the limits
//
// Saved for the backward: gate_up and p.
#include "weighted_gating.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <type_traits>

#include "common.h"
#include "shared_ops.h"
#include "simd.h"

namespace pyruntime::layers {

namespace {

// ---- CPU kernels ----

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

void weighted_gating_cpu(const GatedRows& of, const Gating& gating) {
  const int64_t rows = of.y.size(0), features = of.y.size(1);
  PYRUNTIME_DISPATCH_FLOAT(of.y.scalar_type(), "weighted_gating", [&] {
    by_order(gating, [&](auto interleaved) {
      run_rows<WeightedGatingRows<interleaved>>(
          rows, features,
          std::tuple(read<scalar_t>(of.gate_up, 2 * features), read<acc_t<scalar_t>>(of.p, 1),
                     write<scalar_t>(of.y, features)),
          gating);
    });
  });
}

void weighted_gating_backward_cpu(const GatedRows& of, const Gating& gating) {
  const int64_t rows = of.y.size(0), features = of.y.size(1);
  PYRUNTIME_DISPATCH_FLOAT(of.y.scalar_type(), "weighted_gating_backward", [&] {
    by_order(gating, [&](auto interleaved) {
      run_rows<WeightedGatingRowsBackward<interleaved>>(
          rows, features,
          std::tuple(read<scalar_t>(of.grad, features), read<scalar_t>(of.gate_up, 2 * features),
                     read<acc_t<scalar_t>>(of.p, 1), write<scalar_t>(of.dgate_up, 2 * features),
                     write<scalar_t>(of.y, features), write<acc_t<scalar_t>>(of.dp, 1)),
          gating);
    });
  });
}

// ---- on every other device ----

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

void weighted_gating_composite(const GatedRows& of, const Gating& gating) {
  const Gated gated(of.gate_up, of.p.scalar_type(), gating);
  of.y.copy_(gated.glu.mul(gated.up).mul_(of.p.unsqueeze(-1)));
}

void weighted_gating_backward_composite(const GatedRows& of, const Gating& gating) {
  const Gated gated(of.gate_up, of.p.scalar_type(), gating);
  const Tensor dy = of.grad.to(of.p.scalar_type()), weight = of.p.unsqueeze(-1), weighted = dy.mul(weight);
  const Tensor product = gated.glu.mul(gated.up);
  of.dp.copy_(product.mul(dy).sum(-1));
  of.y.copy_(product.mul_(weight));
  // The derivative of gate * sigmoid is sigmoid + alpha * glu * (1 - sigmoid).
  const Tensor slope = gated.sigmoid.add(gated.glu.mul(1 - gated.sigmoid), gating.alpha);
  Tensor dgate = weighted.mul(gated.up).mul_(slope), dup = weighted.mul(gated.glu);
  if (std::isfinite(gating.limit)) {
    dgate.masked_fill_(half_of(of.gate_up, 0, gating).gt(gating.limit), 0);
    dup.masked_fill_(half_of(of.gate_up, 1, gating).abs().gt(gating.limit), 0);
  }
  half_of(of.dgate_up, 0, gating).copy_(dgate);
  half_of(of.dgate_up, 1, gating).copy_(dup);
}

// ---- checks ----

void check_gated_rows(const char* op, const GatedRows& rows) {
  const Tensor& gate_up = rows.gate_up;
  TORCH_CHECK_VALUE(gate_up.dim() == 2 && gate_up.is_contiguous(), op, ": gate_up has shape ",
                    gate_up.sizes(), " and strides ", gate_up.strides(),
                    "; it must be [m, 2F] and contiguous.");
  const int64_t m = gate_up.size(0), columns = gate_up.size(1);
  const at::ScalarType dtype = gate_up.scalar_type(), precise = statistics_dtype(dtype);
  const auto check = [&](const char* name, const Tensor& tensor, at::IntArrayRef shape,
                         at::ScalarType needed) {
    if (!tensor.defined()) return;
    TORCH_CHECK_VALUE(tensor.sizes() == shape && tensor.is_contiguous(), op, ": ", name, " has shape ",
                      tensor.sizes(), " and strides ", tensor.strides(), "; for gate_up of shape ",
                      gate_up.sizes(), " it must be ", shape, " and contiguous.");
    TORCH_CHECK_TYPE(tensor.scalar_type() == needed, op, ": ", name, " has dtype ", tensor.scalar_type(),
                     "; for gate_up of ", dtype, " it must be ", needed, ".");
  };
  check("p", rows.p, {m}, precise);
  check("y", rows.y, {m, columns / 2}, dtype);
  check("grad", rows.grad, {m, columns / 2}, dtype);
  check("dgate_up", rows.dgate_up, {m, columns}, dtype);
  check("dp", rows.dp, {m}, precise);
}

namespace {

// ---- ops ----

using GatingOp = Operator<weighted_gating<weighted_gating_composite>, weighted_gating<weighted_gating_cpu>>;
using BackwardOp = Operator<weighted_gating_backward<weighted_gating_backward_composite>,
                            weighted_gating_backward<weighted_gating_backward_cpu>>;

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  GatingOp::define_without_gradient(m,
                                    "weighted_gating(Tensor gate_up, Tensor p, float alpha, float limit, "
                                    "float shift, bool interleaved) -> Tensor");
  BackwardOp::define_without_gradient(
      m,
      "weighted_gating_backward_(Tensor grad, Tensor gate_up, Tensor p, float alpha, float limit, "
      "float shift, bool interleaved, Tensor(a!) dgate_up, Tensor(b!) y, Tensor(c!) dp) -> ()");
}

}  // namespace

Tensor call_weighted_gating(const Tensor& gate_up, const Tensor& p, const Gating& gating) {
  return GatingOp::call(gate_up, p, gating.alpha, gating.limit, gating.shift, gating.interleaved);
}

void call_weighted_gating_backward(const Tensor& grad, const Tensor& gate_up, const Tensor& p,
                                   const Gating& gating, const Tensor& dgate_up, const Tensor& y,
                                   const Tensor& dp) {
  BackwardOp::call(grad, gate_up, p, gating.alpha, gating.limit, gating.shift, gating.interleaved, dgate_up,
                   y, dp);
}

}  // namespace pyruntime::layers
