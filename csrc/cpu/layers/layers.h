#pragma once

// The fused layer kernels: torch ops of namespace `pyruntime`, each with a vectorised CPU kernel (float32,
// bfloat16, float16 and float64; arithmetic in float32, or float64 for float64), a composite of ATen ops for
// every other device, and C++ autograd whose backward is an op as well. Fake kernels are in
// pyruntime/ops/layers.py and attention.py.

#include <torch/library.h>

namespace pyruntime::layers {

void register_rms_norm(torch::Library& m);
void register_swiglu(torch::Library& m);
void register_rope(torch::Library& m);
void register_attention(torch::Library& m);
void register_attention_block(torch::Library& m);
void register_cross_entropy(torch::Library& m);
void register_adamw(torch::Library& m);
void register_sum_of_squares(torch::Library& m);
void register_add(torch::Library& m);

}  // namespace pyruntime::layers

namespace pyruntime {

// Defines every layer op in `m`, which must be the library of namespace `pyruntime`.
void register_layer_ops(torch::Library& m);

}  // namespace pyruntime
