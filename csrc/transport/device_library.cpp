#include "transport/device_library.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>

namespace pyruntime {

namespace {

constexpr const char* kFileName = "libpyruntime_cuda.so";

struct Loaded {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceLibrary> libraries;
  // Why there is none: a layer asks anew in every call, and the file system is not looked at each time.
  std::string why_no_cuda;
};

Loaded& loaded() {
  static auto* instance = new Loaded();  // never destroyed: flights may outlive static destructors
  return *instance;
}

// Beside this extension, which dladdr() knows by any address in it.
std::string path_beside_the_extension() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&path_beside_the_extension), &info) == 0) return kFileName;
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + kFileName;
}

template <class Function>
bool look_up(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// Kept open for good.
bool load(const std::string& path, DeviceLibrary& library, std::string& why_not) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    why_not = dlerror();
    return false;
  }
  if (look_up(handle, "pyruntime_error", library.error) &&
      look_up(handle, "pyruntime_workspace_bytes", library.workspace_bytes) &&
      look_up(handle, "pyruntime_prepare_workspace", library.prepare_workspace) &&
      look_up(handle, "pyruntime_failure", library.failure) &&
      look_up(handle, "pyruntime_describe_failure", library.describe_failure) &&
      look_up(handle, "pyruntime_finish", library.finish) && look_up(handle, "pyruntime_put", library.put) &&
      look_up(handle, "pyruntime_end_puts", library.end_puts) &&
      look_up(handle, "pyruntime_await", library.await) &&
      look_up(handle, "pyruntime_can_multicast", library.can_multicast) &&
      look_up(handle, "pyruntime_put_to_all", library.put_to_all) &&
      look_up(handle, "pyruntime_sum_copies", library.sum_copies) &&
      look_up(handle, "pyruntime_await_leave", library.await_leave) &&
      look_up(handle, "pyruntime_slot_data", library.slot_data) &&
      look_up(handle, "pyruntime_reduce", library.reduce) &&
      look_up(handle, "pyruntime_adamw", library.adamw) &&
      look_up(handle, "pyruntime_swiglu", library.swiglu) &&
      look_up(handle, "pyruntime_swiglu_backward", library.swiglu_backward) &&
      look_up(handle, "pyruntime_rope", library.rope) &&
      look_up(handle, "pyruntime_cross_entropy_stats", library.cross_entropy_stats) &&
      look_up(handle, "pyruntime_cross_entropy_gradient", library.cross_entropy_gradient) &&
      look_up(handle, "pyruntime_is_capturing", library.is_capturing) &&
      look_up(handle, "pyruntime_multiprocessors", library.multiprocessors) &&
      look_up(handle, "pyruntime_choose_tiles", library.choose_tiles) &&
      look_up(handle, "pyruntime_all_gather_matmul", library.all_gather_matmul) &&
      look_up(handle, "pyruntime_matmul_reduce_scatter", library.matmul_reduce_scatter)) {
    const bool hopper =
        look_up(handle, "pyruntime_sm90_choose_tiles", library.sm90_choose_tiles) &&
        look_up(handle, "pyruntime_sm90_is_on_device", library.sm90_is_on_device) &&
        look_up(handle, "pyruntime_sm90_all_gather_matmul", library.sm90_all_gather_matmul) &&
        look_up(handle, "pyruntime_sm90_matmul_reduce_scatter", library.sm90_matmul_reduce_scatter);
    if (!hopper) library.sm90_choose_tiles = nullptr;
    return true;
  }
  why_not = path + " lacks functions of this version; build it anew";
  dlclose(handle);
  return false;
}

}  // namespace

void DeviceLibrary::check(int code) const {
  TORCH_CHECK(code == PYRUNTIME_OK, "The device kernels refused: ", error());
}

const DeviceLibrary* DeviceLibrary::find(c10::DeviceType type, std::string& why_not) {
  auto& [mutex, libraries, why_no_cuda] = loaded();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = libraries.find(type);
  if (found != libraries.end()) return &found->second;
  if (type != c10::DeviceType::CUDA) {
    why_not =
        "there are no device kernels for " + c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors";
    return nullptr;
  }
  DeviceLibrary library{};
  std::string reason;
  if (why_no_cuda.empty() && !load(path_beside_the_extension(), library, reason))
    why_no_cuda = "the CUDA kernels are not built (" + reason + "); run `make cuda`";
  why_not = why_no_cuda;
  return !why_no_cuda.empty() ? nullptr : &libraries.emplace(type, library).first->second;
}

void DeviceLibrary::use(c10::DeviceType type, const std::string& path) {
  DeviceLibrary library{};
  std::string why_not;
  TORCH_CHECK(load(path, library, why_not), "The device kernels cannot be loaded: ", why_not, ".");
  auto& [mutex, libraries, why_no_cuda] = loaded();
  const std::lock_guard<std::mutex> lock(mutex);
  libraries.insert_or_assign(type, library);
}

}  // namespace pyruntime
