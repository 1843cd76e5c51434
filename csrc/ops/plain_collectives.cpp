// Collectives without a GEMM, over the same transport.
#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/collectives.h"
#include "ops/primitives.h"

namespace pyruntime {

namespace {

void check_summable(const char* op, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.is_floating_point() && x.element_size() >= 2, op, " was given dtype ", x.scalar_type(),
                   "; use float32, bfloat16, float16 or float64.");
}

}  // namespace

at::Tensor all_gather(const at::Tensor& x_shard, const std::string& group_name, int64_t dim, int64_t rows) {
  const Operand x = Operand::of(x_shard, dim, "x_shard");
  Group& group = Group::get(group_name);
  if (group.world_size() == 1) return x_shard.clone();
  rows = agreed_rows(group, x, rows);
  check_shard_rows("all_gather", ChunkPlan(rows, group.world_size(), group.rank()), x);
  return gather_rows(group, Op::kAllGather, x, rows).view(x.sizes_with(rows, x.width));
}

at::Tensor reduce_scatter(const at::Tensor& x, const std::string& group_name, int64_t dim) {
  check_summable("reduce_scatter", x);
  const Operand parts = Operand::of(x, dim, "x");
  Group& group = Group::get(group_name);
  if (group.world_size() == 1) return x.clone();
  const int64_t own_rows = rows_of_rank(parts.rows, group.world_size(), group.rank());
  return reduce_scatter_rows(group, Op::kReduceScatter, parts, {})
      .view(parts.sizes_with(own_rows, parts.width));
}

at::Tensor all_reduce(const at::Tensor& x, const std::string& group_name) {
  check_summable("all_reduce", x);
  Group& group = Group::get(group_name);
  if (group.world_size() == 1) return x.clone();
  // Any shape: as one column, cut wherever the ranks' shares fall.
  const Operand parts = Operand::of(x.reshape({-1, 1}), 0, "x");
  return all_reduce_rows(group, Op::kAllReduce, parts, {}).view(x.sizes());
}

at::Tensor all_gather_stats(const at::Tensor& x, const std::string& group_name) {
  Group& group = Group::get(group_name);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), group.world_size());
  if (group.world_size() == 1) return x.clone().view(sizes);
  const Operand own = Operand::of(x.reshape({1, -1}), 0, "x");
  return gather_rows(group, Op::kAllGather, own, group.world_size()).view(sizes);
}

}  // namespace pyruntime
