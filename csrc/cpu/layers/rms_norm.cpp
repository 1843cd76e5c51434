// RMSNorm (Zhang and Sennrich 2019, eq. 4), with or without a residual addition before it.
//
//   rstd = 1 / sqrt(mean(x^2) + eps)        y = x * rstd * w
//   dx = rstd * (dy * w - x * rstd^2 * mean(dy * w * x))        dw = sum over rows of dy * x * rstd
//
// Saved for the backward: x, w and rstd (one number a row).

#include <tuple>
#include <vector>

#include "core/saved_output.h"
#include "shared_ops.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// Rows of which one task sums the weight gradients. The tasks' sums are added in order.
constexpr int64_t kRowsPerBlock = 64;

// ---- CPU kernels: `rows` rows of `columns` ----

struct NormRows {
  // With a residual, x + residual is written to `summed` and normalised; without, x is normalised.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const T* x, const T* residual, const T* weight, T* y, T* summed, S* rstd,
                                   int64_t rows, int64_t columns, S eps) {
    for (int64_t row = 0; row < rows; ++row, x += columns, y += columns) {
      if (residual != nullptr) {
        PYRUNTIME_SIMD
        for (int64_t j = 0; j < columns; ++j) store(summed[j], load(x[j]) + load(residual[j]));
        residual += columns;
      }
      const T* normed = residual != nullptr ? summed : x;
      S squares = 0;
      PYRUNTIME_SIMD_REDUCE(+, squares)
      for (int64_t j = 0; j < columns; ++j) squares += load(normed[j]) * load(normed[j]);
      const S scale = 1 / std::sqrt(squares / static_cast<S>(columns) + eps);
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) store(y[j], load(normed[j]) * scale * load(weight[j]));
      rstd[row] = scale;
      if (residual != nullptr) summed += columns;
    }
  }
};

struct NormRowsBackward {
  // Adds to dweight [columns]. grad_sum, if not null, is a gradient of x itself that is added to dx.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const T* grad, const T* grad_sum, const T* x, const T* weight,
                                   const S* rstd, T* dx, S* dweight, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; ++row, grad += columns, x += columns, dx += columns) {
      S dot = 0;
      PYRUNTIME_SIMD_REDUCE(+, dot)
      for (int64_t j = 0; j < columns; ++j) dot += load(grad[j]) * load(weight[j]) * load(x[j]);
      const S scale = rstd[row];
      const S along_x = scale * scale * scale * dot / static_cast<S>(columns);
      if (grad_sum == nullptr) {
        PYRUNTIME_SIMD
        for (int64_t j = 0; j < columns; ++j) {
          const S xj = load(x[j]), grad_scaled = load(grad[j]) * scale;
          dweight[j] += grad_scaled * xj;
          store(dx[j], grad_scaled * load(weight[j]) - xj * along_x);
        }
      } else {
        PYRUNTIME_SIMD
        for (int64_t j = 0; j < columns; ++j) {
          const S xj = load(x[j]), grad_scaled = load(grad[j]) * scale;
          dweight[j] += grad_scaled * xj;
          store(dx[j], grad_scaled * load(weight[j]) - xj * along_x + load(grad_sum[j]));
        }
        grad_sum += columns;
      }
    }
  }
};

struct SumBlocks {
  // total[j] = the sum of blocks[b, j] over b, in the order of b. Overwrites blocks.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(S* blocks, T* total, int64_t count, int64_t columns) {
    for (int64_t b = 1; b < count; ++b) {
      const S* block = blocks + b * columns;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) blocks[j] += block[j];
    }
    PYRUNTIME_SIMD
    for (int64_t j = 0; j < columns; ++j) store(total[j], blocks[j]);
  }
};

}  // namespace

// ---- checks ----

void check_norm(const char* op, const Tensor& x, const Tensor& weight) {
  check_floating(x, op, "x");
  check_same_dtype(x, "x", weight, "weight", op);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x is a scalar; it needs at least one dimension to normalise over.");
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == x.size(-1), op, ": weight has shape ",
                    weight.sizes(), " and the last dimension of x has ", x.size(-1),
                    " elements; weight must have shape [", x.size(-1), "].");
  TORCH_CHECK_VALUE(x.size(-1) > 0, op, ": the last dimension of x is empty; there is nothing to normalise.");
}

void check_residual(const Tensor& x, const Tensor& residual) {
  check_same_dtype(x, "x", residual, "residual", "add_rms_norm");
  TORCH_CHECK_VALUE(x.sizes() == residual.sizes(), "add_rms_norm: x has shape ", x.sizes(), " and residual ",
                    residual.sizes(), "; they must be equal.");
}

namespace {

// ---- ops on the CPU ----

// residual may be undefined; then the second result is too.
std::tuple<Tensor, Tensor, Tensor> norm_cpu(const Tensor& x_in, const Tensor& residual_in,
                                            const Tensor& weight_in, double eps) {
  const Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
  const Tensor residual = residual_in.defined() ? residual_in.contiguous() : Tensor();
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor summed = residual.defined() ? at::empty(x.sizes(), x.options()) : Tensor();
  Tensor rstd =
      at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(statistics_dtype(x.scalar_type())));
  PYRUNTIME_DISPATCH_FLOAT(x.scalar_type(), "rms_norm", [&] {
    using stat_t = acc_t<scalar_t>;
    run_rows<NormRows>(
        rows, columns,
        std::tuple(read<scalar_t>(x, columns), read<scalar_t>(residual, columns), read<scalar_t>(weight, 0),
                   write<scalar_t>(y, columns), write<scalar_t>(summed, columns), write<stat_t>(rstd, 1)),
        static_cast<stat_t>(eps));
  });
  return {y, summed, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_cpu(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm", x, weight);
  auto [y, summed, rstd] = norm_cpu(x, Tensor(), weight, eps);
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_cpu(const Tensor& x, const Tensor& residual,
                                                    const Tensor& weight, double eps) {
  check_norm("add_rms_norm", x, weight);
  check_residual(x, residual);
  return norm_cpu(x, residual, weight, eps);
}

std::tuple<Tensor, Tensor> rms_norm_backward_cpu(const Tensor& grad_in, const Tensor& x_in,
                                                 const Tensor& weight_in, const Tensor& rstd_in,
                                                 const std::optional<Tensor>& grad_sum_in) {
  check_norm("rms_norm_backward", x_in, weight_in);
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous(), weight = weight_in.contiguous();
  const Tensor rstd = rstd_in.contiguous(), grad_sum = grad_sum_in ? grad_sum_in->contiguous() : Tensor();
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  const int64_t blocks = std::max<int64_t>(1, (rows + kRowsPerBlock - 1) / kRowsPerBlock);
  Tensor dx = at::empty(x.sizes(), x.options());
  Tensor dweight = at::empty({columns}, x.options());
  Tensor dweight_blocks = at::zeros({blocks, columns}, rstd.options());
  PYRUNTIME_DISPATCH_FLOAT(x.scalar_type(), "rms_norm_backward", [&] {
    using stat_t = acc_t<scalar_t>;
    const auto grad_rows = read<scalar_t>(grad, columns), x_rows = read<scalar_t>(x, columns);
    const auto grad_sum_rows = read<scalar_t>(grad_sum, columns);
    const auto rstd_rows = read<stat_t>(rstd, 1);
    const auto dx_rows = write<scalar_t>(dx, columns);
    const scalar_t* weight_data = weight.const_data_ptr<scalar_t>();
    stat_t* blocks_data = dweight_blocks.mutable_data_ptr<stat_t>();
    const int64_t grain = std::max<int64_t>(1, rows_per_task(columns) / kRowsPerBlock);
    at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t row = block * kRowsPerBlock;
        simd_run<NormRowsBackward>(
            grad_rows.from(row), grad_sum_rows.from(row), x_rows.from(row), weight_data, rstd_rows.from(row),
            dx_rows.from(row), blocks_data + block * columns, std::min(kRowsPerBlock, rows - row), columns);
      }
    });
    simd_run<SumBlocks>(blocks_data, dweight.mutable_data_ptr<scalar_t>(), blocks, columns);
  });
  return {dx, dweight};
}

// ---- ops on every other device ----

// Whether torch has its own kernels for the norm, which take one pass over x.
bool has_fused_kernels(const Tensor& x) {
  return x.is_cuda() && x.numel() > 0;
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_composite(const Tensor& x, const Tensor& weight, double eps) {
  check_norm("rms_norm", x, weight);
  if (has_fused_kernels(x)) {
    const auto [y, rstd] = at::_fused_rms_norm(x.contiguous(), weight.sizes(), weight, eps);
    return {y, rstd.squeeze(-1)};
  }
  const at::ScalarType dtype = statistics_dtype(x.scalar_type());
  const Tensor wide = x.to(dtype);
  const Tensor rstd = at::rsqrt(wide.square().mean({-1}, /*keepdim=*/true).add(eps));
  return {wide.mul(rstd).mul(weight.to(dtype)).to(x.scalar_type()).contiguous(), rstd.squeeze(-1)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_composite(const Tensor& x, const Tensor& residual,
                                                          const Tensor& weight, double eps) {
  check_norm("add_rms_norm", x, weight);
  check_residual(x, residual);
  const Tensor summed = x.add(residual).contiguous();
  auto [y, rstd] = rms_norm_composite(summed, weight, eps);
  return {y, summed, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward_composite(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, const Tensor& rstd,
                                                       const std::optional<Tensor>& grad_sum) {
  check_norm("rms_norm_backward", x, weight);
  if (has_fused_kernels(x)) {
    auto [dx, dweight] = at::_fused_rms_norm_backward(grad.contiguous(), x.contiguous(), weight.sizes(),
                                                      rstd.unsqueeze(-1), weight, {true, true});
    if (grad_sum) dx.add_(*grad_sum);
    return {dx, dweight};
  }
  const at::ScalarType dtype = statistics_dtype(x.scalar_type());
  const Tensor scale = rstd.unsqueeze(-1), normed = x.to(dtype).mul(scale), wide_grad = grad.to(dtype);
  const Tensor grad_normed = wide_grad.mul(weight.to(dtype));
  const Tensor along_x = grad_normed.mul(normed).mean({-1}, /*keepdim=*/true);
  Tensor dx = grad_normed.sub(normed.mul(along_x)).mul(scale);
  if (grad_sum) dx = dx.add(*grad_sum);
  const Tensor dweight = wide_grad.mul(normed).reshape({-1, x.size(-1)}).sum(0);
  return {dx.to(x.scalar_type()).contiguous(), dweight.to(x.scalar_type())};
}

namespace {

// ---- autograd ----

using RmsNormOp = Operator<rms_norm_composite, rms_norm_cpu>;
using AddRmsNormOp = Operator<add_rms_norm_composite, add_rms_norm_cpu>;
using RmsNormBackwardOp = Operator<rms_norm_backward_composite, rms_norm_backward_cpu>;

struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [y, rstd] = RmsNormOp::call(x, weight, eps);
    ctx->save_for_backward({x, weight, rstd});
    ctx->mark_non_differentiable({rstd});
    return {y, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight] = RmsNormBackwardOp::call(grads[0], saved[0], saved[1], saved[2], std::nullopt);
    return {dx, dweight, Tensor()};
  }
};

struct AddRmsNorm : Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& residual,
                               const Tensor& weight, double eps) {
    const auto [y, summed, rstd] = [&] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return AddRmsNormOp::call(x, residual, weight, eps);
    }();
    ctx->save_for_backward({saved_output(summed), weight, rstd});
    ctx->mark_non_differentiable({rstd});
    ctx->set_materialize_grads(false);
    return {y, summed, rstd};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &grad = grads[0], &grad_sum = grads[1];
    if (!grad.defined()) return {grad_sum, grad_sum, Tensor(), Tensor()};
    const auto also = grad_sum.defined() ? std::optional<Tensor>(grad_sum) : std::nullopt;
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight] = RmsNormBackwardOp::call(grad, saved[0], saved[1], saved[2], also);
    return {dx, dx, dweight, Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  RmsNormOp::define_differentiable<RmsNorm>(
      m, "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)");
  AddRmsNormOp::define_differentiable<AddRmsNorm>(
      m,
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) "
      "-> (Tensor y, Tensor summed, Tensor rstd)");
  RmsNormBackwardOp::define_without_gradient(
      m,
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? grad_sum) "
      "-> (Tensor dx, Tensor dweight)");
}

}  // namespace

}  // namespace pyruntime::layers
