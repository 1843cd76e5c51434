#include "ops/process_group_collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <chrono>

// torch 2.13 renames _allgather_base and _reduce_scatter_base and deprecates these names, which are the ones
// that 2.11 has too.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace pyruntime {

namespace {

std::chrono::milliseconds deadline_of(const Group& group) {
  return std::chrono::milliseconds(static_cast<int64_t>(group.deadline_seconds() * 1e3));
}

at::Tensor all_gather_flat(Group& group, const at::Tensor& own) {
  at::Tensor all = at::empty({group.world_size(), own.numel()}, own.options());
  at::Tensor input = own.contiguous().view({-1});
  at::Tensor output = all.view({-1});
  c10d::AllgatherOptions options;
  options.timeout = deadline_of(group);
  group.process_group()._allgather_base(output, input, options)->wait();
  return all;
}

bool is_half(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

at::Tensor widened(const at::Tensor& t) {
  return is_half(t) ? t.to(at::kFloat) : t;
}

}  // namespace

int64_t agreed_rows_by_process_group(Group& group, const Operand& x_shard, int64_t rows) {
  if (rows != kUnknownRows) return rows;
  const at::Tensor held = all_gather_flat(
      group, at::tensor({x_shard.rows}, at::TensorOptions().dtype(at::kLong).device(x_shard.data.device())));
  const at::Tensor on_host = held.cpu();
  const int64_t total = on_host.sum().item<int64_t>();
  for (int peer = 0; peer < group.world_size(); ++peer) {
    const int64_t share = rows_of_rank(total, group.world_size(), peer);
    TORCH_CHECK_VALUE(on_host[peer].item<int64_t>() == share, "The ranks of group '", group.name(), "' hold ",
                      total, " rows in all; rank ", peer, " holds ", on_host[peer].item<int64_t>(),
                      " and should hold ", share, " of them, as torch.tensor_split cuts rows.");
  }
  return total;
}

at::Tensor gather_rows_by_process_group(Group& group, const Operand& x_shard, int64_t rows) {
  const ChunkPlan plan(rows, group.world_size(), group.rank());
  at::Tensor padded =
      at::zeros({x_shard.blocks, plan.max_rows() * x_shard.inner, x_shard.width}, x_shard.data.options());
  padded.narrow(1, 0, plan.own().rows * x_shard.inner).copy_(x_shard.data);
  const at::Tensor all = all_gather_flat(group, padded);
  at::Tensor out = at::empty({x_shard.blocks, rows * x_shard.inner, x_shard.width}, x_shard.data.options());
  for (const Chunk& chunk : plan.gather_order()) {
    x_shard.rows_of(out, chunk)
        .copy_(all[chunk.owner].view(padded.sizes()).narrow(1, 0, chunk.rows * x_shard.inner));
  }
  return out;
}

at::Tensor reduce_scatter_rows_by_process_group(Group& group, const at::Tensor& parts, const ChunkPlan& plan,
                                                int64_t inner, const at::Tensor& bias) {
  const int64_t padded_rows = plan.max_rows() * inner;
  at::Tensor padded =
      at::zeros({group.world_size(), parts.size(0), padded_rows, parts.size(2)}, widened(parts).options());
  for (const Chunk& chunk : plan.gather_order()) {
    padded[chunk.owner]
        .narrow(1, 0, chunk.rows * inner)
        .copy_(parts.narrow(1, chunk.begin * inner, chunk.rows * inner));
  }
  at::Tensor sum = at::empty({parts.size(0), padded_rows, parts.size(2)}, padded.options());
  at::Tensor output = sum.view({-1});
  at::Tensor input = padded.view({-1});
  c10d::ReduceScatterOptions options;
  options.timeout = deadline_of(group);
  group.process_group()._reduce_scatter_base(output, input, options)->wait();
  at::Tensor own = sum.narrow(1, 0, plan.own().rows * inner);
  if (bias.defined()) own.add_(bias);
  return own.to(parts.scalar_type()).contiguous();
}

at::Tensor all_reduce_by_process_group(Group& group, const at::Tensor& parts, const at::Tensor& bias) {
  std::vector<at::Tensor> sum = {is_half(parts) ? parts.to(at::kFloat) : parts.clone()};
  c10d::AllreduceOptions options;
  options.timeout = deadline_of(group);
  group.process_group().allreduce(sum, options)->wait();
  if (bias.defined()) sum[0].add_(bias);
  return sum[0].to(parts.scalar_type());
}

}  // namespace pyruntime
