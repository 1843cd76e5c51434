#include "transport/device/hip_runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <vector>

namespace pyruntime {

namespace {

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::optional<HipRuntime> HipRuntime::of(void* library) {
  HipRuntime hip{};
#define PYRUNTIME_LOOK_UP(name) look_up(library, #name, hip.name)
  const bool all = PYRUNTIME_LOOK_UP(hipExtMallocWithFlags) && PYRUNTIME_LOOK_UP(hipFree) &&
                   PYRUNTIME_LOOK_UP(hipIpcGetMemHandle) && PYRUNTIME_LOOK_UP(hipIpcOpenMemHandle) &&
                   PYRUNTIME_LOOK_UP(hipIpcCloseMemHandle) && PYRUNTIME_LOOK_UP(hipDeviceSynchronize) &&
                   PYRUNTIME_LOOK_UP(hipGetErrorName);
#undef PYRUNTIME_LOOK_UP
  return all ? std::optional<HipRuntime>(hip) : std::nullopt;
}

std::string why_no_single_hip_runtime() {
  std::vector<std::string> found;
  const auto look = [](dl_phdr_info* info, size_t, void* paths) {
    const std::string path = info->dlpi_name;
    if (path.substr(path.rfind('/') + 1).rfind("libamdhip64.so", 0) == 0) {
      static_cast<std::vector<std::string>*>(paths)->push_back(path);
    }
    return 0;
  };
  dl_iterate_phdr(look, &found);
  if (found.size() < 2) return "";
  return "this process has two HIP runtimes, " + found[0] + " and " + found[1] +
         ", and the kernels need torch's: build them with the hipcc of torch's ROCm version";
}

}  // namespace pyruntime
