#pragma once

// What the layer ops share: dispatch keys, handles to ops by name, argument checks, and dtype dispatch.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string_view>

// Calls the lambda given last with `scalar_t` as the C++ type of `dtype`.
#define PYRUNTIME_DISPATCH_FLOAT(dtype, name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, name, __VA_ARGS__)

namespace pyruntime::layers {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A fixed amount of work for one task of at::parallel_for, in elements. Fixed, so that no result depends on
// the thread count; large enough that waking a thread is worth it.
constexpr int64_t kElementsPerTask = 1 << 14;

inline int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
}

// The op `pyruntime::name`, to be called through the dispatcher.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The dtype of statistics kept next to tensors of `dtype`.
inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_floating(const Tensor& tensor, std::string_view op, std::string_view name) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble, op, ": ",
      name, " has dtype ", dtype, "; it must be float32, bfloat16, float16 or float64.");
}

inline void check_same_dtype(const Tensor& a, std::string_view name_a, const Tensor& b,
                             std::string_view name_b, std::string_view op) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), op, ": ", name_a, " has dtype ", a.scalar_type(),
                   " and ", name_b, " has ", b.scalar_type(), "; convert one so that they agree.");
}

// Registers a CPU kernel and the composite that every other device runs.
template <typename Cpu, typename Composite>
void implement(torch::Library& m, const char* name, Cpu&& cpu, Composite&& composite) {
  m.impl(name, torch::dispatch(c10::DispatchKey::CPU, std::forward<Cpu>(cpu)));
  m.impl(name,
         torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, std::forward<Composite>(composite)));
}

template <typename Autograd>
void implement_autograd(torch::Library& m, const char* name, Autograd&& autograd) {
  m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, std::forward<Autograd>(autograd)));
}

// Makes differentiating through `name` an error that names it, instead of a silently missing gradient.
inline void refuse_autograd(torch::Library& m, const char* name) {
  implement_autograd(m, name, torch::autograd::autogradNotImplementedFallback());
}

// Runs an op that returns nothing, unless it would have to be differentiated.
inline void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    TORCH_CHECK(!at::GradMode::is_enabled() || !values[i].isTensor() || !values[i].toTensor().requires_grad(),
                op.schema().name(), ": ", arguments[i].name(),
                " requires a gradient, which does not flow through this op; call it under torch.no_grad() or "
                "in a torch.autograd.Function.");
  }
  at::AutoDispatchBelowAutograd below_autograd;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// The same for an op that returns nothing, on whose outputs autograd could not report the error later.
inline void refuse_autograd_in_place(torch::Library& m, const char* name) {
  implement_autograd(m, name, torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>());
}

// Tells autograd that an op wrote to `tensor`, so that a backward that had saved it is refused.
inline void mark_written(const Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace pyruntime::layers
