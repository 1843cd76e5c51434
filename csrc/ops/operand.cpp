#include "ops/operand.h"

namespace pyruntime {

Operand Operand::of(const at::Tensor& x, int64_t dim, const char* what) {
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
  operand.data = x.contiguous().view({operand.blocks, operand.rows * operand.inner, operand.width});
  return operand;
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

}  // namespace pyruntime
