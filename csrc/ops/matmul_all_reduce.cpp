// Y = sum over ranks of X @ W^T, on every rank: rows are reduced by their owners and read back, chunk by
// chunk.
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

// [.., K] as one block of rows, whatever its leading dimensions: nothing stays cut, so how rows are cut on
// the way is ours to choose.
Operand as_rows(const at::Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(x.dim() >= 2, what, " has shape ", x.sizes(),
                    "; it needs at least two dimensions, rows and features.");
  return Operand::of(x.reshape({c10::size_to_dim_(static_cast<int>(x.dim() - 1), x.sizes()), x.size(-1)}), 0,
                     what);
}

std::vector<int64_t> sizes_with_width(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  return sizes;
}

at::Tensor forward_chunked(Transport& transport, const Operand& x, const at::Tensor& weight,
                           const at::Tensor& bias, const Way& way) {
  RowScatter scatter(transport, Op::kMatmulAllReduce, x, weight.size(0), bias.defined(),
                     /*all=*/true, way.chunks);
  for (const Chunk& chunk : scatter.order()) {
    linear_forward(scatter.part(chunk), x.rows_of(chunk), weight, {});
    scatter.publish(chunk);
  }
  at::Tensor all = scatter.reduce_all(bias);
  scatter.finish();
  return all;
}

at::Tensor forward_unfused(Group& group, const Operand& x, const at::Tensor& weight, const at::Tensor& bias,
                           const Way& way) {
  Operand product = x;
  product.width = weight.size(0);
  product.data = at::empty({1, x.rows, product.width}, x.data.options());
  linear_forward(product.data, x.data, weight, {});
  return all_reduce_rows(group, Op::kMatmulAllReduce, product, bias, way.chunks);
}

struct BackwardRequest {
  std::vector<Operand> grads;
  Operand x;
  bool need_dx;
  bool need_dw;
};

void write_dx(const at::Tensor& out, const BackwardRequest& request, const Tensors& weights,
              const Chunk& chunk) {
  for (size_t i = 0; i < weights.size(); ++i) {
    linear_dgrad(out, request.grads[i].rows_of(chunk), weights[i], /*accumulate=*/i > 0);
  }
}

void append_wgrads(Tensors& result, const BackwardRequest& request, const Tensors& weights) {
  if (!request.need_dw) return;
  for (size_t i = 0; i < weights.size(); ++i) {
    result.push_back(weight_gradient(weights[i], request.grads[i].data, request.x.data));
  }
}

Tensors backward_local(const BackwardRequest& request, const Tensors& weights) {
  Tensors result;
  if (request.need_dx) {
    result.push_back(at::empty(request.x.data.sizes(), request.x.data.options()));
    write_dx(result[0], request, weights, Chunk{0, 0, request.x.rows});
  }
  append_wgrads(result, request, weights);
  return result;
}

Tensors backward_unfused(Group& group, const BackwardRequest& request, const Tensors& weights,
                         const Way& way) {
  Tensors result = backward_local(request, weights);
  if (request.need_dx)
    result[0] =
        all_reduce_rows(group, Op::kMatmulAllReduce, Operand::of(result[0][0], 0, "dx"), {}, way.chunks);
  return result;
}

// dW runs while the parts of dX travel.
Tensors backward_chunked(Transport& transport, const BackwardRequest& request, const Tensors& weights,
                         const Way& way) {
  if (!request.need_dx) return backward_local(request, weights);
  RowScatter scatter(transport, Op::kMatmulAllReduce, request.x, request.x.width, /*with_bias=*/false,
                     /*all=*/true, way.chunks);
  for (const Chunk& chunk : scatter.order()) {
    write_dx(scatter.part(chunk), request, weights, chunk);
    scatter.publish(chunk);
  }
  Tensors dw;
  append_wgrads(dw, request, weights);
  Tensors result{scatter.reduce_all({})};
  scatter.finish();
  for (at::Tensor& one : dw) result.push_back(std::move(one));
  return result;
}

}  // namespace

at::Tensor matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& optional_bias, const std::string& group_name,
                             const std::string& tier_name) {
  constexpr const char* kOp = "matmul_all_reduce";
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  check_linear(kOp, x, {weight}, {bias});
  const Operand rows = as_rows(x, "x");
  const Way asked = way_named(tier_name);
  Group& group = Group::get(group_name);
  const std::vector<int64_t> sizes = sizes_with_width(x, weight.size(0));
  if (group.world_size() == 1) {
    at::Tensor out = at::empty(sizes, x.options());
    linear_forward(out.view({1, rows.rows, weight.size(0)}), rows.data, weight, bias);
    return out;
  }
  Transport* transport = group.transport(x.device());
  const TierKey key{kOp, rows.rows, weight.size(0), rows.width, x.scalar_type(), x.device()};
  return run_in_tier(group, transport, key, asked, no_fused_kernel,
                     [&](const Way& way) -> Tensors {
                       return {way.tier == Tier::kChunked
                                   ? forward_chunked(*transport, rows, weight, bias, way)
                                   : forward_unfused(group, rows, weight, bias, way)};
                     })[0]
      .view(sizes);
}

Tensors replicated_matmul(const at::Tensor& x, const Tensors& weights,
                          const OptionalTensors& optional_biases) {
  constexpr const char* kOp = "replicated_matmul";
  const Tensors biases = optional_tensors(optional_biases, weights.size(), kOp);
  check_linear(kOp, x, weights, biases);
  const Operand rows = as_rows(x, "x");
  Tensors outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    outputs.push_back(at::empty(sizes_with_width(x, weights[i].size(0)), x.options()));
    linear_forward(outputs[i].view({1, rows.rows, weights[i].size(0)}), rows.data, weights[i], biases[i]);
  }
  return outputs;
}

Tensors replicated_matmul_backward(const Tensors& grads, const at::Tensor& x, const Tensors& weights,
                                   const std::string& group_name, bool need_dx, bool need_dw,
                                   const std::string& tier_name) {
  BackwardRequest request{{}, as_rows(x, "x"), need_dx, need_dw};
  int64_t width = 0;
  for (const at::Tensor& grad : grads) {
    request.grads.push_back(as_rows(grad, "grad"));
    width += grad.size(-1);
  }
  Group& group = Group::get(group_name);
  Tensors result;
  if (group.world_size() == 1) {
    result = backward_local(request, weights);
  } else {
    Transport* transport = group.transport(x.device());
    const TierKey key{
        "replicated_matmul_backward", request.x.rows, width, request.x.width, x.scalar_type(), x.device()};
    result = run_in_tier(group, transport, key, way_named(tier_name), no_fused_kernel, [&](const Way& way) {
      return way.tier == Tier::kChunked ? backward_chunked(*transport, request, weights, way)
                                        : backward_unfused(group, request, weights, way);
    });
  }
  if (need_dx) result[0] = result[0].view(x.sizes());
  return result;
}

}  // namespace pyruntime
