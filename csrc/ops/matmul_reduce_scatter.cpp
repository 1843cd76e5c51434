// Y_shard = scatter(sum over ranks of X @ W^T): a chunk leaves as soon as its part of the product is written.
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include "ops/checks.h"
#include "ops/collectives.h"
#include "ops/gemm.h"
#include "ops/primitives.h"
#include "ops/row_exchange.h"
#include "ops/tier.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

at::Tensor blocked_empty(const Operand& like, int64_t width) {
  return at::empty({like.blocks, like.rows * like.inner, width}, like.data.options());
}

at::Tensor forward_unfused(Group& group, const Operand& x, const at::Tensor& weight, const at::Tensor& bias,
                           const Way& way) {
  Operand product = x;
  product.width = weight.size(0);
  product.data = blocked_empty(x, product.width);
  linear_forward(product.data, x.data, weight, {});
  return reduce_scatter_rows(group, Op::kMatmulReduceScatter, product, bias, way.chunks);
}

at::Tensor forward_chunked(Transport& transport, const Operand& x, const at::Tensor& weight,
                           const at::Tensor& bias, const Way& way) {
  RowScatter scatter(transport, Op::kMatmulReduceScatter, x, weight.size(0), bias.defined(),
                     /*all=*/false, way.chunks);
  for (const Chunk& chunk : scatter.order()) {
    linear_forward(scatter.part(chunk), x.rows_of(chunk), weight, {});
    scatter.publish(chunk);
  }
  at::Tensor own = scatter.reduce(bias);
  scatter.finish();
  return own;
}

at::Tensor forward_fused(Transport& transport, const Operand& x, const at::Tensor& weight,
                         const at::Tensor& bias, const Way& way) {
  RowScatter scatter(transport, Op::kMatmulReduceScatter, x, weight.size(0), bias.defined(),
                     /*all=*/false, way.chunks);
  at::Tensor own = scatter.multiply(x.data, weight, /*transposed=*/true, bias, way.tiles);
  scatter.finish();
  return own;
}

struct BackwardRequest {
  Operand grad;
  Operand x;
  bool need_dx;
  bool need_dw;
  bool need_db;
};

at::Tensor as_matrix(const at::Tensor& blocks) {
  return blocks.reshape({-1, blocks.size(-1)});
}

// The bias was added to each row once, on the rank that owns it: all rows of dY give its whole gradient, on
// every rank. Summed in fp32 over rows [blocks, *, N] that come in several parts.
at::Tensor bias_grad(const Tensors& parts) {
  const c10::ScalarType dtype = parts.front().scalar_type();
  at::Tensor sum;
  for (const at::Tensor& rows : parts) {
    at::Tensor one = at::sum(rows, at::IntArrayRef{0, 1}, /*keepdim=*/false, at::toOpMathType(dtype));
    sum = sum.defined() ? sum.add_(one) : one;
  }
  return sum.to(dtype);
}

// What needs all rows of dY at once.
void append_parameter_grads(Tensors& result, const BackwardRequest& request, const at::Tensor& weight,
                            const at::Tensor& dy) {
  if (request.need_dw) result.push_back(weight_gradient(weight, dy, request.x.data));
  if (request.need_db) result.push_back(bias_grad({dy}));
}

Tensors backward_unfused(Group& group, const BackwardRequest& request, const at::Tensor& weight,
                         const Way& way) {
  const at::Tensor dy = gather_rows(group, Op::kAllGatherMatmul, request.grad, request.x.rows, way.chunks);
  Tensors result;
  if (request.need_dx) {
    result.push_back(at::empty(request.x.sizes, dy.options()));
    linear_dgrad(result[0].view(request.x.data.sizes()), dy, weight, /*accumulate=*/false);
  }
  append_parameter_grads(result, request, weight, dy);
  return result;
}

Tensors backward_chunked(Transport& transport, const BackwardRequest& request, const at::Tensor& weight,
                         const Way& way) {
  RowGather gather(transport, Op::kAllGatherMatmul, request.grad, request.x.rows, way.chunks);
  // While chunks come over a network there is time for the own rows' part of dW; it is rounded once more.
  const bool in_two_parts = request.need_dw && transport.crosses_hosts() && !has_weight_gradient_sink(weight);
  at::Tensor dx, dw;
  Tensors result;
  if (request.need_dx) {
    result.push_back(at::empty(request.x.sizes, request.grad.data.options()));
    dx = result[0].view(request.x.data.sizes());
  }
  for (const Chunk& chunk : gather.order()) {
    if (request.need_dx) {
      linear_dgrad(request.x.rows_of(dx, chunk), gather.chunk(chunk), weight, /*accumulate=*/false);
    }
    if (in_two_parts && chunk.owner == transport.rank()) {
      dw = linear_wgrad(request.grad.data, request.x.rows_of(chunk));
    }
  }
  if (in_two_parts) {
    const at::Tensor others = gather.collect_others();
    write_linear_wgrad(dw, as_matrix(others), as_matrix(gather.others_of(request.x.data)),
                       /*accumulate=*/true);
    result.push_back(dw);
    if (request.need_db) result.push_back(bias_grad({request.grad.data, others}));
  } else if (request.need_dw || request.need_db) {
    append_parameter_grads(result, request, weight, gather.collect());
  }
  gather.finish();
  return result;
}

Tensors backward_fused(Transport& transport, const BackwardRequest& request, const at::Tensor& weight,
                       const Way& way) {
  RowGather gather(transport, Op::kAllGatherMatmul, request.grad, request.x.rows, way.chunks);
  Tensors result;
  if (request.need_dx) {
    result.push_back(at::empty(request.x.sizes, request.grad.data.options()));
    gather.multiply(result[0].view(request.x.data.sizes()), weight, /*transposed=*/false, {}, way.tiles);
  }
  if (request.need_dw || request.need_db) append_parameter_grads(result, request, weight, gather.collect());
  gather.finish();
  return result;
}

}  // namespace

at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& optional_bias,
                                 const std::string& group_name, int64_t dim, const std::string& tier_name) {
  constexpr const char* kOp = "matmul_reduce_scatter";
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  check_linear(kOp, x, {weight}, {bias});
  const Operand operand = Operand::of(x, dim, "x");
  const Way asked = way_named(tier_name);
  Group& group = Group::get(group_name);
  const int64_t width = weight.size(0);
  if (group.world_size() == 1) {
    at::Tensor out = at::empty(operand.sizes_with(operand.rows, width), x.options());
    linear_forward(out.view({operand.blocks, operand.rows * operand.inner, width}), operand.data, weight,
                   bias);
    return out;
  }
  Transport* transport = group.transport(x.device());
  const TierKey key{
      kOp, operand.rows * operand.blocks * operand.inner, width, operand.width, x.scalar_type(), x.device()};
  const auto why_not = [&] {
    return why_not_fused(*transport, Op::kMatmulReduceScatter, operand, operand.rows, width);
  };
  const at::Tensor own = run_in_tier(group, transport, key, asked, why_not, [&](const Way& way) -> Tensors {
    if (way.tier == Tier::kFused) return {forward_fused(*transport, operand, weight, bias, way)};
    if (way.tier == Tier::kChunked) return {forward_chunked(*transport, operand, weight, bias, way)};
    return {forward_unfused(group, operand, weight, bias, way)};
  })[0];
  return own.view(operand.sizes_with(rows_of_rank(operand.rows, group.world_size(), group.rank()), width));
}

Tensors matmul_reduce_scatter_backward(const at::Tensor& grad_shard, const at::Tensor& x,
                                       const at::Tensor& weight, const std::string& group_name, int64_t dim,
                                       bool need_dx, bool need_dw, bool need_db,
                                       const std::string& tier_name) {
  const BackwardRequest request{Operand::of(grad_shard, dim, "grad"), Operand::of(x, dim, "x"), need_dx,
                                need_dw, need_db};
  Group& group = Group::get(group_name);
  if (group.world_size() == 1) {
    Tensors result;
    if (need_dx) {
      result.push_back(at::empty(x.sizes(), x.options()));
      linear_dgrad(result[0].view(request.x.data.sizes()), request.grad.data, weight, /*accumulate=*/false);
    }
    append_parameter_grads(result, request, weight, request.grad.data);
    return result;
  }
  Transport* transport = group.transport(x.device());
  const TierKey key{"matmul_reduce_scatter_backward",
                    request.x.rows * request.x.blocks * request.x.inner,
                    weight.size(0),
                    request.x.width,
                    x.scalar_type(),
                    x.device()};
  const auto why_not = [&] {
    return why_not_fused(*transport, Op::kAllGatherMatmul, request.grad, request.x.rows, request.grad.width);
  };
  return run_in_tier(group, transport, key, way_named(tier_name), why_not, [&](const Way& way) {
    if (way.tier == Tier::kFused) return backward_fused(*transport, request, weight, way);
    if (way.tier == Tier::kChunked) return backward_chunked(*transport, request, weight, way);
    return backward_unfused(group, request, weight, way);
  });
}

}  // namespace pyruntime
