// Collectives of whole operands over any c10d backend, for groups whose ranks cannot reach each other's
// memory. Nothing overlaps here: this is the unfused tier's last resort. Ragged rows are padded to the
// largest share.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/operand.h"
#include "transport/group.h"

namespace pyruntime {

// Rows over all ranks; what each rank holds is exchanged when `rows` is kUnknownRows.
int64_t agreed_rows_by_process_group(Group& group, const Operand& x_shard, int64_t rows);

// All ranks' rows in order, [blocks, rows * inner, width].
at::Tensor gather_rows_by_process_group(Group& group, const Operand& x_shard, int64_t rows);

// This rank's rows of the sum of `parts` [blocks, rows * inner, width] over the ranks. Halves travel and are
// summed as fp32.
at::Tensor reduce_scatter_rows_by_process_group(Group& group, const at::Tensor& parts, const ChunkPlan& plan,
                                                int64_t inner, const at::Tensor& bias);

// The sum of `parts` over the ranks, likewise.
at::Tensor all_reduce_by_process_group(Group& group, const at::Tensor& parts, const at::Tensor& bias);

}  // namespace pyruntime
