#include "ops/experts/sorted_places.h"

#include <ATen/ops/empty.h>

#include <string>

#include "ops/device/device_call.h"

namespace pyruntime {

const DeviceLibrary* kernels_for(c10::Device device, at::ScalarType dtype) {
  std::string why_not;
  return device.is_cpu() || dtype != at::kFloat ? nullptr : DeviceLibrary::find(device.type(), why_not);
}

SortedPlaces::SortedPlaces(const DeviceLibrary& with, const at::Tensor& given, int64_t first, int64_t per,
                           int64_t groups, bool only_rows)
    : kernels(with) {
  const DeviceCall call(given.device());
  const at::Tensor table = given.contiguous();
  const int64_t all = table.size(0), slots = table.size(1) / 2;
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, table.options().dtype(dtype));
  };
  const auto number = [](int64_t value) { return static_cast<int32_t>(value); };
  counts = empty({groups}, at::kLong);
  rows = empty({all * slots}, at::kLong);
  if (!only_rows) {
    places = empty({all * slots}, at::kLong);
    weights = empty({all * slots}, at::kFloat);
  }
  positions = empty({all, slots}, at::kInt);
  const at::Tensor scratch =
      empty({kernels.sort_routes_scratch(all, number(slots), number(groups))}, at::kInt);
  const PyruntimeRoutes routes{all,
                               number(slots),
                               number(first),
                               number(per),
                               number(groups),
                               table.const_data_ptr<float>(),
                               counts.mutable_data_ptr<int64_t>(),
                               scratch.mutable_data_ptr<int32_t>(),
                               rows.mutable_data_ptr<int64_t>(),
                               only_rows ? nullptr : places.mutable_data_ptr<int64_t>(),
                               only_rows ? nullptr : weights.mutable_data_ptr<float>(),
                               positions.mutable_data_ptr<int32_t>()};
  kernels.check(kernels.sort_routes(&routes, call.stream));
}

void SortedPlaces::sum(const at::Tensor& values, const at::Tensor& of_rows, const at::Tensor& out) const {
  const DeviceCall call(values.device());
  const PyruntimePlaceSums sums{dtype_code(values.scalar_type()),
                                static_cast<int32_t>(of_rows.size(1)),
                                of_rows.size(0),
                                values.size(1),
                                values.size(0),
                                of_rows.const_data_ptr<int32_t>(),
                                values.const_data_ptr(),
                                out.mutable_data_ptr()};
  kernels.check(kernels.sum_places(&sums, call.stream));
}

}  // namespace pyruntime
