// The library of device kernels (csrc/cuda), found and loaded when a group first has tensors on a device:
// this extension itself links no CUDA library.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "cuda/launchers.h"
#include "cuda/sm90/launchers.h"

namespace pyruntime {

// What of the library the transport of devices calls; each function as launchers.h declares it.
struct DeviceLibrary {
  decltype(&pyruntime_error) error;
  decltype(&pyruntime_workspace_bytes) workspace_bytes;
  decltype(&pyruntime_prepare_workspace) prepare_workspace;
  decltype(&pyruntime_failure) failure;
  decltype(&pyruntime_describe_failure) describe_failure;
  decltype(&pyruntime_finish) finish;
  decltype(&pyruntime_put) put;
  decltype(&pyruntime_end_puts) end_puts;
  decltype(&pyruntime_await) await;
  decltype(&pyruntime_can_multicast) can_multicast;
  decltype(&pyruntime_put_to_all) put_to_all;
  decltype(&pyruntime_sum_copies) sum_copies;
  decltype(&pyruntime_await_leave) await_leave;
  decltype(&pyruntime_slot_data) slot_data;
  decltype(&pyruntime_reduce) reduce;
  decltype(&pyruntime_adamw) adamw;
  decltype(&pyruntime_swiglu) swiglu;
  decltype(&pyruntime_swiglu_backward) swiglu_backward;
  decltype(&pyruntime_rope) rope;
  decltype(&pyruntime_cross_entropy_stats) cross_entropy_stats;
  decltype(&pyruntime_cross_entropy_gradient) cross_entropy_gradient;
  decltype(&pyruntime_is_capturing) is_capturing;
  decltype(&pyruntime_multiprocessors) multiprocessors;
  decltype(&pyruntime_choose_tiles) choose_tiles;
  decltype(&pyruntime_all_gather_matmul) all_gather_matmul;
  decltype(&pyruntime_matmul_reduce_scatter) matmul_reduce_scatter;
  // nullptr in the dialects that have none.
  decltype(&pyruntime_sm90_choose_tiles) sm90_choose_tiles;
  decltype(&pyruntime_sm90_is_on_device) sm90_is_on_device;
  decltype(&pyruntime_sm90_all_gather_matmul) sm90_all_gather_matmul;
  decltype(&pyruntime_sm90_matmul_reduce_scatter) sm90_matmul_reduce_scatter;

  // Raises RuntimeError with the library's sentence where a call has failed.
  void check(int code) const;

  // The library for devices of that type, or nullptr, and then `why_not` says why.
  static const DeviceLibrary* find(c10::DeviceType type, std::string& why_not);
  // From now on the library for devices of that type is the one at `path`. Raises RuntimeError where it
  // cannot be loaded. The host dialect of the kernels is such a library for the CPU.
  static void use(c10::DeviceType type, const std::string& path);
};

}  // namespace pyruntime
