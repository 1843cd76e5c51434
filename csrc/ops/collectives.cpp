// Collectives without a GEMM, over the same transport; and replicate_grad, whose backward is one.
#include <c10/core/DeviceGuard.h>

#include <string>
#include <utility>

#include "ops/gather_matmul.h"
#include "ops/matmul_scatter.h"
#include "ops/operators.h"

namespace pyruntime {

namespace {

// --- kernels

void check_summable(const char* op, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.is_floating_point() && x.element_size() >= 2, op, " was given dtype ", x.scalar_type(),
                   "; use float32, bfloat16, float16 or float64.");
}

// The route of rows that are moved whole and not multiplied: on devices all of them at once.
Route whole(Group& group, int64_t rows) {
  Route route{group, rows, {Tier::kUnfused}};
  route.together = true;
  return route;
}

at::Tensor gather_rows(Group& group, const Operand& x_shard, int64_t rows) {
  return GatherMatmul(whole(group, rows), Op::kAllGather, x_shard, RowsAre::kKept).rows();
}

// The sums of this rank's rows or, with `all`, of all rows.
at::Tensor sums_over_ranks(Group& group, const Operand& parts, bool all) {
  return MatmulScatter(whole(group, parts.rows), {{parts}, {}, /*transposed=*/false}, all).finish();
}

at::Tensor all_gather(const at::Tensor& x_shard, c10::string_view group_name, int64_t dim,
                      c10::SymInt all_rows) {
  const Operand x = Operand::of(x_shard, dim, "x_shard");
  Group& group = Group::get(std::string(group_name));
  if (group.world_size() == 1) return x_shard.clone();
  const c10::DeviceGuard on(x_shard.device());
  const int64_t rows = agreed_rows("all_gather", group, x, all_rows.expect_int());
  return gather_rows(group, x, rows).view(x.sizes_with(rows, x.width));
}

at::Tensor reduce_scatter(const at::Tensor& x, c10::string_view group_name, int64_t dim) {
  check_summable("reduce_scatter", x);
  const Operand parts = Operand::of(x, dim, "x");
  Group& group = Group::get(std::string(group_name));
  if (group.world_size() == 1) return x.clone();
  const c10::DeviceGuard on(x.device());
  const int64_t own_rows = rows_of_rank(parts.rows, group.world_size(), group.rank());
  return sums_over_ranks(group, parts, /*all=*/false).view(parts.sizes_with(own_rows, parts.width));
}

at::Tensor all_reduce(const at::Tensor& x, c10::string_view group_name) {
  check_summable("all_reduce", x);
  Group& group = Group::get(std::string(group_name));
  if (group.world_size() == 1) return x.clone();
  const c10::DeviceGuard on(x.device());
  // Any shape works as one column, cut wherever the ranks' shares fall.
  return sums_over_ranks(group, Operand::of(x.reshape({-1, 1}), 0, "x"), /*all=*/true).view(x.sizes());
}

at::Tensor all_gather_stats(const at::Tensor& x, c10::string_view group_name) {
  Group& group = Group::get(std::string(group_name));
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), group.world_size());
  if (group.world_size() == 1) return x.clone().view(sizes);
  const c10::DeviceGuard on(x.device());
  return gather_rows(group, Operand::of(x.reshape({1, -1}), 0, "x"), group.world_size()).view(sizes);
}

// --- autograd

struct AllGather : Function<AllGather> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, c10::string_view group, int64_t dim,
                          const c10::SymInt& rows) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["group"] = std::string(group);
    ctx->saved_data["dim"] = dim;
    return Operator<all_gather>::call(x, group, dim, rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor dx =
        call_reduce_scatter(grads[0], ctx->saved_data["group"].toStringRef(), ctx->saved_data["dim"].toInt());
    return {dx, {}, {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, c10::string_view group, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["group"] = std::string(group);
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["rows"] = x.sym_size(dim);
    return call_reduce_scatter(x, group, dim);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor dx =
        Operator<all_gather>::call(grads[0], ctx->saved_data["group"].toStringRef(),
                                   ctx->saved_data["dim"].toInt(), ctx->saved_data["rows"].toSymInt());
    return {dx, {}, {}};
  }
};

struct AllReduce : Function<AllReduce> {
  static Variable forward(AutogradContext* /*ctx*/, const at::Tensor& x, c10::string_view group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return Operator<all_reduce>::call(x, group);
  }
  // Every rank uses the sum alike, so its gradient is already the same on all of them.
  static variable_list backward(AutogradContext* /*ctx*/, variable_list grads) { return {grads[0], {}}; }
};

struct ReplicateGrad : Function<ReplicateGrad> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& w, c10::string_view group) {
    ctx->saved_data["group"] = std::string(group);
    at::AutoDispatchBelowADInplaceOrView guard;
    return w.view_as(w);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {Operator<all_reduce>::call(grads[0], ctx->saved_data["group"].toStringRef()), {}};
  }
};

at::Tensor replicate_grad(const at::Tensor& w, c10::string_view group) {
  return ReplicateGrad::apply(w, group);
}

}  // namespace

at::Tensor call_all_gather(const at::Tensor& x_shard, c10::string_view group, int64_t dim, c10::SymInt rows) {
  return Operator<all_gather>::call(x_shard, group, dim, std::move(rows));
}

at::Tensor call_reduce_scatter(const at::Tensor& x, c10::string_view group, int64_t dim) {
  return Operator<reduce_scatter>::call(x, group, dim);
}

at::Tensor call_all_reduce(const at::Tensor& x, c10::string_view group) {
  return Operator<all_reduce>::call(x, group);
}

void register_collectives(torch::Library& m) {
  Operator<all_gather>::define_differentiable<AllGather>(
      m, "all_gather(Tensor x_shard, str group, int dim, SymInt rows) -> Tensor");
  Operator<reduce_scatter>::define_differentiable<ReduceScatter>(
      m, "reduce_scatter(Tensor x, str group, int dim) -> Tensor");
  Operator<all_reduce>::define_differentiable<AllReduce>(m, "all_reduce(Tensor x, str group) -> Tensor");
  Operator<all_gather_stats>::define(m, "all_gather_stats(Tensor x, str group) -> Tensor");

  // Its output is its input, so it is no functional operator of its own: it is always decomposed into
  // autograd's view and all_reduce.
  m.def("replicate_grad(Tensor(a) w, str group) -> Tensor(a)");
  m.impl("replicate_grad",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(replicate_grad)));
}

}  // namespace pyruntime
