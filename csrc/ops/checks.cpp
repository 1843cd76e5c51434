#include "ops/checks.h"

namespace pyruntime {

void check_linear(const char* op, const at::Tensor& x, const std::vector<at::Tensor>& weights,
                  const std::vector<at::Tensor>& biases) {
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

void check_shard_rows(const char* op, const ChunkPlan& plan, const Operand& x_shard) {
  TORCH_CHECK_VALUE(x_shard.rows == plan.own().rows, op, ": rank ", plan.own().owner, " of ",
                    plan.world_size(), " holds ", x_shard.rows, " rows, and its share of rows=", plan.rows(),
                    " is ", plan.own().rows, "; rows are cut as torch.tensor_split cuts them.");
}

std::vector<at::Tensor> optional_tensors(const std::vector<std::optional<at::Tensor>>& given, size_t count,
                                         const char* op) {
  TORCH_CHECK_VALUE(given.empty() || given.size() == count, op, " was given ", given.size(), " biases for ",
                    count, " weights.");
  std::vector<at::Tensor> tensors(count);
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].has_value()) tensors[i] = *given[i];
  }
  return tensors;
}

}  // namespace pyruntime
