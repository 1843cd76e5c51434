// Collectives of rows by whichever way the group has: its transport, or its process group.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/operand.h"
#include "transport/group.h"

namespace pyruntime {

int64_t agreed_rows(Group& group, const Operand& x_shard, int64_t rows);

// All ranks' rows in order, [blocks, rows * inner, width]. `pieces`, here and below:
// FlightDescriptor::pieces.
at::Tensor gather_rows(Group& group, Op op, const Operand& x_shard, int64_t rows, int pieces = 0);

// parts [blocks, rows * inner, width] summed over the ranks: this rank's rows of the sum, or all of them.
// bias is added once.
at::Tensor reduce_scatter_rows(Group& group, Op op, const Operand& parts, const at::Tensor& bias,
                               int pieces = 0);
at::Tensor all_reduce_rows(Group& group, Op op, const Operand& parts, const at::Tensor& bias, int pieces = 0);

}  // namespace pyruntime
