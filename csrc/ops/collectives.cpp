#include "ops/collectives.h"

#include <c10/core/DeviceGuard.h>

#include "ops/process_group_collectives.h"
#include "ops/row_exchange.h"

namespace pyruntime {

namespace {

// Shows all parts at once: the unfused way, nothing to overlap with.
RowScatter scatter_parts(Transport& transport, Op op, const Operand& parts, bool with_bias, bool all,
                         int pieces) {
  RowScatter scatter(transport, op, parts, parts.width, with_bias, all, pieces);
  for (const Chunk& chunk : scatter.order()) {
    {
      const ScopedSeconds moving(transport.stats().moving_s);
      scatter.part(chunk).copy_(parts.rows_of(chunk));
    }
    scatter.publish(chunk);
  }
  return scatter;
}

}  // namespace

int64_t agreed_rows(Group& group, const Operand& x_shard, int64_t rows) {
  const c10::DeviceGuard on(x_shard.data.device());
  Transport* transport = group.transport(x_shard.data.device());
  if (transport == nullptr) return agreed_rows_by_process_group(group, x_shard, rows);
  return agreed_rows(group, *transport, x_shard, rows);
}

at::Tensor gather_rows(Group& group, Op op, const Operand& x_shard, int64_t rows, int pieces) {
  const c10::DeviceGuard on(x_shard.data.device());
  Transport* transport = group.transport(x_shard.data.device());
  if (transport == nullptr) return gather_rows_by_process_group(group, x_shard, rows);
  RowGather gather(*transport, op, x_shard, rows, pieces);
  at::Tensor all = gather.collect();
  gather.finish();
  return all;
}

at::Tensor reduce_scatter_rows(Group& group, Op op, const Operand& parts, const at::Tensor& bias,
                               int pieces) {
  const c10::DeviceGuard on(parts.data.device());
  Transport* transport = group.transport(parts.data.device());
  if (transport == nullptr) {
    const ChunkPlan plan(parts.rows, group.world_size(), group.rank());
    return reduce_scatter_rows_by_process_group(group, parts.data, plan, parts.inner, bias);
  }
  RowScatter scatter = scatter_parts(*transport, op, parts, bias.defined(), /*all=*/false, pieces);
  at::Tensor own = scatter.reduce(bias);
  scatter.finish();
  return own;
}

at::Tensor all_reduce_rows(Group& group, Op op, const Operand& parts, const at::Tensor& bias, int pieces) {
  const c10::DeviceGuard on(parts.data.device());
  Transport* transport = group.transport(parts.data.device());
  if (transport == nullptr) return all_reduce_by_process_group(group, parts.data, bias);
  RowScatter scatter = scatter_parts(*transport, op, parts, bias.defined(), /*all=*/true, pieces);
  at::Tensor all = scatter.reduce_all(bias);
  scatter.finish();
  return all;
}

}  // namespace pyruntime
