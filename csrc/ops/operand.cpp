#include "ops/operand.h"

#include <ATen/ops/cat.h>

namespace pyruntime {

namespace {

void check_linear(const char* op, const at::Tensor& x, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK_VALUE(!weights.empty(), op, " was given no weights; pass one [N, K] tensor or a list of them.");
  TORCH_CHECK_TYPE(x.is_floating_point() && at::elementSize(x.scalar_type()) >= 2, op,
                   " was given x of dtype ", x.scalar_type(), "; use float32, bfloat16, float16 or float64.");
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight ", i, " has shape ", weight.sizes(),
                      "; a weight is [N, K], as in nn.Linear.");
    TORCH_CHECK_VALUE(weight.size(1) == x.size(-1), op, ": x has ", x.size(-1), " features (shape ",
                      x.sizes(), ") and weight ", i, " takes ", weight.size(1), " (shape ", weight.sizes(),
                      ").");
    TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), op, ": x is ", x.scalar_type(), " and weight ",
                     i, " is ", weight.scalar_type(), "; cast one of them.");
    TORCH_CHECK_VALUE(weight.device() == x.device(), op, ": x is on ", x.device(), " and weight ", i, " on ",
                      weight.device(), ".");
    const at::Tensor& bias = biases[i];
    if (!bias.defined()) continue;
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == weight.size(0), op, ": bias ", i, " has shape ",
                      bias.sizes(), "; its weight of shape ", weight.sizes(), " takes [", weight.size(0),
                      "].");
    TORCH_CHECK_VALUE(bias.device() == x.device(), op, ": x is on ", x.device(), " and bias ", i, " on ",
                      bias.device(), ".");
    TORCH_CHECK_TYPE(bias.scalar_type() == x.scalar_type(), op, ": x is ", x.scalar_type(), " and bias ", i,
                     " is ", bias.scalar_type(), ".");
  }
}

}  // namespace

Operand Operand::of(const at::Tensor& x, int64_t dim, const char* what) {
  return form_of(x.contiguous(), dim, what);
}

Operand Operand::form_of(const at::Tensor& x, int64_t dim, const char* what) {
  TORCH_CHECK_VALUE(x.dim() >= 2, what, " has shape ", x.sizes(),
                    "; it needs at least two dimensions, rows and features.");
  TORCH_CHECK_VALUE(dim >= -x.dim() && dim < x.dim(), "dim=", dim, " is not a dimension of ", what,
                    " with shape ", x.sizes(), ".");
  const int64_t cut = dim < 0 ? dim + x.dim() : dim;
  TORCH_CHECK_VALUE(cut < x.dim() - 1, "dim=", dim, " is the feature dimension of ", what, " with shape ",
                    x.sizes(), "; rows are cut along an earlier one.");
  Operand operand;
  operand.dim = cut;
  operand.sizes = x.sizes().vec();
  operand.rows = x.size(cut);
  operand.width = x.size(-1);
  operand.blocks = 1;
  operand.inner = 1;
  for (int64_t d = 0; d < cut; ++d) operand.blocks *= x.size(d);
  for (int64_t d = cut + 1; d < x.dim() - 1; ++d) operand.inner *= x.size(d);
  operand.data = x.view({operand.blocks, operand.rows * operand.inner, operand.width});
  return operand;
}

Operand Operand::of_rows(const at::Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() >= 2, what, " has shape ", x.sizes(),
                    "; it needs at least two dimensions, rows and features.");
  return of(x.reshape({c10::size_to_dim_(static_cast<int>(x.dim() - 1), x.sizes()), x.size(-1)}), 0, what);
}

Operand Operand::of_linear(const char* op, const at::Tensor& x, std::optional<int64_t> dim, const char* what,
                           at::TensorList weights, at::TensorList biases) {
  check_linear(op, x, weights, biases);
  return dim ? of(x, *dim, what) : of_rows(x, what);
}

std::vector<int64_t> Operand::sizes_with(int64_t new_rows, int64_t new_width) const {
  std::vector<int64_t> result = sizes;
  result[dim] = new_rows;
  result.back() = new_width;
  return result;
}

at::Tensor Operand::rows_of(const at::Tensor& other, const Chunk& chunk) const {
  return other.narrow(1, chunk.begin * inner, chunk.rows * inner);
}

at::Tensor Operand::rows_but(const at::Tensor& other, const Chunk& chunk) const {
  const int64_t begin = chunk.begin * inner, end = begin + chunk.rows * inner;
  const at::Tensor before = other.narrow(1, 0, begin);
  const at::Tensor after = other.narrow(1, end, other.size(1) - end);
  if (begin == 0) return after;
  if (end == other.size(1)) return before;
  return at::cat({before, after}, 1);
}

std::vector<at::Tensor> optional_tensors(const c10::List<std::optional<at::Tensor>>& given, size_t count,
                                         const char* op) {
  TORCH_CHECK_VALUE(given.empty() || given.size() == count, op, " was given ", given.size(), " biases for ",
                    count, " weights.");
  std::vector<at::Tensor> tensors(count);
  for (size_t i = 0; i < given.size(); ++i) {
    tensors[i] = given.get(i).value_or(at::Tensor());
  }
  return tensors;
}

}  // namespace pyruntime
