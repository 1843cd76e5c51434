// The column linears, in which each rank computes some columns of Y: from an x that is gathered, or from one
// that every rank has whole.
#include <ATen/TensorOperators.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "core/saved_output.h"
#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/matmul_scatter.h"
#include "ops/matmul_sums.h"
#include "ops/operators.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

// --- kernels

int64_t total_width(at::TensorList weights) {
  int64_t width = 0;
  for (const at::Tensor& weight : weights) width += weight.size(0);
  return width;
}

void append_wgrads(Tensors& result, at::TensorList weights, const std::vector<Operand>& grads,
                   const at::Tensor& x, bool in_pieces) {
  for (size_t i = 0; i < weights.size(); ++i)
    result.push_back(weight_gradient(weights[i], grads[i].data, x, in_pieces));
}

Tensors all_gather_matmul(const at::Tensor& x_shard, at::TensorList weights,
                          const OptionalTensorList& optional_biases, c10::string_view group, int64_t dim,
                          c10::SymInt all_rows, bool return_gathered,
                          std::optional<bool> /*keep_gathered: what autograd saves*/, c10::string_view tier,
                          c10::string_view sums, c10::string_view wire) {
  constexpr const char* kOp = "all_gather_matmul";
  const Tensors biases = optional_tensors(optional_biases, weights.size(), kOp);
  const Operand x = Operand::of_linear(kOp, x_shard, dim, "x_shard", weights, biases);
  const int64_t asked_rows = all_rows.expect_int();
  TORCH_CHECK_VALUE(asked_rows >= kUnknownRows, kOp, " was given rows=", asked_rows,
                    "; pass the rows over all ranks, or None.");
  const c10::DeviceGuard on(x_shard.device());
  const Route route = choose_route({.op = kOp,
                                    .x = x,
                                    .n = total_width(weights),
                                    .k = x.width,
                                    .group = group,
                                    .tier = tier,
                                    .rows = asked_rows,
                                    .wire = wire,
                                    .sums = sums,
                                    .op_of_sums = "matmul_all_reduce"});
  GatherMatmul gather(route, Op::kAllGatherMatmul, x, return_gathered ? RowsAre::kKept : RowsAre::kPassing);
  const std::vector<GatherMatmul::Gemm> gemms = GatherMatmul::gemms(x, route.rows, weights, biases);
  if (route.sums == nullptr) {
    gather.multiply(gemms, /*transposed=*/true);
  } else {
    MatmulSums parts(route.of_sums(), gemms, /*transposed=*/true);
    gather.for_each_chunk(
        [&](const Chunk& chunk, const at::Tensor& part) { parts.multiply(x, chunk, part); });
    parts.finish();
  }
  Tensors outputs;
  for (const GatherMatmul::Gemm& gemm : gemms)
    outputs.push_back(gemm.out.view(x.sizes_with(route.rows, gemm.out.size(-1))));
  if (return_gathered) {
    const at::Tensor gathered = route.group.world_size() == 1 ? x_shard.clone() : gather.rows();
    outputs.push_back(gathered.view(x.sizes_with(route.rows, x.width)));
  }
  gather.finish();
  return outputs;
}

// Returns [dX_shard if need_dx] + [dW_i if need_dw]. `x` is the shard, or with `gathered` the gathered
// operand. The shards of x return while dX is computed and leaves; dW runs while the parts of dX travel.
Tensors all_gather_matmul_backward(at::TensorList grads, const at::Tensor& x_given, bool gathered,
                                   at::TensorList weights, c10::string_view group, int64_t dim, bool need_dx,
                                   bool need_dw, c10::string_view tier, c10::string_view sums,
                                   c10::string_view wire) {
  const Operand x = need_dw ? Operand::of(x_given, dim, "x") : Operand::form_of(x_given, dim, "x");
  std::vector<Operand> dy;
  for (const at::Tensor& grad : grads) dy.push_back(Operand::of(grad, dim, "grad"));
  const Operand& rows = dy.front();
  const c10::DeviceGuard on(x_given.device());
  const Route route = choose_route({.op = "all_gather_matmul_backward",
                                    .x = rows,
                                    .n = total_width(weights),
                                    .k = x.width,
                                    .group = group,
                                    .tier = tier,
                                    .wire = wire});
  std::optional<GatherMatmul> gather;
  // A tuned number of chunks applies to the rows that are multiplied, not to these.
  if (need_dw && !gathered) {
    Route again{route.group, route.rows, {route.tier.tier}, route.wire};
    again.together = !x.data.is_cpu();
    const bool keeps = std::ranges::any_of(weights, has_sink_that_keeps);
    gather.emplace(again, Op::kAllGather, x, keeps ? RowsAre::kKept : RowsAre::kLent);
  }
  std::optional<MatmulScatter> scatter;
  if (need_dx)
    scatter.emplace(route, MatmulScatter::Parts{dy, weights.vec(), /*transposed=*/false}, /*all=*/false);
  Tensors dw;
  if (need_dw) {
    append_wgrads(dw, weights, dy, gather ? gather->rows() : x.data,
                  waits_for_hosts(route.group, sums, x.data.device()));
  }
  if (gather) gather->finish();
  Tensors result;
  if (scatter) {
    result.push_back(scatter->finish().view(rows.sizes_with(route.own_rows(), x.width)));
  }
  result.insert(result.end(), dw.begin(), dw.end());
  return result;
}

Tensors replicated_matmul(const at::Tensor& x, at::TensorList weights,
                          const OptionalTensorList& optional_biases, c10::string_view /*group: backward*/,
                          c10::string_view tier, c10::string_view sums) {
  constexpr const char* kOp = "replicated_matmul";
  const Tensors biases = optional_tensors(optional_biases, weights.size(), kOp);
  const Operand rows = Operand::of_linear(kOp, x, {}, "x", weights, biases);
  tier_named(std::string(tier));  // an unknown tier is an error here too, where nothing travels
  const c10::DeviceGuard on(x.device());
  const std::vector<GatherMatmul::Gemm> gemms = GatherMatmul::gemms(rows, rows.rows, weights, biases);
  if (group_of_sums(sums) != nullptr) {
    const Route route = choose_route({.op = "matmul_all_reduce",
                                      .x = rows,
                                      .n = total_width(weights),
                                      .k = rows.width,
                                      .group = sums,
                                      .tier = tier});
    MatmulSums parts(route, gemms, /*transposed=*/true);
    parts.multiply(rows, Chunk{0, 0, rows.rows}, rows.data);
    parts.finish();
  } else {
    for (const GatherMatmul::Gemm& gemm : gemms) {
      WeightGemm(gemm.weight, /*transposed=*/true, rows.rows)
          .write(gemm.out, rows.data, gemm.bias, /*accumulate=*/false);
    }
  }
  Tensors outputs;
  for (const GatherMatmul::Gemm& gemm : gemms) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = gemm.out.size(-1);
    outputs.push_back(gemm.out.view(sizes));
  }
  return outputs;
}

// Returns [dX if need_dx] + [dW_i if need_dw]: dX = sum over ranks and weights of dY_i @ W_i; dW runs while
// it travels.
Tensors replicated_matmul_backward(at::TensorList grads, const at::Tensor& x, at::TensorList weights,
                                   c10::string_view group, bool need_dx, bool need_dw, c10::string_view tier,
                                   c10::string_view sums) {
  const int64_t all_rows = c10::size_to_dim_(static_cast<int>(x.dim() - 1), x.sizes());
  const at::Tensor matrix = x.reshape({all_rows, x.size(-1)});
  const Operand rows = need_dw ? Operand::of(matrix, 0, "x") : Operand::form_of(matrix, 0, "x");
  std::vector<Operand> dy;
  for (const at::Tensor& grad : grads) dy.push_back(Operand::of_rows(grad, "grad"));
  const c10::DeviceGuard on(x.device());
  std::optional<MatmulScatter> scatter;
  if (need_dx) {
    const Route route = choose_route({.op = "replicated_matmul_backward",
                                      .x = rows,
                                      .n = total_width(weights),
                                      .k = rows.width,
                                      .group = group,
                                      .tier = tier});
    scatter.emplace(route, MatmulScatter::Parts{dy, weights.vec(), /*transposed=*/false}, /*all=*/true);
  }
  Tensors dw;
  if (need_dw) {
    const bool in_pieces = waits_for_hosts(Group::get(std::string(group)), sums, x.device());
    append_wgrads(dw, weights, dy, rows.data, in_pieces);
  }
  Tensors result;
  if (scatter) result.push_back(scatter->finish().view(x.sizes()));
  result.insert(result.end(), dw.begin(), dw.end());
  return result;
}

// --- autograd

// The arguments of a column linear's autograd besides tensors.
struct ColumnCall {
  std::function<Tensors()> forward;  // the operator
  std::vector<int64_t> has_bias;     // by weight
  c10::string_view group;
  c10::string_view tier;
  int64_t dim = -1;  // dimension along which x is gathered; -1: x is whole
  bool return_gathered = false;
  bool keep_gathered = false;
  c10::string_view sums = "";  // the group over which results are summed
  c10::string_view wire = "same";
};

// Autograd of all column linears. It wants their tensors in one list: x, the weights, the biases that exist.
struct ColumnLinear : Function<ColumnLinear> {
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const ColumnCall& call) {
    variable_list outputs = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return call.forward();
    }();
    const at::TensorList weights = inputs.slice(1, call.has_bias.size());
    variable_list saved{saved_input(call.keep_gathered ? saved_output(outputs.back()) : inputs[0], weights)};
    if (call.keep_gathered && !call.return_gathered) outputs.pop_back();
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["group"] = std::string(call.group);
    ctx->saved_data["tier"] = std::string(call.tier);
    ctx->saved_data["sums"] = std::string(call.sums);
    ctx->saved_data["wire"] = std::string(call.wire);
    ctx->saved_data["dim"] = call.dim;
    ctx->saved_data["gathered"] = call.keep_gathered;
    ctx->saved_data["has_bias"] = call.has_bias;
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivatives(ctx->saved_data["dim"].toInt() < 0 ? "replicated_matmul" : "all_gather_matmul");
    const std::vector<int64_t> has_bias = ctx->saved_data["has_bias"].toIntVector();
    const size_t count = has_bias.size();
    const bool need_dx = ctx->needs_input_grad(0);
    bool need_dw = false;
    for (size_t i = 0; i < count; ++i) need_dw |= ctx->needs_input_grad(1 + i);
    Tensors found;
    if (need_dx || need_dw) {
      const Tensors saved = ctx->get_saved_variables();  // only once: checkpointing frees them then
      if (need_dw && multiplies_later(ctx, saved, grads)) need_dw = false;
      if (need_dx || need_dw)
        found = grads_of_matmul(ctx, saved, at::TensorList(grads).slice(0, count), need_dx, need_dw);
    }
    variable_list result(1 + count);
    size_t next = 0;
    if (need_dx) result[0] = found[next++];
    // Every rank used the returned gathered x, so its gradients add up over the ranks.
    if (need_dx && grads.size() > count) {
      result[0] = result[0] + call_reduce_scatter(grads[count], ctx->saved_data["group"].toStringRef(),
                                                  ctx->saved_data["dim"].toInt());
    }
    for (size_t i = 0; need_dw && i < count; ++i) result[1 + i] = found[next++];
    for (size_t i = 0; i < count; ++i) {
      if (has_bias[i] != 0)
        result.push_back(ctx->needs_input_grad(result.size()) ? sum_over_rows(grads[i]) : at::Tensor());
    }
    result.emplace_back();  // the call
    return result;
  }

 private:
  // Queues the weights' gradients for this op's wait for dX and later waits, if they may come later; returns
  // whether it did. All of x must be here.
  static bool multiplies_later(AutogradContext* ctx, const Tensors& saved, variable_list& grads) {
    const at::TensorList weights = at::TensorList(saved).slice(1);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    if (dim >= 0 && !ctx->saved_data["gathered"].toBool()) return false;
    if (!waits_for_hosts(Group::get(ctx->saved_data["group"].toStringRef()),
                         ctx->saved_data["sums"].toStringRef(), saved[0].device()))
      return false;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!ctx->needs_input_grad(1 + i) || !may_come_later(weights[i])) return false;
    }
    const auto blocks = [&](const at::Tensor& t, const char* what) {
      return dim < 0 ? Operand::of_rows(t, what).data : Operand::of(t, dim, what).data;
    };
    const at::Tensor x = blocks(saved[0], "x");
    for (size_t i = 0; i < weights.size(); ++i) {
      grads[i] = grads[i].contiguous();
      multiply_later(weights[i], "all_gather_matmul weight gradient", blocks(grads[i], "grad"), x);
    }
    return true;
  }

  // The gradients of x and of the weights.
  static Tensors grads_of_matmul(AutogradContext* ctx, const Tensors& saved, at::TensorList grads,
                                 bool need_dx, bool need_dw) {
    const at::TensorList weights = at::TensorList(saved).slice(1);
    const std::string group = ctx->saved_data["group"].toStringRef();
    const std::string tier = ctx->saved_data["tier"].toStringRef();
    const std::string sums = ctx->saved_data["sums"].toStringRef();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    if (dim < 0)
      return Operator<replicated_matmul_backward>::call(grads, saved[0], weights, group, need_dx, need_dw,
                                                        tier, sums);
    return Operator<all_gather_matmul_backward>::call(grads, saved[0], ctx->saved_data["gathered"].toBool(),
                                                      weights, group, dim, need_dx, need_dw, tier, sums,
                                                      ctx->saved_data["wire"].toStringRef());
  }
};

Tensors apply(const char* op, const at::Tensor& x, at::TensorList weights, const OptionalTensorList& biases,
              ColumnCall call) {
  Tensors inputs{x};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  for (const at::Tensor& bias : optional_tensors(biases, weights.size(), op)) {
    call.has_bias.push_back(bias.defined());
    if (bias.defined()) inputs.push_back(bias);
  }
  return ColumnLinear::apply(at::TensorList(inputs), call);
}

Tensors all_gather_matmul_autograd(const at::Tensor& x, at::TensorList weights,
                                   const OptionalTensorList& biases, c10::string_view group, int64_t dim,
                                   c10::SymInt rows, bool return_gathered, std::optional<bool> keep_gathered,
                                   c10::string_view tier, c10::string_view sums, c10::string_view wire) {
  // On one host gathering again costs next to nothing; over a network it costs a transfer. Only the gradient
  // of a weight reads the gathered x.
  const bool keep =
      std::ranges::any_of(weights, [](const auto& each) { return each.requires_grad(); }) &&
      (keep_gathered.has_value() ? *keep_gathered : Group::get(std::string(group)).crosses_hosts(x.device()));
  const auto forward = [&] {
    return Operator<all_gather_matmul>::call(x, weights, biases, group, dim, rows, keep || return_gathered,
                                             false, tier, sums, wire);
  };
  const int64_t cut = dim < 0 ? dim + x.dim() : dim;
  return apply("all_gather_matmul", x, weights, biases,
               {forward, {}, group, tier, cut, return_gathered, keep, sums, wire});
}

Tensors replicated_matmul_autograd(const at::Tensor& x, at::TensorList weights,
                                   const OptionalTensorList& biases, c10::string_view group,
                                   c10::string_view tier, c10::string_view sums) {
  const auto forward = [&] {
    return Operator<replicated_matmul>::call(x, weights, biases, group, tier, sums);
  };
  return apply("replicated_matmul", x, weights, biases,
               {.forward = forward, .has_bias = {}, .group = group, .tier = tier, .sums = sums});
}

}  // namespace

Tensors call_all_gather_matmul(const at::Tensor& x_shard, at::TensorList weights, c10::string_view group,
                               int64_t dim, c10::SymInt rows, bool return_gathered,
                               std::optional<bool> keep_gathered) {
  return Operator<all_gather_matmul>::call(x_shard, weights, OptionalTensorList(), group, dim,
                                           std::move(rows), return_gathered, keep_gathered, "auto", "",
                                           "same");
}

Tensors call_replicated_matmul_backward(at::TensorList grads, const at::Tensor& x, at::TensorList weights,
                                        c10::string_view group, bool need_dx, bool need_dw,
                                        c10::string_view tier) {
  return Operator<replicated_matmul_backward>::call(grads, x, weights, group, need_dx, need_dw, tier, "");
}

void register_column_linears(torch::Library& m) {
  Operator<all_gather_matmul>::define_differentiable<all_gather_matmul_autograd>(
      m,
      "all_gather_matmul(Tensor x_shard, Tensor[] weights, Tensor?[] biases, str group, int dim, SymInt "
      "rows, "
      "bool return_gathered, bool? keep_gathered, str tier, str sums=\"\", str wire=\"same\") -> Tensor[]");
  Operator<all_gather_matmul_backward>::define(
      m,
      "all_gather_matmul_backward(Tensor[] grads, Tensor x, bool gathered, Tensor[] weights, str group, "
      "int dim, bool need_dx, bool need_dw, str tier, str sums=\"\", str wire=\"same\") -> Tensor[]");
  Operator<replicated_matmul>::define_differentiable<replicated_matmul_autograd>(
      m,
      "replicated_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str group, str tier, str sums=\"\") "
      "-> "
      "Tensor[]");
  Operator<replicated_matmul_backward>::define(
      m,
      "replicated_matmul_backward(Tensor[] grads, Tensor x, Tensor[] weights, str group, bool need_dx, "
      "bool need_dw, str tier, str sums=\"\") -> Tensor[]");
}

}  // namespace pyruntime
