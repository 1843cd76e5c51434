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

namespace {

at::Tensor on_device(const Ends& ends, c10::Device device) {
  const auto of_host = at::TensorOptions().dtype(at::kInt).pinned_memory(!device.is_cpu());
  const at::Tensor here = at::empty({static_cast<int64_t>(ends.size())}, of_host);
  std::copy(ends.begin(), ends.end(), here.mutable_data_ptr<int32_t>());
  return here.to(device, /*non_blocking=*/true);
}

}  // namespace

bool multiplies_groups(const at::Tensor& matrices) {
  const auto begin_aligned = [&](int64_t width) { return width % (16 / matrices.element_size()) == 0; };
  return matrices.scalar_type() == at::kBFloat16 && matrices.is_contiguous() &&
         begin_aligned(matrices.size(1)) && begin_aligned(matrices.size(2)) &&
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

at::Tensor multiply_groups(const at::Tensor& rows, const at::Tensor& matrices, bool transposed,
                           const Ends& ends) {
  return at::_grouped_mm(rows, transposed ? matrices.transpose(1, 2) : matrices,
                         on_device(ends, rows.device()));
}

at::Tensor gradients_of_groups(const at::Tensor& dy, const at::Tensor& x, const Ends& ends) {
  if (x.size(0) == 0)
    return at::zeros({static_cast<int64_t>(ends.size()), dy.size(1), x.size(1)}, x.options());
  return at::_grouped_mm(dy.t(), x, on_device(ends, dy.device()));
}

}  // namespace pyruntime
