// Y_i = gather(X_shard) @ W_i^T: the GEMM starts on the own chunk and takes the others where their owners
// wrote them.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/collectives.h"
#include "ops/gemm.h"
#include "ops/primitives.h"
#include "ops/row_exchange.h"
#include "ops/tier.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

int64_t total_width(const Tensors& weights) {
  int64_t width = 0;
  for (const at::Tensor& weight : weights) width += weight.size(0);
  return width;
}

// The outputs [.., rows, .., N_i], and each as [blocks, rows * inner, N_i].
struct Outputs {
  Tensors tensors;
  Tensors blocked;

  void add(const Operand& like, int64_t rows, int64_t width) {
    tensors.push_back(at::empty(like.sizes_with(rows, width), like.data.options()));
    blocked.push_back(tensors.back().view({like.blocks, rows * like.inner, width}));
  }
};

Tensors forward_unfused(Group& group, const Operand& x, int64_t rows, const Tensors& weights,
                        const Tensors& biases, bool return_gathered, const Way& way) {
  const at::Tensor gathered = gather_rows(group, Op::kAllGatherMatmul, x, rows, way.chunks);
  Outputs outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.add(x, rows, weights[i].size(0));
    linear_forward(outputs.blocked[i], gathered, weights[i], biases[i]);
  }
  if (return_gathered) outputs.tensors.push_back(gathered.view(x.sizes_with(rows, x.width)));
  return outputs.tensors;
}

Tensors forward_chunked(Transport& transport, const Operand& x, int64_t rows, const Tensors& weights,
                        const Tensors& biases, bool return_gathered, const Way& way) {
  RowGather gather(transport, Op::kAllGatherMatmul, x, rows, way.chunks);
  Outputs outputs;
  for (const at::Tensor& weight : weights) outputs.add(x, rows, weight.size(0));
  if (return_gathered) outputs.add(x, rows, x.width);
  for (const Chunk& chunk : gather.order()) {
    const at::Tensor x_chunk = gather.chunk(chunk);
    for (size_t i = 0; i < weights.size(); ++i) {
      linear_forward(x.rows_of(outputs.blocked[i], chunk), x_chunk, weights[i], biases[i]);
    }
    if (return_gathered) {
      const ScopedSeconds moving(transport.stats().moving_s);
      x.rows_of(outputs.blocked.back(), chunk).copy_(x_chunk);
    }
  }
  gather.finish();
  return outputs.tensors;
}

Tensors forward_fused(Transport& transport, const Operand& x, int64_t rows, const Tensors& weights,
                      const Tensors& biases, bool return_gathered, const Way& way) {
  RowGather gather(transport, Op::kAllGatherMatmul, x, rows, way.chunks);
  Outputs outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.add(x, rows, weights[i].size(0));
    gather.multiply(outputs.blocked[i], weights[i], /*transposed=*/true, biases[i], way.tiles);
  }
  if (return_gathered) outputs.tensors.push_back(gather.collect().view(x.sizes_with(rows, x.width)));
  gather.finish();
  return outputs.tensors;
}

// dX of all weights together: sum_i dY_i[rows of the chunk] @ W_i.
void write_dx(const at::Tensor& out, const std::vector<Operand>& grads, const Tensors& weights,
              const Chunk& chunk) {
  for (size_t i = 0; i < weights.size(); ++i) {
    linear_dgrad(out, grads[i].rows_of(chunk), weights[i], /*accumulate=*/i > 0);
  }
}

Tensors wgrads(const Tensors& weights, const std::vector<Operand>& grads, const at::Tensor& x_gathered) {
  Tensors result;
  for (size_t i = 0; i < weights.size(); ++i) {
    result.push_back(weight_gradient(weights[i], grads[i].data, x_gathered));
  }
  return result;
}

struct BackwardRequest {
  std::vector<Operand> grads;
  Operand x;
  bool gathered;
  bool need_dx;
  bool need_dw;
};

// The flights begin in the order of backward_chunked, so that one rank may run this and another that.
Tensors backward_unfused(Group& group, const BackwardRequest& request, const Tensors& weights,
                         const Way& way) {
  const Operand& grad = request.grads.front();
  at::Tensor x = request.x.data;
  if (request.need_dw && !request.gathered) x = gather_rows(group, Op::kAllGather, request.x, grad.rows);
  Tensors result;
  if (request.need_dx) {
    Operand parts = grad;
    parts.width = request.x.width;
    parts.data = at::empty({grad.blocks, grad.rows * grad.inner, parts.width}, grad.data.options());
    write_dx(parts.data, request.grads, weights, Chunk{0, 0, grad.rows});
    const at::Tensor dx = reduce_scatter_rows(group, Op::kMatmulReduceScatter, parts, {}, way.chunks);
    result.push_back(
        dx.view(grad.sizes_with(rows_of_rank(grad.rows, group.world_size(), group.rank()), parts.width)));
  }
  if (request.need_dw) {
    for (at::Tensor& dw : wgrads(weights, request.grads, x)) result.push_back(std::move(dw));
  }
  return result;
}

// Two flights: the shards of x come back while dX is computed and leaves, and dW runs while the parts of dX
// travel.
Tensors backward_chunked(Transport& transport, const BackwardRequest& request, const Tensors& weights,
                         const Way& way) {
  const Operand& grad = request.grads.front();
  std::optional<RowGather> gather;
  std::optional<RowScatter> scatter;
  if (request.need_dw && !request.gathered) gather.emplace(transport, Op::kAllGather, request.x, grad.rows);
  if (request.need_dx) {
    scatter.emplace(transport, Op::kMatmulReduceScatter, grad, request.x.width, /*with_bias=*/false,
                    /*all=*/false, way.chunks);
    for (const Chunk& chunk : scatter->order()) {
      write_dx(scatter->part(chunk), request.grads, weights, chunk);
      scatter->publish(chunk);
    }
  }
  Tensors dw;
  if (request.need_dw) {
    dw = wgrads(weights, request.grads, gather ? gather->collect() : request.x.data);
    if (gather) gather->finish();
  }
  Tensors result;
  if (scatter) {
    result.push_back(scatter->reduce({}).view(grad.sizes_with(scatter->own_rows(), request.x.width)));
    scatter->finish();
  }
  for (at::Tensor& one : dw) result.push_back(std::move(one));
  return result;
}

// One kernel sums one product, so those of several weights are laid side by side:
// dX = [dY_1 .. dY_n] @ [W_1; ..; W_n], summed in fp32 over all of them.
at::Tensor fused_dx(RowScatter& scatter, const std::vector<Operand>& grads, const Tensors& weights,
                    const Way& way) {
  if (grads.size() == 1)
    return scatter.multiply(grads[0].data, weights[0], /*transposed=*/false, {}, way.tiles);
  Tensors data;
  for (const Operand& grad : grads) data.push_back(grad.data);
  return scatter.multiply(at::cat(data, -1), at::cat(weights, 0), /*transposed=*/false, {}, way.tiles);
}

// The flights begin in the order of backward_chunked.
Tensors backward_fused(Transport& transport, const BackwardRequest& request, const Tensors& weights,
                       const Way& way) {
  const Operand& grad = request.grads.front();
  std::optional<RowGather> gather;
  if (request.need_dw && !request.gathered) gather.emplace(transport, Op::kAllGather, request.x, grad.rows);
  Tensors result;
  if (request.need_dx) {
    RowScatter scatter(transport, Op::kMatmulReduceScatter, grad, request.x.width, /*with_bias=*/false,
                       /*all=*/false, way.chunks);
    const at::Tensor dx = fused_dx(scatter, request.grads, weights, way);
    result.push_back(dx.view(grad.sizes_with(scatter.own_rows(), request.x.width)));
    scatter.finish();
  }
  if (request.need_dw) {
    const at::Tensor x = gather ? gather->collect() : request.x.data;
    for (at::Tensor& dw : wgrads(weights, request.grads, x)) result.push_back(std::move(dw));
    if (gather) gather->finish();
  }
  return result;
}

}  // namespace

Tensors all_gather_matmul(const at::Tensor& x_shard, const Tensors& weights,
                          const OptionalTensors& optional_biases, const std::string& group_name, int64_t dim,
                          int64_t rows, bool return_gathered, const std::string& tier_name) {
  constexpr const char* kOp = "all_gather_matmul";
  const Tensors biases = optional_tensors(optional_biases, weights.size(), kOp);
  check_linear(kOp, x_shard, weights, biases);
  const Operand x = Operand::of(x_shard, dim, "x_shard");
  const Way asked = way_named(tier_name);
  Group& group = Group::get(group_name);
  TORCH_CHECK_VALUE(rows >= kUnknownRows, kOp, " was given rows=", rows,
                    "; pass the rows over all ranks, or None.");
  if (group.world_size() == 1) {
    check_shard_rows(kOp, ChunkPlan(rows == kUnknownRows ? x.rows : rows, 1, 0), x);
    Outputs outputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      outputs.add(x, x.rows, weights[i].size(0));
      linear_forward(outputs.blocked[i], x.data, weights[i], biases[i]);
    }
    if (return_gathered) outputs.tensors.push_back(x_shard.clone());
    return outputs.tensors;
  }
  rows = agreed_rows(group, x, rows);
  check_shard_rows(kOp, ChunkPlan(rows, group.world_size(), group.rank()), x);
  Transport* transport = group.transport(x_shard.device());
  const TierKey key{kOp,     rows * x.blocks * x.inner, total_width(weights),
                    x.width, x_shard.scalar_type(),     x_shard.device()};
  const auto why_not = [&] { return why_not_fused(*transport, Op::kAllGatherMatmul, x, rows, x.width); };
  return run_in_tier(group, transport, key, asked, why_not, [&](const Way& way) {
    if (way.tier == Tier::kFused) {
      return forward_fused(*transport, x, rows, weights, biases, return_gathered, way);
    }
    if (way.tier == Tier::kChunked) {
      return forward_chunked(*transport, x, rows, weights, biases, return_gathered, way);
    }
    return forward_unfused(group, x, rows, weights, biases, return_gathered, way);
  });
}

Tensors all_gather_matmul_backward(const Tensors& grads, const at::Tensor& x, bool gathered,
                                   const Tensors& weights, const std::string& group_name, int64_t dim,
                                   bool need_dx, bool need_dw, const std::string& tier_name) {
  BackwardRequest request{{}, Operand::of(x, dim, "x"), gathered, need_dx, need_dw};
  for (const at::Tensor& grad : grads) request.grads.push_back(Operand::of(grad, dim, "grad"));
  const Operand& grad = request.grads.front();
  Group& group = Group::get(group_name);
  if (group.world_size() == 1) {
    Tensors result;
    if (need_dx) {
      result.push_back(at::empty(x.sizes(), x.options()));
      write_dx(result[0].view({grad.blocks, grad.rows * grad.inner, request.x.width}), request.grads, weights,
               Chunk{0, 0, grad.rows});
    }
    if (need_dw) {
      for (at::Tensor& dw : wgrads(weights, request.grads, request.x.data)) result.push_back(std::move(dw));
    }
    return result;
  }
  Transport* transport = group.transport(x.device());
  const TierKey key{"all_gather_matmul_backward",
                    grad.rows * grad.blocks * grad.inner,
                    total_width(weights),
                    request.x.width,
                    x.scalar_type(),
                    x.device()};
  const auto why_not = [&] {
    return why_not_fused(*transport, Op::kMatmulReduceScatter, grad, grad.rows, request.x.width);
  };
  return run_in_tier(group, transport, key, way_named(tier_name), why_not, [&](const Way& way) {
    if (way.tier == Tier::kFused) return backward_fused(*transport, request, weights, way);
    if (way.tier == Tier::kChunked) return backward_chunked(*transport, request, weights, way);
    return backward_unfused(group, request, weights, way);
  });
}

}  // namespace pyruntime
