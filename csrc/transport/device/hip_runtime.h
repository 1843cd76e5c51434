// The functions of the HIP runtime that the core calls itself, looked up in the kernels' library: this
// extension links no HIP library and includes none of its headers.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace pyruntime {

// hipIpcMemHandle_t
struct HipIpcHandle {
  char reserved[64];
};

// Each function under its own name, as hip_runtime_api.h declares it; an int is a hipError_t, 0 for success.
struct HipRuntime {
  int (*hipExtMallocWithFlags)(void** pointer, size_t bytes, unsigned flags);
  int (*hipFree)(void* pointer);
  int (*hipIpcGetMemHandle)(HipIpcHandle* handle, void* pointer);
  int (*hipIpcOpenMemHandle)(void** pointer, HipIpcHandle handle, unsigned flags);
  int (*hipIpcCloseMemHandle)(void* pointer);
  int (*hipDeviceSynchronize)();
  const char* (*hipGetErrorName)(int error);

  // The runtime of an open library (dlopen) and of its dependencies; nothing if it needs no HIP runtime.
  static std::optional<HipRuntime> of(void* library);
};

// Says why the HIP runtimes that this process has loaded cannot be used; "" with one runtime, or none. A
// stream of one means nothing to another, so kernels with a HIP runtime of their own beside torch's are
// unusable.
std::string why_no_single_hip_runtime();

}  // namespace pyruntime
