// Registers and calls operators.
//
// An operator's kernel is a function of the dispatcher's argument types. Its name, its schema and the calls
// from autograd all come from it. Autograd calls only registered operators, never the kernels, so that
// torch.compile can trace both directions. It is in C++ because torch.library.register_autograd costs 20 us
// more per forward (bench/results/tiers.md).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace pyruntime {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Runs an op that returns nothing, and refuses arguments that require a gradient: such an op has no outputs
// on which autograd could report the error later.
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

// `kernel` runs on all devices, except that `cpu` runs on the CPU.
template <auto kernel, auto cpu = kernel>
struct Operator;

template <typename Result, typename... Arguments, Result (*kernel)(Arguments...), Result (*cpu)(Arguments...)>
struct Operator<kernel, cpu> {
  static constexpr auto kEverywhere = c10::DispatchKey::CompositeExplicitAutograd;

  static void define(torch::Library& library, const std::string& schema,
                     c10::DispatchKey devices = kEverywhere) {
    name() = schema.substr(0, schema.find('('));
    library.def(schema.c_str());
    library.impl(name().c_str(), torch::dispatch(devices, TORCH_FN(kernel)));
    if constexpr (!std::is_same_v<Operator<kernel>, Operator<kernel, cpu>>) {
      library.impl(name().c_str(), torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(cpu)));
    }
  }

  // `Function` is torch's autograd function; its forward() takes the kernel's arguments.
  template <typename Function>
  static void define_differentiable(torch::Library& library, const std::string& schema,
                                    c10::DispatchKey devices = kEverywhere) {
    define_differentiable<apply<Function>>(library, schema, devices);
  }
  template <Result (*autograd)(Arguments...)>
  static void define_differentiable(torch::Library& library, const std::string& schema,
                                    c10::DispatchKey devices = kEverywhere) {
    define(library, schema, devices);
    library.impl(name().c_str(), torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(autograd)));
  }

  // Differentiating through the op is an error that names it, instead of a silently missing gradient.
  static void define_without_gradient(torch::Library& library, const std::string& schema,
                                      c10::DispatchKey devices = kEverywhere) {
    define(library, schema, devices);
    library.impl(name().c_str(),
                 torch::dispatch(c10::DispatchKey::Autograd,
                                 std::is_void_v<Result>
                                     ? torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>()
                                     : torch::autograd::autogradNotImplementedFallback()));
  }

  // Calls the operator through the dispatcher.
  static Result call(Arguments... arguments) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("pyruntime::" + name()).c_str(), "")
                               .template typed<Result(Arguments...)>();
    return op.call(std::forward<Arguments>(arguments)...);
  }

 private:
  template <typename Function>
  static Result apply(Arguments... arguments) {
    auto results = Function::apply(std::forward<Arguments>(arguments)...);
    if constexpr (std::is_same_v<decltype(results), Result>) {
      return results;
    } else {
      const auto unpack = [&]<size_t... i>(std::index_sequence<i...>) { return Result{results[i]...}; };
      return unpack(std::make_index_sequence<std::tuple_size_v<Result>>());
    }
  }

  // Not a static member: libraries may be registered before static members of templates exist.
  static std::string& name() {
    static std::string instance;
    return instance;
  }
};

}  // namespace pyruntime
