// Registers the collectives, and replicate_grad, whose backward is one.
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>

#include "ops/autograd.h"
#include "ops/primitives.h"
#include "ops/register.h"

namespace pyruntime {

// --- the operators that autograd calls

at::Tensor call_reduce_scatter(const at::Tensor& x, const std::string& group, int64_t dim) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, c10::string_view, int64_t)>("pyruntime::reduce_scatter");
  return op.call(x, group, dim);
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor call_all_gather(const at::Tensor& x, const std::string& group, int64_t dim,
                           const c10::SymInt& rows) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, c10::string_view, int64_t, c10::SymInt)>(
          "pyruntime::all_gather");
  return op.call(x, group, dim, rows);
}

at::Tensor call_all_reduce(const at::Tensor& x, const std::string& group) {
  static const auto op =
      operator_named<at::Tensor(const at::Tensor&, c10::string_view)>("pyruntime::all_reduce");
  return op.call(x, group);
}

// --- autograd

class AllGather : public Function<AllGather> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const std::string& group, int64_t dim,
                          const c10::SymInt& rows) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["group"] = group;
    ctx->saved_data["dim"] = dim;
    return call_all_gather(x, group, dim, rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {
        call_reduce_scatter(grads[0], ctx->saved_data["group"].toStringRef(), ctx->saved_data["dim"].toInt()),
        {},
        {},
        {}};
  }
};

at::Tensor all_gather_autograd(const at::Tensor& x, c10::string_view group, int64_t dim, c10::SymInt rows) {
  return AllGather::apply(x, std::string(group), dim, std::move(rows));
}

class ReduceScatter : public Function<ReduceScatter> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const std::string& group, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["group"] = group;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["rows"] = x.sym_size(dim);
    return call_reduce_scatter(x, group, dim);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {call_all_gather(grads[0], ctx->saved_data["group"].toStringRef(), ctx->saved_data["dim"].toInt(),
                            ctx->saved_data["rows"].toSymInt()),
            {},
            {}};
  }
};

at::Tensor reduce_scatter_autograd(const at::Tensor& x, c10::string_view group, int64_t dim) {
  return ReduceScatter::apply(x, std::string(group), dim);
}

class AllReduce : public Function<AllReduce> {
 public:
  static Variable forward(AutogradContext* /*ctx*/, const at::Tensor& x, const std::string& group) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_all_reduce(x, group);
  }
  // The sum is used alike by every rank, and so its gradient is already the same on all of them.
  static variable_list backward(AutogradContext* /*ctx*/, variable_list grads) { return {grads[0], {}}; }
};

at::Tensor all_reduce_autograd(const at::Tensor& x, c10::string_view group) {
  return AllReduce::apply(x, std::string(group));
}

class ReplicateGrad : public Function<ReplicateGrad> {
 public:
  static Variable forward(AutogradContext* ctx, const at::Tensor& w, const std::string& group) {
    ctx->saved_data["group"] = group;
    at::AutoDispatchBelowADInplaceOrView guard;
    return w.view_as(w);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {call_all_reduce(grads[0], ctx->saved_data["group"].toStringRef()), {}};
  }
};

at::Tensor replicate_grad(const at::Tensor& w, c10::string_view group) {
  return ReplicateGrad::apply(w, std::string(group));
}

// --- kernels: the C++ functions with the dispatcher's argument types

at::Tensor all_gather_kernel(const at::Tensor& x, c10::string_view group, int64_t dim, c10::SymInt rows) {
  return all_gather(x, std::string(group), dim, rows.expect_int());
}

at::Tensor reduce_scatter_kernel(const at::Tensor& x, c10::string_view group, int64_t dim) {
  return reduce_scatter(x, std::string(group), dim);
}

at::Tensor all_reduce_kernel(const at::Tensor& x, c10::string_view group) {
  return all_reduce(x, std::string(group));
}

at::Tensor all_gather_stats_kernel(const at::Tensor& x, c10::string_view group) {
  return all_gather_stats(x, std::string(group));
}

}  // namespace

void register_collectives(torch::Library& m) {
  m.def("all_gather(Tensor x_shard, str group, int dim, SymInt rows) -> Tensor");
  m.impl("all_gather", torch::dispatch(kKernel, TORCH_FN(all_gather_kernel)));
  m.impl("all_gather", torch::dispatch(kAutograd, TORCH_FN(all_gather_autograd)));
  m.def("reduce_scatter(Tensor x, str group, int dim) -> Tensor");
  m.impl("reduce_scatter", torch::dispatch(kKernel, TORCH_FN(reduce_scatter_kernel)));
  m.impl("reduce_scatter", torch::dispatch(kAutograd, TORCH_FN(reduce_scatter_autograd)));
  m.def("all_reduce(Tensor x, str group) -> Tensor");
  m.impl("all_reduce", torch::dispatch(kKernel, TORCH_FN(all_reduce_kernel)));
  m.impl("all_reduce", torch::dispatch(kAutograd, TORCH_FN(all_reduce_autograd)));
  m.def("all_gather_stats(Tensor x, str group) -> Tensor");
  m.impl("all_gather_stats", torch::dispatch(kKernel, TORCH_FN(all_gather_stats_kernel)));

  // Its output is its input, so it is no functional operator of its own: always decomposed into autograd's
  // view and all_reduce.
  m.def("replicate_grad(Tensor(a) w, str group) -> Tensor(a)");
  m.impl("replicate_grad",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(replicate_grad)));
}

}  // namespace pyruntime
