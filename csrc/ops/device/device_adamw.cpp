// One launch of the device kernels for all tensors that step together (csrc/cuda/portable/adamw.cu).
//
// pyruntime::adamw_ takes it on CUDA where the kernels are built, and ATen's operations where they are not.
// pyruntime::device_adamw_ takes it always, also on the CPU where the host dialect of the kernels is loaded.
#include <ATen/core/Tensor.h>

#include <map>
#include <utility>
#include <vector>

#include "cpu/layers/adamw.h"
#include "ops/device/device_call.h"
#include "ops/operators.h"
#include "transport/device/library.h"

namespace pyruntime {

namespace {

using layers::AdamwLists;
using layers::AdamwOptions;

// Whether a parameter is kept as the kernel wants it: in fp32, or rounded from a master.
bool has_fp32(const AdamwLists& lists, size_t i) {
  const at::ScalarType dtype = lists.params[i].scalar_type();
  return dtype == at::kFloat || (dtype != at::kDouble && lists.master_of(i).defined());
}

bool takes(const AdamwLists& lists) {
  for (size_t i = 0; i < lists.params.size(); ++i) {
    if (!has_fp32(lists, i)) return false;
  }
  return true;
}

void check_here(const AdamwLists& lists, const std::optional<at::Tensor>& settings) {
  const at::Device device = lists.params[0].device();
  for (size_t i = 0; i < lists.params.size(); ++i) {
    for (const at::Tensor& tensor :
         {lists.params[i], lists.grads[i], lists.exp_avg[i], lists.exp_avg_sq[i], lists.master_of(i)}) {
      TORCH_CHECK_VALUE(!tensor.defined() || tensor.device() == device, "device_adamw_: params[0] is on ",
                        device, " and another tensor on ", tensor.device(), "; all must be on one device.");
    }
    TORCH_CHECK_TYPE(has_fp32(lists, i), "device_adamw_: params[", i, "] has dtype ",
                     lists.params[i].scalar_type(), "; it must be float32, or lower with a float32 master.");
  }
  TORCH_CHECK_VALUE(!settings || (settings->device() == device && settings->scalar_type() == at::kLong &&
                                  settings->numel() * sizeof(int64_t) == sizeof(PyruntimeAdamwOptions) &&
                                  settings->is_contiguous()),
                    "device_adamw_: settings must be int64 [5] on ", device, ".");
}

// What one launch is for: the dtypes of parameters that have a master, and of gradients.
using Kind = std::pair<int32_t, int32_t>;

struct Batch {
  std::vector<PyruntimeAdamwTensor> tensors;
  std::vector<at::Tensor> grads;  // contiguous; alive until the launch
};

std::map<Kind, Batch> batches_of(const AdamwLists& lists) {
  std::map<Kind, Batch> batches;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::Tensor &param = lists.params[i], master = lists.master_of(i);
    const at::Tensor grad = lists.grads[i].contiguous();
    const int32_t dtype = master.defined() ? dtype_code(param.scalar_type()) : PYRUNTIME_BF16;
    Batch& batch = batches[{dtype, dtype_code(grad.scalar_type())}];
    batch.grads.push_back(grad);
    batch.tensors.push_back({master.defined() ? param.mutable_data_ptr() : nullptr,
                             static_cast<float*>((master.defined() ? master : param).mutable_data_ptr()),
                             grad.const_data_ptr(), lists.exp_avg[i].mutable_data_ptr<float>(),
                             lists.exp_avg_sq[i].mutable_data_ptr<float>(), param.numel(),
                             lists.weight_decay[i]});
  }
  return batches;
}

void launch(const DeviceLibrary& library, const AdamwOptions& o, const AdamwLists& lists,
            const std::optional<at::Tensor>& settings) {
  const at::Device device = lists.params[0].device();
  const DeviceCall call(device);
  const PyruntimeAdamwOptions options{o.lr, o.beta1, o.beta2, o.eps, o.step};
  const at::Tensor scale = lists.grad_scale ? lists.grad_scale->to(device, at::kFloat) : at::Tensor();
  for (const auto& [kind, batch] : batches_of(lists)) {
    library.check(library.adamw(
        batch.tensors.data(), static_cast<int32_t>(batch.tensors.size()), kind.first, kind.second, &options,
        settings ? static_cast<const PyruntimeAdamwOptions*>(settings->const_data_ptr()) : nullptr,
        scale.defined() ? scale.const_data_ptr<float>() : nullptr, call.stream));
  }
}

void device_adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avg,
                  at::TensorList exp_avg_sq, at::TensorList masters,
                  const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& settings,
                  double lr, double beta1, double beta2, double eps, at::ArrayRef<double> weight_decay,
                  int64_t step) {
  if (params.empty()) return;
  const AdamwOptions options{lr, beta1, beta2, eps, step, {}, {}};
  const AdamwLists lists{params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale};
  layers::check_adamw(options, lists);
  check_here(lists, settings);
  std::string why_not;
  const DeviceLibrary* library = DeviceLibrary::find(params[0].device().type(), why_not);
  TORCH_CHECK_NOT_IMPLEMENTED(library != nullptr, "device_adamw_: ", why_not, ".");
  launch(*library, options, lists, settings);
}

void adamw_on_cuda(const AdamwOptions& options, const AdamwLists& lists) {
  std::string why_not;
  const DeviceLibrary* library = DeviceLibrary::find(c10::DeviceType::CUDA, why_not);
  if (library == nullptr || options.rounds_at_random()) return layers::adamw_composite(options, lists);
  layers::check_adamw(options, lists);
  if (!takes(lists)) return layers::adamw_composite(options, lists);
  check_here(lists, std::nullopt);
  launch(*library, options, lists, std::nullopt);
}

}  // namespace

void register_device_adamw(torch::Library& m) {
  m.def(
      "device_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] masters, Tensor? grad_scale, Tensor? settings, *, float lr, float beta1, float beta2, "
      "float eps, float[] weight_decay, int step) -> ()");
  m.impl("device_adamw_",
         torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(device_adamw)));
  m.impl("adamw_", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(layers::adamw_op<adamw_on_cuda>)));
}

}  // namespace pyruntime
