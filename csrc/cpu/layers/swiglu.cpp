// SwiGLU (Shazeer 2020, eq. 6) on the fused projection [..., 2F] = [gate | up].
//
//   y = silu(gate) * up        silu(g) = g * s,  s = 1 / (1 + exp(-g))
//   dgate = dy * up * s * (1 + g * (1 - s))        dup = dy * g * s
//
// Saved for the backward: only gate_up.

#include "common.h"
#include "shared_ops.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels: `rows` rows, gate_up [rows, 2 * features] ----

struct SwigluRows {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* gate_up, T* y, int64_t rows, int64_t features) {
    for (int64_t row = 0; row < rows; ++row, gate_up += 2 * features, y += features) {
      const T *gate = gate_up, *up = gate_up + features;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < features; ++j) {
        const auto g = load(gate[j]);
        store(y[j], g / (1 + fast_exp(-g)) * load(up[j]));
      }
    }
  }
};

struct SwigluRowsBackward {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* grad, const T* gate_up, T* dgate_up, int64_t rows,
                                   int64_t features) {
    for (int64_t row = 0; row < rows;
         ++row, grad += features, gate_up += 2 * features, dgate_up += 2 * features) {
      const T *gate = gate_up, *up = gate_up + features;
      T *dgate = dgate_up, *dup = dgate_up + features;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < features; ++j) {
        const auto g = load(gate[j]), dy = load(grad[j]);
        const auto s = 1 / (1 + fast_exp(-g));
        store(dgate[j], dy * load(up[j]) * s * (1 + g * (1 - s)));
        store(dup[j], dy * g * s);
      }
    }
  }
};

}  // namespace

// ---- checks ----

void check_gate_up(const char* op, const Tensor& gate_up) {
  check_floating(gate_up, op, "gate_up");
  TORCH_CHECK_VALUE(gate_up.dim() >= 1 && gate_up.size(-1) % 2 == 0, op, ": gate_up has shape ",
                    gate_up.sizes(), "; its last dimension must hold the gates and then as many up values.");
}

void check_swiglu_backward(const Tensor& grad, const Tensor& gate_up) {
  constexpr auto op = "swiglu_backward";
  check_gate_up(op, gate_up);
  check_same_dtype(grad, "grad", gate_up, "gate_up", op);
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(half_of_last(gate_up)), op, ": grad has shape ",
                    grad.sizes(), " and gate_up ", gate_up.sizes(),
                    "; the last dimension of grad must be half as large, and the others the same.");
}

std::vector<int64_t> half_of_last(const Tensor& gate_up) {
  std::vector<int64_t> shape = gate_up.sizes().vec();
  shape.back() /= 2;
  return shape;
}

namespace {

// ---- ops on the CPU ----

Tensor swiglu_cpu(const Tensor& gate_up_in) {
  check_gate_up("swiglu", gate_up_in);
  const Tensor gate_up = gate_up_in.contiguous();
  Tensor y = at::empty(half_of_last(gate_up), gate_up.options());
  const int64_t features = gate_up.size(-1) / 2, rows = features == 0 ? 0 : y.numel() / features;
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "swiglu", [&] {
    run_rows<SwigluRows>(rows, features,
                         std::tuple(read<scalar_t>(gate_up, 2 * features), write<scalar_t>(y, features)));
  });
  return y;
}

Tensor swiglu_backward_cpu(const Tensor& grad_in, const Tensor& gate_up_in) {
  check_swiglu_backward(grad_in, gate_up_in);
  const Tensor grad = grad_in.contiguous(), gate_up = gate_up_in.contiguous();
  Tensor dgate_up = at::empty(gate_up.sizes(), gate_up.options());
  const int64_t features = gate_up.size(-1) / 2, rows = features == 0 ? 0 : grad.numel() / features;
  PYRUNTIME_DISPATCH_FLOAT(gate_up.scalar_type(), "swiglu_backward", [&] {
    run_rows<SwigluRowsBackward>(
        rows, features,
        std::tuple(read<scalar_t>(grad, features), read<scalar_t>(gate_up, 2 * features),
                   write<scalar_t>(dgate_up, 2 * features)));
  });
  return dgate_up;
}

}  // namespace

// ---- ops on every other device ----

Tensor swiglu_composite(const Tensor& gate_up) {
  check_gate_up("swiglu", gate_up);
  const std::vector<Tensor> halves = gate_up.chunk(2, -1);
  Tensor gate = halves[0].to(statistics_dtype(gate_up.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  return at::silu_(gate).mul_(halves[1]).to(gate_up.scalar_type()).contiguous();
}

Tensor swiglu_backward_composite(const Tensor& grad_in, const Tensor& gate_up) {
  check_swiglu_backward(grad_in, gate_up);
  const at::ScalarType dtype = statistics_dtype(gate_up.scalar_type());
  const std::vector<Tensor> halves = gate_up.to(dtype).chunk(2, -1);
  const Tensor grad = grad_in.to(dtype);
  const Tensor dgate = at::silu_backward(grad.mul(halves[1]), halves[0]);
  return at::cat({dgate, grad.mul(at::silu(halves[0]))}, -1).to(gate_up.scalar_type());
}

namespace {

// ---- autograd ----

using SwigluOp = Operator<swiglu_composite, swiglu_cpu>;
using SwigluBackwardOp = Operator<swiglu_backward_composite, swiglu_backward_cpu>;

struct Swiglu : Function<Swiglu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({gate_up});
    return SwigluOp::call(gate_up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {SwigluBackwardOp::call(grads[0], ctx->get_saved_variables()[0])};
  }
};

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  SwigluOp::define_differentiable<Swiglu>(m, "swiglu(Tensor gate_up) -> Tensor");
  SwigluBackwardOp::define_without_gradient(m, "swiglu_backward(Tensor grad, Tensor gate_up) -> Tensor");
}

}  // namespace

}  // namespace pyruntime::layers
