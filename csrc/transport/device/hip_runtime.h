// What of the HIP runtime the core calls itself, looked up where the kernels have it from: this extension
// links no HIP library and includes none of its headers.
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

  // That of an open library (dlopen) and of what it needs; nothing where it needs no HIP runtime.
  static std::optional<HipRuntime> of(void* library);
};

// Why the HIP runtimes that this process has loaded do not do; "" where there is one, or none. A stream of
// one means nothing to another: kernels that came with a HIP runtime of their own beside torch's cannot be
// used.
std::string why_no_single_hip_runtime();

}  // namespace pyruntime
