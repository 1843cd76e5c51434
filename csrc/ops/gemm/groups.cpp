#include "ops/gemm/groups.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "transport/device/library.h"

namespace pyruntime {

namespace {

struct Known {
  std::mutex mutex;
  std::map<c10::DeviceType, bool> by_type;
};

Known& known() {
  static auto* instance = new Known();
  return *instance;
}

}  // namespace

bool has_grouped_gemm(c10::DeviceType type) {
  {
    const std::lock_guard<std::mutex> lock(known().mutex);
    if (const auto found = known().by_type.find(type); found != known().by_type.end()) return found->second;
  }
  std::string why_not;
  const DeviceLibrary* library = DeviceLibrary::find(type, why_not);
  return library != nullptr && library->sm90_is_on_device != nullptr && library->sm90_is_on_device() == 0;
}

bool multiplies_groups(const at::Tensor& matrices) {
  const auto is_aligned = [](uintptr_t bytes) { return bytes % 16 == 0; };
  const auto row = [&](int64_t dim) { return static_cast<uintptr_t>(matrices.size(dim) * 2); };
  return matrices.scalar_type() == at::kBFloat16 && matrices.is_contiguous() && is_aligned(row(1)) &&
         is_aligned(row(2)) && is_aligned(reinterpret_cast<uintptr_t>(matrices.const_data_ptr())) &&
         has_grouped_gemm(matrices.device().type());
}

void set_multiplies_groups(c10::DeviceType type, std::optional<bool> multiplies) {
  const std::lock_guard<std::mutex> lock(known().mutex);
  if (multiplies) {
    known().by_type[type] = *multiplies;
  } else {
    known().by_type.erase(type);
  }
}

at::Tensor ends_on(c10::Device device, const Ends& ends) {
  const auto of_host = at::TensorOptions().dtype(at::kInt).pinned_memory(true);
  const at::Tensor here = at::empty({static_cast<int64_t>(ends.size())}, of_host);
  std::copy(ends.begin(), ends.end(), here.mutable_data_ptr<int32_t>());
  return here.to(device, /*non_blocking=*/true);
}

at::Tensor multiply_groups(const at::Tensor& rows, const at::Tensor& matrices, bool transposed,
                           const at::Tensor& ends) {
  return at::_grouped_mm(rows, transposed ? matrices.transpose(1, 2) : matrices, ends);
}

at::Tensor gradients_of_groups(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& ends) {
  if (x.size(0) == 0) return at::zeros({ends.size(0), dy.size(1), x.size(1)}, x.options());
  return at::_grouped_mm(dy.t(), x, ends);
}

}  // namespace pyruntime
