// The operator of add.cpp, for other operators.
#pragma once

#include <ATen/core/Tensor.h>

namespace pyruntime::layers {

// sum += other; the dtypes may differ.
void call_add(const at::Tensor& sum, const at::Tensor& other);

}  // namespace pyruntime::layers
