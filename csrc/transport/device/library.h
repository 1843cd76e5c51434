// The library of device kernels (csrc/cuda), found and loaded when a group first has tensors on a device:
// this extension itself links no CUDA library.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "cuda/launchers.h"
#include "cuda/sm90/launchers.h"
#include "transport/device/hip_runtime.h"

namespace pyruntime {

// The functions that the core calls; those for Hopper are missing in dialects that have none.
// clang-format off
#define PYRUNTIME_DEVICE_FUNCTIONS(use) \
  use(interface) use(error) use(workspace_bytes) use(prepare_workspace) use(failure) use(describe_failure) \
  use(new_stream) use(stop) \
  use(put) use(put_together) use(pass_on) use(end_puts) use(await) use(await_all) use(finish) use(slot_data) \
  use(can_multicast) use(put_to_all) use(sum_copies) use(await_leave) \
  use(choose_tiles) use(all_gather_matmul) use(matmul_reduce_scatter) \
  use(reduce) use(adamw) use(adamw_ahead) use(swiglu) use(swiglu_backward) use(rope) \
  use(weighted_gating) use(weighted_gating_backward) \
  use(sort_routes) use(sort_routes_scratch) use(sum_places) \
  use(cross_entropy_stats) use(cross_entropy_gradient) use(is_capturing) use(multiprocessors)
#define PYRUNTIME_COMPRESSION_FUNCTIONS(use) use(pack_fp8) use(unpack_fp8) use(quantize) use(dequantize)
#define PYRUNTIME_NORM_FUNCTIONS(use) use(rms_norm) use(rms_norm_parts) use(rms_norm_backward)
#define PYRUNTIME_HOPPER_FUNCTIONS(use) \
  use(sm90_choose_tiles) use(sm90_is_on_device) use(sm90_all_gather_matmul) use(sm90_matmul_reduce_scatter)
// clang-format on

// Each function as launchers.h declares it; those for Hopper are nullptr if they are missing.
struct DeviceLibrary {
#define PYRUNTIME_DECLARE(name) decltype(&pyruntime_##name) name;
  PYRUNTIME_DEVICE_FUNCTIONS(PYRUNTIME_DECLARE)
  PYRUNTIME_HOPPER_FUNCTIONS(PYRUNTIME_DECLARE)
  std::optional<HipRuntime> hip;  // used by the kernels for AMD's GPUs
  PYRUNTIME_COMPRESSION_FUNCTIONS(PYRUNTIME_DECLARE)
  PYRUNTIME_NORM_FUNCTIONS(PYRUNTIME_DECLARE)
#undef PYRUNTIME_DECLARE

  // Raises RuntimeError with the library's sentence if a call has failed.
  void check(int code) const;

  // Sets whether devices of torch's type CUDA are AMD's GPUs, which chooses the library beside this
  // extension. A torch for ROCm says so to Python (torch.version.hip).
  static void set_torch_is_for_rocm(bool rocm);
  // The library for devices of that type; else nullptr, with the reason in `why_not`.
  static const DeviceLibrary* find(c10::DeviceType type, std::string& why_not);
  // Uses the library at `path` for devices of that type from now on. Raises RuntimeError if it cannot be
  // loaded or has another version. The host dialect of the kernels is such a library for the CPU.
  static void use(c10::DeviceType type, const std::string& path);
};

}  // namespace pyruntime
