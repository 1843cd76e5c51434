// Updates all tensors that step together by one launch of the device kernels
// (csrc/cuda/portable/layers/adamw.cu).
//
// pyruntime::adamw_ and adamw_ahead_ use them on devices if the kernels are built, else ATen's operations.
// pyruntime::device_adamw_ uses them always, also on the CPU if the kernels' host dialect is loaded.
#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>
#include <vector>

#include "cpu/layers/adamw.h"
#include "ops/device/device_call.h"
#include "ops/operators.h"
#include "transport/device/library.h"

namespace pyruntime {

namespace {

using layers::AdamwAhead;
using layers::AdamwLists;
using layers::AdamwOptions;

// Whether the parameter has a form that the kernels take: fp32, rounded from an fp32 master, or bf16 that is
// rounded at random.
bool is_taken(const AdamwOptions& options, const AdamwLists& lists, size_t i) {
  const at::ScalarType dtype = lists.params[i].scalar_type();
  return dtype == at::kFloat || (dtype != at::kDouble && lists.master_of(i).defined()) ||
         (dtype == at::kBFloat16 && options.rounds_at_random());
}

// The library of kernels for these tensors; nullptr if there is none, or it cannot take one of them.
const DeviceLibrary* library_for(const AdamwOptions& options, const AdamwLists& lists) {
  if (lists.params.empty()) return nullptr;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    if (!is_taken(options, lists, i)) return nullptr;
  }
  std::string why_not;
  return DeviceLibrary::find(lists.params[0].device().type(), why_not);
}

void check_here(const char* op, const AdamwLists& lists, at::TensorList others = {}) {
  const at::Device device = lists.params[0].device();
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(!tensor.defined() || tensor.device() == device, op, ": params[0] is on ", device,
                      " and another tensor on ", tensor.device(), "; all must be on one device.");
  };
  for (size_t i = 0; i < lists.params.size(); ++i) {
    for (const at::Tensor& tensor :
         {lists.params[i], lists.grads[i], lists.exp_avg[i], lists.exp_avg_sq[i], lists.master_of(i)}) {
      check(tensor);
    }
  }
  for (const at::Tensor& tensor : others) check(tensor);
}

// The key of one launch: the dtypes of parameters that have a master, and of gradients; and whether new
// values are rounded at random.
using Kind = std::tuple<int32_t, int32_t, bool>;

template <class Request>
struct Batch {
  std::vector<Request> tensors;
  std::vector<at::Tensor> grads;  // contiguous; alive until the launch

  const void* contiguous(const at::Tensor& grad) {
    grads.push_back(grad.contiguous());
    return grads.back().const_data_ptr();
  }
  int32_t size() const { return static_cast<int32_t>(tensors.size()); }
};

bool is_rounded_at_random(const AdamwOptions& o, const AdamwLists& lists, size_t i) {
  return o.rounds_at_random() && lists.params[i].scalar_type() == at::kBFloat16;
}

// Tensor i as the kernels take it.
PyruntimeAdamwTensor request_of(const AdamwOptions& o, const AdamwLists& lists, size_t i, const void* grad) {
  const at::Tensor &param = lists.params[i], master = lists.master_of(i);
  const bool at_random = is_rounded_at_random(o, lists, i);
  const bool is_own_master = !master.defined() && !at_random;
  return {is_own_master ? nullptr : param.mutable_data_ptr(),
          at_random ? nullptr : static_cast<float*>((is_own_master ? param : master).mutable_data_ptr()),
          grad,
          lists.exp_avg[i].mutable_data_ptr<float>(),
          lists.exp_avg_sq[i].mutable_data_ptr<float>(),
          param.numel(),
          lists.weight_decay[i],
          static_cast<uint32_t>(at_random ? o.seeds[i] : 0),
          static_cast<uint32_t>(at_random ? o.firsts[i] : 0)};
}

PyruntimeAdamwOptions options_of(const AdamwOptions& o) {
  return {o.lr, o.beta1, o.beta2, o.eps, o.step};
}

void launch(const DeviceLibrary& library, const AdamwOptions& o, const AdamwLists& lists,
            const std::optional<at::Tensor>& settings) {
  const at::Device device = lists.params[0].device();
  const DeviceCall call(device);
  const PyruntimeAdamwOptions options = options_of(o);
  const at::Tensor scale = lists.grad_scale ? lists.grad_scale->to(device, at::kFloat) : at::Tensor();
  std::map<Kind, Batch<PyruntimeAdamwTensor>> batches;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::ScalarType param = lists.params[i].scalar_type();  // fp32 has no kernel of its own
    const int32_t dtype = param == at::kFloat ? PYRUNTIME_BF16 : dtype_code(param);
    auto& batch =
        batches[{dtype, dtype_code(lists.grads[i].scalar_type()), is_rounded_at_random(o, lists, i)}];
    batch.tensors.push_back(request_of(o, lists, i, batch.contiguous(lists.grads[i])));
  }
  for (const auto& [kind, batch] : batches) {
    const auto [param_dtype, grad_dtype, at_random] = kind;
    library.check(library.adamw(
        batch.tensors.data(), batch.size(), param_dtype, grad_dtype, &options,
        settings ? static_cast<const PyruntimeAdamwOptions*>(settings->const_data_ptr()) : nullptr,
        scale.defined() ? scale.const_data_ptr<float>() : nullptr, call.stream));
  }
}

void launch_ahead(const DeviceLibrary& library, const AdamwOptions& o, const AdamwLists& lists,
                  const AdamwAhead& of) {
  const DeviceCall call(lists.params[0].device());
  const bool has_earlier = !of.earlier_grads.empty();
  const PyruntimeAdamwOptions options = options_of(o), earlier = options_of(of.earlier(o));
  std::map<Kind, Batch<PyruntimeAdamwAhead>> batches;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    auto& batch = batches[{dtype_code(lists.params[i].scalar_type()),
                           dtype_code(lists.grads[i].scalar_type()), is_rounded_at_random(o, lists, i)}];
    batch.tensors.push_back({request_of(o, lists, i, batch.contiguous(lists.grads[i])),
                             of.tensors[i].mutable_data_ptr(),
                             has_earlier ? batch.contiguous(of.earlier_grads[i]) : nullptr});
  }
  for (const auto& [kind, batch] : batches) {
    const auto [param_dtype, grad_dtype, at_random] = kind;
    library.check(library.adamw_ahead(batch.tensors.data(), batch.size(), param_dtype, grad_dtype, &options,
                                      has_earlier ? &earlier : nullptr, static_cast<float>(of.grad_scale),
                                      call.stream));
  }
}

void check_settings(const AdamwOptions& options, const at::Tensor& settings, const at::Device& device) {
  TORCH_CHECK_VALUE(settings.device() == device && settings.scalar_type() == at::kLong &&
                        settings.numel() * sizeof(int64_t) == sizeof(PyruntimeAdamwOptions) &&
                        settings.is_contiguous(),
                    "device_adamw_: settings must be int64 [5] on ", device, ".");
  TORCH_CHECK_VALUE(
      !options.rounds_at_random(),
      "device_adamw_: settings came with seeds of random rounding, which a captured graph would "
      "repeat in each step; leave out the settings, or keep masters.");
}

void device_adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avg,
                  at::TensorList exp_avg_sq, at::TensorList masters,
                  const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& settings,
                  double lr, double beta1, double beta2, double eps, at::ArrayRef<double> weight_decay,
                  int64_t step, at::IntArrayRef seeds, at::IntArrayRef firsts) {
  if (params.empty()) return;
  const AdamwOptions options{lr, beta1, beta2, eps, step, seeds, firsts};
  const AdamwLists lists{params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale};
  layers::check_adamw(options, lists);
  check_here("device_adamw_", lists);
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_TYPE(is_taken(options, lists, i), "device_adamw_: params[", i, "] has dtype ",
                     params[i].scalar_type(),
                     "; it must be float32, lower with a float32 master, or bfloat16 rounded at random.");
  }
  if (settings) check_settings(options, *settings, params[0].device());
  std::string why_not;
  const DeviceLibrary* library = DeviceLibrary::find(params[0].device().type(), why_not);
  TORCH_CHECK_NOT_IMPLEMENTED(library != nullptr, "device_adamw_: ", why_not, ".");
  launch(*library, options, lists, settings);
}

void adamw_on_device(const AdamwOptions& options, const AdamwLists& lists) {
  layers::check_adamw(options, lists);
  const DeviceLibrary* library = library_for(options, lists);
  if (library == nullptr) return layers::adamw_composite(options, lists);
  check_here("adamw_", lists);
  launch(*library, options, lists, std::nullopt);
}

void adamw_ahead_on_device(const AdamwOptions& options, const AdamwLists& lists, const AdamwAhead& of) {
  layers::check_adamw_ahead(options, lists, of);
  const DeviceLibrary* library = library_for(options, lists);
  if (library == nullptr) return layers::adamw_ahead_composite(options, lists, of);
  check_here("adamw_ahead_", lists, of.tensors);
  check_here("adamw_ahead_", lists, of.earlier_grads);
  launch_ahead(*library, options, lists, of);
}

}  // namespace

void register_device_adamw(torch::Library& m) {
  m.def(
      "device_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] masters, Tensor? grad_scale, Tensor? settings, *, float lr, float beta1, float beta2, "
      "float eps, float[] weight_decay, int step, int[] seeds=[], int[] firsts=[]) -> ()");
  m.impl("device_adamw_",
         torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(device_adamw)));
  for (const c10::DispatchKey key : kDeviceKeys) {
    m.impl("adamw_", torch::dispatch(key, TORCH_FN(layers::adamw_op<adamw_on_device>)));
    m.impl("adamw_ahead_", torch::dispatch(key, TORCH_FN(layers::adamw_ahead_op<adamw_ahead_on_device>)));
  }
}

}  // namespace pyruntime
