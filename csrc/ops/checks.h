// Checks of what a user passes to the primitives, in one place. Each raises ValueError or TypeError with a
// sentence.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "core/chunk_plan.h"
#include "ops/operand.h"

namespace pyruntime {

// x [..., K] and weights [N_i, K] on one device, of one floating dtype; biases are [N_i].
void check_linear(const char* op, const at::Tensor& x, const std::vector<at::Tensor>& weights,
                  const std::vector<at::Tensor>& biases);

// This rank's share of `rows` is what x_shard holds.
void check_shard_rows(const char* op, const ChunkPlan& plan, const Operand& x_shard);

// Every optional as a tensor, undefined where absent; an empty list stands for `count` absent ones.
std::vector<at::Tensor> optional_tensors(const std::vector<std::optional<at::Tensor>>& given, size_t count,
                                         const char* op);

}  // namespace pyruntime
