#include "ops/newton_schulz.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

#include "core/ledger/ledger.h"

namespace pyruntime {

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kSmallestNorm = 1e-7;
constexpr int kSteps = 5;

}  // namespace

std::shared_ptr<NewtonSchulz> NewtonSchulz::make(const at::Tensor& matrix) {
  TORCH_CHECK_VALUE(matrix.dim() == 2 && matrix.is_floating_point(), "Newton-Schulz was given ",
                    matrix.scalar_type(), " ", matrix.sizes(),
                    "; give it a matrix of floating-point numbers.");
  std::shared_ptr<NewtonSchulz> product(new NewtonSchulz(matrix));
  if (matrix.device().is_cpu()) {
    WaitQueue::of_this_thread().add(product);
  } else {
    product->finish();
  }
  return product;
}

NewtonSchulz::NewtonSchulz(const at::Tensor& matrix)
    : x_(matrix), layer_(Ledger::layer()), steps_left_(matrix.numel() == 0 ? 0 : kSteps) {}

void NewtonSchulz::begin() {
  is_transposed_ = x_.size(0) > x_.size(1);
  const at::Tensor wide = (is_transposed_ ? x_.t() : x_).contiguous();
  const auto exact = wide.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor norm = at::linalg_vector_norm(wide, 2, {}, /*keepdim=*/false, exact);
  x_ = wide.to(exact).div(norm.clamp_min(kSmallestNorm)).to(wide.scalar_type());
  gram_ = at::empty({x_.size(0), x_.size(0)}, x_.options());
  polynomial_ = at::empty_like(gram_);
  next_x_ = at::empty_like(x_);
}

bool NewtonSchulz::multiply() {
  if (steps_left_ == 0) return false;
  const LedgerOperator computing("newton_schulz", layer_);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!gram_.defined()) begin();
  const int64_t n = x_.size(0), k = x_.size(1);
  const bool applies = product_ == Product::kApply;
  const int64_t depth = product_ == Product::kGram ? k : n;
  const int64_t piece = x_.is_cpu() ? rows_of_piece(depth, n, applies ? k : n) : n;
  const int64_t rows = std::min(piece, n - next_row_);
  const auto of = [&](const at::Tensor& matrix) { return matrix.narrow(0, next_row_, rows); };
  at::Tensor out = of(applies ? next_x_ : product_ == Product::kGram ? gram_ : polynomial_);
  switch (product_) {
    case Product::kGram:
      at::mm_out(out, of(x_), x_.t());
      break;
    case Product::kPolynomial:
      at::addmm_out(out, of(gram_), of(gram_), gram_, kB, kC);
      break;
    case Product::kApply:
      at::addmm_out(out, of(x_), of(polynomial_), x_, kA, 1);
      break;
  }
  next_row_ += rows;
  if (next_row_ == n) end_product();
  return true;
}

void NewtonSchulz::end_product() {
  next_row_ = 0;
  if (product_ != Product::kApply) {
    product_ = product_ == Product::kGram ? Product::kPolynomial : Product::kApply;
    return;
  }
  product_ = Product::kGram;
  std::swap(x_, next_x_);
  if (--steps_left_ > 0) return;
  gram_ = polynomial_ = next_x_ = at::Tensor();
  x_ = (is_transposed_ ? x_.t() : x_).contiguous().add_(0);  // -0 + 0 = 0
  is_transposed_ = false;
}

at::Tensor NewtonSchulz::finish() {
  while (multiply()) continue;
  return x_;
}

}  // namespace pyruntime
