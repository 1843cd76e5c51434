// The module _C, and the operators of torch.ops.pyruntime.
#include <torch/library.h>

#include <malloc.h>

#include "bindings/bindings.h"
#include "cpu/symmetric_memory.h"
#include "ops/operators.h"

TORCH_LIBRARY(pyruntime, library) {
  pyruntime::register_column_linears(library);
  pyruntime::register_row_linears(library);
  pyruntime::register_sliced_linears(library);
  pyruntime::register_collectives(library);
  pyruntime::register_linear(library);
  pyruntime::register_linear_cross_entropy(library);
  pyruntime::register_device_adamw(library);
  pyruntime::register_device_layers(library);
  pyruntime::register_experts(library);
  pyruntime::register_sliced_experts(library);
}

namespace pyruntime {
namespace {

// glibc returns large freed buffers to the system at once, and the next allocation page-faults them in again,
// which costs a training step 5 to 15 % of its time. Raising both thresholds keeps them.
bool keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kKeep = 1 << 30;
  return mallopt(M_MMAP_THRESHOLD, kKeep) == 1 && mallopt(M_TRIM_THRESHOLD, kKeep) == 1 &&
         mallopt(M_TOP_PAD, 64 << 20) == 1;
#else
  return false;
#endif
}

}  // namespace
}  // namespace pyruntime

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of pyruntime; its operators are in torch.ops.pyruntime.";
  pyruntime::cpu::register_symmetric_memory();
  pyruntime::bind_comm(m);
  pyruntime::bind_exchanges(m);
  pyruntime::bind_experts(m);
  pyruntime::bind_products(m);
  pyruntime::bind_compression(m);
  m.def("keep_freed_memory", &pyruntime::keep_freed_memory);
}
