#include "ops/gemm/gemm.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <vector>

#include "cpu/layers/add.h"
#include "ops/gemm/gemm_rule.h"

namespace at::native {
// oneDNN's matmul inside libtorch_cpu: out = alpha * a @ b + beta * out. Exported, but in no public header.
// Weak, so that a torch without it still loads and at::mm_out is used.
__attribute__((weak)) void mkldnn_matmul(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out,
                                         float beta, float alpha);
}  // namespace at::native

namespace pyruntime {

namespace {

// Torch has two GEMM libraries and gives fp32 to MKL, but oneDNN is faster for fp32 too (5 to 10 % on Zen 4).
// Below this many multiplications oneDNN's start-up outweighs its speed. A fixed rule, not a measurement:
// results must not differ from run to run.
constexpr int64_t kOneDnnFrom = int64_t{1} << 21;

bool use_one_dnn(const at::Tensor& a, const at::Tensor& b) {
  return library_has_bf16() && a.device().is_cpu() && a.scalar_type() == at::kFloat &&
         &at::native::mkldnn_matmul != nullptr && at::globalContext().userEnabledMkldnn() &&
         a.size(0) * a.size(1) * b.size(1) >= kOneDnnFrom;
}

// Whether a GEMM in this type lacks hardware support: then it is a hundred times slower than in fp32.
bool widen(const at::Tensor& t) {
  return t.device().is_cpu() &&
         (t.scalar_type() == at::kHalf || (t.scalar_type() == at::kBFloat16 && !library_has_bf16()));
}

// out = a @ b, out = a @ b + bias or out += a @ b; two-dimensional.
void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
              bool accumulate) {
  if (out.numel() == 0) return;
  if (widen(out)) {
    at::Tensor wide = at::mm(a.to(at::kFloat), b.to(at::kFloat));
    if (bias.defined()) wide.add_(bias);
    if (accumulate) wide.add_(out);
    out.copy_(wide);
    return;
  }
  at::Tensor target = out;
  if (!bias.defined() && use_one_dnn(a, b)) {
    at::native::mkldnn_matmul(a, b, out, accumulate ? 1.0f : 0.0f, 1.0f);
  } else if (accumulate) {
    at::addmm_out(target, out, a, b);
  } else if (bias.defined()) {
    at::addmm_out(target, bias, a, b);
  } else {
    at::mm_out(target, a, b);
  }
}

bool is_one_matrix(const at::Tensor& t) {
  return t.size(0) == 1 || t.is_contiguous();
}

// Smaller blocks are copied together and multiplied at once: many thin GEMMs cost more than moving the rows.
constexpr int64_t kThinRows = 256;

void multiply_blocks(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                     bool accumulate) {
  if (is_one_matrix(out) && is_one_matrix(a)) {
    multiply(as_matrix(out), as_matrix(a), b, bias, accumulate);
  } else if (out.size(1) >= kThinRows) {
    for (int64_t block = 0; block < out.size(0); ++block) {
      multiply(out.select(0, block), a.select(0, block), b, bias, accumulate);
    }
  } else {
    const at::Tensor packed = accumulate ? out.contiguous() : at::empty(out.sizes(), out.options());
    multiply(as_matrix(packed), as_matrix(a.contiguous()), b, bias, accumulate);
    out.copy_(packed);
  }
}

// With fewer rows, arranging the other operand does not pay. Where the library has no bf16, it converts a
// weight instead, which costs more for two rows already.
constexpr int64_t kPackedRows = 8, kPackedRowsOfWeights = 2;

bool packs(Product product, const at::Tensor& right, int64_t rows, int64_t k, int64_t n) {
  const bool is_weight = product != Product::kWeightGradient;
  return rows >= (is_weight && !library_has_bf16() ? kPackedRowsOfWeights : kPackedRows) &&
         cpu::PackedMatrix::can_hold(right) && takes_ours(product, rows, k, n);
}

}  // namespace

bool library_has_bf16() {
  static const bool found = [] {
    const auto asked = c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asked && asked->typed<bool()>().call();
  }();
  return found;
}

at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const int64_t rows = x.size(-1) > 0 ? x.numel() / x.size(-1) : 0;
  if (packs(Product::kForward, weight, rows, weight.size(1), weight.size(0))) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    at::Tensor out = at::empty(sizes, x.options());
    cpu::PackedMatrix(weight.t()).multiply(out.view({rows, -1}), x.reshape({rows, -1}), bias, false);
    return out;
  }
  if (!widen(x)) return at::linear(x, weight, bias);
  const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
  return at::linear(wide(x), wide(weight), wide(bias)).to(x.scalar_type());
}

WeightGemm::WeightGemm(const at::Tensor& weight, bool transposed, int64_t rows)
    : right_(transposed ? weight.t() : weight) {
  const Product product = transposed ? Product::kForward : Product::kInputGradient;
  if (packs(product, right_, rows, weight.size(1), weight.size(0))) packed_.emplace(right_);
}

void WeightGemm::write(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& bias,
                       bool accumulate) const {
  if (out.numel() == 0) return;
  if (!packed_) return multiply_blocks(out, rows, right_, bias, accumulate);
  if (is_one_matrix(out) && is_one_matrix(rows)) {
    return packed_->multiply(as_matrix(out), as_matrix(rows), bias, accumulate);
  }
  for (int64_t block = 0; block < out.size(0); ++block) {
    packed_->multiply(out.select(0, block), rows.select(0, block), bias, accumulate);
  }
}

bool library_multiplies(const at::Tensor& weight, int64_t rows) {
  return weight.is_cpu() && !packs(Product::kForward, weight.t(), rows, weight.size(1), weight.size(0));
}

WeightGradientGemm::WeightGradientGemm(const at::Tensor& dy, const at::Tensor& x) : dy_(dy), x_(x) {
  if (!packs(Product::kWeightGradient, x, x.size(0), x.size(1), dy.size(1))) return;
  packed_dy_.emplace(dy);
  packed_x_.emplace(x);
}

void WeightGradientGemm::write(const at::Tensor& out, int64_t first, bool accumulate) const {
  if (packed_x_) return packed_x_->multiply_transposed(out, *packed_dy_, first, accumulate);
  if (dy_.size(0) > 0) {
    const at::Tensor dy = dy_.narrow(1, first, out.size(0));
    // oneDNN copies columns of a wider dY, and because it gets their transpose, it copies element by element;
    // copying rows first costs less.
    const bool copies = dy.device().is_cpu() && !widen(dy) && !dy.t().is_contiguous();
    const at::Tensor columns = (copies ? dy.contiguous() : dy).t();
    if (out.scalar_type() == dy.scalar_type()) return multiply(out, columns, x_, {}, accumulate);
    if (widen(dy)) return multiply(out, columns.to(at::kFloat), x_.to(at::kFloat), {}, accumulate);
    if (!out.device().is_cpu()) {
      at::Tensor target = out;
      at::addmm_out(target, out, columns, x_, at::kFloat, /*beta=*/accumulate ? 1 : 0);
      return;
    }
    const at::Tensor narrow = at::mm(columns, x_);
    if (!accumulate) {
      out.copy_(narrow);
    } else {
      layers::call_add(out, narrow);
    }
  } else if (!accumulate) {
    out.zero_();
  }
}

void WeightGradientGemm::write_blocks(const at::Tensor& out, int64_t first, int64_t step) const {
  const int64_t blocks = out.size(0), rows = out.size(1);
  if (blocks < 2 || out.device().is_cpu() || dy_.size(0) == 0) {
    for (int64_t block = 0; block < blocks; ++block) write(out.select(0, block), first + block * step, false);
    return;
  }
  const at::Tensor columns = dy_.narrow(1, first, (blocks - 1) * step + rows).unfold(1, rows, step);
  at::Tensor target = out;
  at::bmm_out(target, columns.permute({1, 2, 0}), x_.expand({blocks, x_.size(0), x_.size(1)}));
}

at::Tensor linear_wgrad(const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor out = at::empty({dy.size(2), x.size(2)}, x.options());
  const WeightGradientGemm gemm(as_matrix(dy.contiguous()), as_matrix(x.contiguous()));
  gemm.write(out, 0, /*accumulate=*/false);
  return out;
}

}  // namespace pyruntime
