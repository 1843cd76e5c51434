// The row linears, in which each rank has some columns of x and computes a part of every sum: the sums go to
// the owners of their rows, or to every rank.
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>

#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/matmul_scatter.h"
#include "ops/matmul_sums.h"
#include "ops/operators.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

// --- kernels

at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& optional_bias, c10::string_view group,
                                 int64_t dim, c10::string_view tier, c10::string_view /*sums: backward*/,
                                 c10::string_view wire) {
  constexpr const char* kOp = "matmul_reduce_scatter";
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  const Operand operand = Operand::of_linear(kOp, x, dim, "x", {weight}, {bias});
  const c10::DeviceGuard on(x.device());
  const Route route = choose_route({.op = kOp,
                                    .x = operand,
                                    .n = weight.size(0),
                                    .k = operand.width,
                                    .group = group,
                                    .tier = tier,
                                    .wire = wire});  // used by the backward; errors are raised here
  MatmulScatter scatter(route, {{operand}, {weight}, /*transposed=*/true, bias}, /*all=*/false);
  return scatter.finish().view(operand.sizes_with(route.own_rows(), weight.size(0)));
}

// The owner of a row added the bias once, so all rows of dY give its whole gradient, on every rank. Summed in
// fp32 over rows [blocks, *, N] that come in several parts.
at::Tensor bias_grad(const Tensors& parts) {
  const c10::ScalarType dtype = parts.front().scalar_type();
  at::Tensor sum;
  for (const at::Tensor& rows : parts) {
    at::Tensor one = at::sum(rows, at::IntArrayRef{0, 1}, /*keepdim=*/false, at::toOpMathType(dtype));
    sum = sum.defined() ? sum.add_(one) : one;
  }
  return sum.to(dtype);
}

// The route of a backward over all rows of x.
Route route_of_backward(const Operand& x, const at::Tensor& weight, c10::string_view group,
                        c10::string_view tier, c10::string_view sums = "", c10::string_view wire = "same") {
  return choose_route({.op = "matmul_reduce_scatter_backward",
                       .x = x,
                       .n = weight.size(0),
                       .k = x.width,
                       .group = group,
                       .tier = tier,
                       .wire = wire,
                       .sums = sums,
                       .op_of_sums = "replicated_matmul_backward"});
}

// Whether dW is summed in two parts, which rounds it once more: while chunks arrive over a network there is
// time for the own rows' part.
bool sums_in_two_parts(const Route& route, const at::Tensor& weight) {
  return route.tier.tier == Tier::kChunked && route.group.crosses_hosts(weight.device()) &&
         !has_weight_gradient_sink(weight);
}

// Returns [dX if need_dx] + [dW if need_dw] + [dbias if need_db] + [the others' rows of dY if need_others].
// need_others replaces need_dw when dW is summed in two parts. dW runs while sums of dX travel.
Tensors matmul_reduce_scatter_backward(const at::Tensor& grad_shard, const at::Tensor& x_whole,
                                       const at::Tensor& weight, c10::string_view group, int64_t dim,
                                       bool need_dx, bool need_dw, bool need_db, c10::string_view tier,
                                       bool need_others, c10::string_view sums, c10::string_view wire) {
  const Operand grad = Operand::of(grad_shard, dim, "grad");
  const Operand x =
      need_dw || need_others ? Operand::of(x_whole, dim, "x") : Operand::form_of(x_whole, dim, "x");
  const c10::DeviceGuard on(x_whole.device());
  const Route route = route_of_backward(x, weight, group, tier, sums, wire);
  const bool in_two_parts = (need_dw || need_others) && sums_in_two_parts(route, weight);
  TORCH_CHECK(in_two_parts || !need_others,
              "matmul_reduce_scatter_backward: need_others asks for rows of dY "
              "that a weight gradient in two parts needs, and this one is one GEMM.");
  const bool read_again = (need_dw || need_db) && !in_two_parts;
  const RowsAre kept = has_sink_that_keeps(weight) ? RowsAre::kKept : RowsAre::kLent;
  GatherMatmul gather(route, Op::kAllGatherMatmul, grad, read_again ? kept : RowsAre::kPassing);
  at::Tensor dw;
  if (in_two_parts && need_dw) {
    dw = weight_gradient(weight, gather.own_rows(), x.rows_of(gather.own()), /*in_pieces=*/true);
  }
  Tensors result;
  std::optional<MatmulSums> parts;
  if (need_dx) {
    result.push_back(at::empty(x.sizes, grad.data.options()));
    const std::vector<GatherMatmul::Gemm> gemms{{result[0].view(x.data.sizes()), weight}};
    if (route.sums == nullptr) {
      gather.multiply(gemms, /*transposed=*/false);
    } else {
      parts.emplace(route.of_sums(), gemms, /*transposed=*/false);
      gather.for_each_chunk(
          [&](const Chunk& chunk, const at::Tensor& rows) { parts->multiply(grad, chunk, rows); });
    }
  }
  if (in_two_parts) {
    const at::Tensor others = gather.other_rows();
    if (need_dw) {
      const at::Tensor others_of_x = x.rows_but(x.data, gather.own()).contiguous();
      write_in_pieces(dw, as_matrix(others), as_matrix(others_of_x), /*accumulate=*/true);
      result.push_back(dw);
    }
    if (need_db) result.push_back(bias_grad({gather.own_rows(), others}));
    if (need_others) result.push_back(others);
  } else {
    if (need_dw) {
      const bool later =
          waits_for_hosts(route.group, sums, x_whole.device()) && has_weight_gradient_sink(weight);
      result.push_back(weight_gradient(weight, gather.rows(), x.data, /*in_pieces=*/later));
    }
    if (need_db) result.push_back(bias_grad({gather.rows()}));
  }
  if (parts) parts->finish();
  gather.finish();
  return result;
}

at::Tensor matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& optional_bias, c10::string_view group,
                             c10::string_view tier, c10::string_view /*sums: backward*/) {
  constexpr const char* kOp = "matmul_all_reduce";
  const at::Tensor bias = optional_bias.value_or(at::Tensor());
  const Operand rows = Operand::of_linear(kOp, x, {}, "x", {weight}, {bias});
  const c10::DeviceGuard on(x.device());
  const Route route = choose_route(
      {.op = kOp, .x = rows, .n = weight.size(0), .k = rows.width, .group = group, .tier = tier});
  MatmulScatter scatter(route, {{rows}, {weight}, /*transposed=*/true, bias}, /*all=*/true);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return scatter.finish().view(sizes);
}

// --- autograd

struct MatmulReduceScatter : Function<MatmulReduceScatter> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, c10::string_view group, int64_t dim,
                          c10::string_view tier, c10::string_view sums, c10::string_view wire) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({saved_input(x, {weight}), weight});
    ctx->saved_data["group"] = std::string(group);
    ctx->saved_data["tier"] = std::string(tier);
    ctx->saved_data["sums"] = std::string(sums);
    ctx->saved_data["wire"] = std::string(wire);
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return Operator<matmul_reduce_scatter>::call(x, weight, bias, group, dim, tier, sums, wire);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivatives("matmul_reduce_scatter");
    const Tensors saved = ctx->get_saved_variables();
    const bool need_dx = ctx->needs_input_grad(0);
    const bool need_dw = ctx->needs_input_grad(1);
    const bool need_db = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    const std::string group = ctx->saved_data["group"].toStringRef();
    const std::string tier = ctx->saved_data["tier"].toStringRef();
    const std::string sums = ctx->saved_data["sums"].toStringRef();
    const std::string wire = ctx->saved_data["wire"].toStringRef();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const bool later = need_dw && comes_later(saved[0], saved[1], group, dim, tier);
    at::Tensor dy = grads[0];
    if (later) {
      // Rounded as the op below would, which then changes nothing.
      dy = Wire::named(wire, dy.scalar_type(), dy.device()).rounded(dy.contiguous());
      add_own_rows(dy, saved[0], saved[1], group, dim);
    }
    const Tensors found = Operator<matmul_reduce_scatter_backward>::call(
        dy, saved[0], saved[1], group, dim, need_dx, need_dw && !later, need_db, tier, later, sums, wire);
    variable_list result(8);
    size_t next = 0;
    if (need_dx) result[0] = found[next++];
    if (need_dw && !later) result[1] = found[next++];
    if (need_db) result[2] = found[next++];
    if (later) add_other_rows(found[next], saved[0], saved[1], group, dim);
    return result;
  }

 private:
  static constexpr const char* kGradient = "matmul_reduce_scatter weight gradient";

  static bool comes_later(const at::Tensor& x, const at::Tensor& weight, const std::string& group,
                          int64_t dim, const std::string& tier) {
    if (!Group::get(group).crosses_hosts(x.device()) || !may_come_later(weight)) return false;
    return sums_in_two_parts(route_of_backward(Operand::of(x, dim, "x"), weight, group, tier), weight);
  }

  static Chunk own_rows(const Operand& x, const std::string& group_name) {
    Group& group = Group::get(group_name);
    return ChunkPlan(x.rows, group.world_size(), group.rank()).own();
  }

  // The two parts of dW.
  static void add_own_rows(const at::Tensor& dy_shard, const at::Tensor& x, const at::Tensor& weight,
                           const std::string& group, int64_t dim) {
    const Operand rows = Operand::of(x, dim, "x");
    multiply_later(weight, kGradient, Operand::of(dy_shard, dim, "grad").data,
                   rows.rows_of(own_rows(rows, group)), /*last=*/false);
  }
  static void add_other_rows(const at::Tensor& dy_others, const at::Tensor& x, const at::Tensor& weight,
                             const std::string& group, int64_t dim) {
    const Operand rows = Operand::of(x, dim, "x");
    multiply_later(weight, kGradient, dy_others, rows.rows_but(rows.data, own_rows(rows, group)));
  }
};

struct MatmulAllReduce : Function<MatmulAllReduce> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, c10::string_view group,
                          c10::string_view tier, c10::string_view sums) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({saved_input(x, {weight}), weight});
    ctx->saved_data["group"] = std::string(group);
    ctx->saved_data["tier"] = std::string(tier);
    ctx->saved_data["sums"] = std::string(sums);
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    return Operator<matmul_all_reduce>::call(x, weight, bias, group, tier, sums);
  }

  // dY is the same on every rank, so the gradients of this rank's columns of x and W need no communication
  // over the group. Over the group of the sums, this is the backward of a linear whose input every rank has.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_second_derivatives("matmul_all_reduce");
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    variable_list result(6);
    const bool need_dx = ctx->needs_input_grad(0), need_dw = ctx->needs_input_grad(1);
    const std::string sums = ctx->saved_data["sums"].toStringRef();
    if (!sums.empty() && (need_dx || need_dw)) {
      const Tensors found = call_replicated_matmul_backward({grads[0]}, x, {weight}, sums, need_dx, need_dw,
                                                            ctx->saved_data["tier"].toStringRef());
      if (need_dx) result[0] = found.front();
      if (need_dw) result[1] = found.back();
    } else if (need_dx) {
      result[0] = at::matmul(grads[0], weight);
    }
    if (need_dw && sums.empty()) {
      const at::Tensor dy = grads[0].reshape_symint({-1, grads[0].sym_size(-1)});
      const at::Tensor rows = x.reshape_symint({-1, x.sym_size(-1)});
      if (has_weight_gradient_sink(weight)) {
        const bool later = Group::get(ctx->saved_data["group"].toStringRef()).crosses_hosts(dy.device());
        weight_gradient(weight, dy.unsqueeze(0), rows.unsqueeze(0), /*in_pieces=*/later);
      } else {
        result[1] = at::mm(dy.t(), rows);
      }
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) result[2] = sum_over_rows(grads[0]);
    return result;
  }
};

}  // namespace

at::Tensor call_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight, c10::string_view group,
                                      int64_t dim) {
  return Operator<matmul_reduce_scatter>::call(x, weight, std::nullopt, group, dim, "auto", "", "same");
}

void register_row_linears(torch::Library& m) {
  Operator<matmul_reduce_scatter>::define_differentiable<MatmulReduceScatter>(
      m,
      "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int dim, str tier, str "
      "sums=\"\", str wire=\"same\") -> Tensor");
  Operator<matmul_reduce_scatter_backward>::define(
      m,
      "matmul_reduce_scatter_backward(Tensor grad_shard, Tensor x, Tensor weight, str group, int dim, "
      "bool need_dx, bool need_dw, bool need_db, str tier, bool need_others=False, str sums=\"\", "
      "str wire=\"same\") -> Tensor[]");
  Operator<matmul_all_reduce>::define_differentiable<MatmulAllReduce>(
      m,
      "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group, str tier, str sums=\"\") -> "
      "Tensor");
}

}  // namespace pyruntime
