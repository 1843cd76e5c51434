// The places of a table of routes, put in order by groups of experts: device kernels make the order, and
// nothing waits on the host. A place is a slot of a row, row * k + slot.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "transport/device/library.h"

namespace pyruntime {

// The kernels for a table of that device and dtype; nullptr on CPUs, without kernels, and for fp64.
const DeviceLibrary* kernels_for(c10::Device device, at::ScalarType dtype);

struct SortedPlaces {
  // table [rows, 2k], fp32: the experts of each row, which differ (-1: none), then the weight of each. Group
  // g has the experts first + g * per, ..., `per` of them. With per > 1 a row has one place in a group,
  // however many of its experts. If `only_rows`, places and weights stay undefined.
  SortedPlaces(const DeviceLibrary& kernels, const at::Tensor& table, int64_t first, int64_t per,
               int64_t groups, bool only_rows = false);

  // Writes to out [positions.size(0), D], contiguous, for each row of `positions` [*, k] the sum of `values`
  // [*, D] at its positions, in their order: in fp32, rounded once.
  void sum(const at::Tensor& values, const at::Tensor& positions, const at::Tensor& out) const;

  const DeviceLibrary& kernels;
  at::Tensor counts;                 // [groups]: places of each, int64
  at::Tensor rows, places, weights;  // [>= all counts]: of each place in the order
  at::Tensor positions;              // [rows, k], int32: where each place is in the order; -1: nowhere
};

}  // namespace pyruntime
