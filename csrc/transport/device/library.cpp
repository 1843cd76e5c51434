#include "transport/device/library.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>

namespace pyruntime {

namespace {

struct Kind {
  const char* name;
  const char* file;
  const char* target;  // of make
};
constexpr Kind kCuda{"CUDA", "libpyruntime_cuda.so", "cuda"};
constexpr Kind kHip{"HIP", "libpyruntime_hip.so", "hip"};

struct Loaded {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceLibrary> libraries;
  Kind kind = kCuda;  // of devices that torch calls CUDA
  // Why there is none: a layer asks in every call, and the file system is not searched each time.
  std::string why_no_cuda;
};

Loaded& loaded() {
  static auto* instance = new Loaded();  // never destroyed: flights may outlive static destructors
  return *instance;
}

// The path of a file beside this extension, which dladdr() finds by any address in it.
std::string path_beside_the_extension(const std::string& file) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&path_beside_the_extension), &info) == 0) return file;
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + file;
}

template <class Function>
bool look_up(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// Loads the library, which stays open.
bool load(const std::string& path, DeviceLibrary& library, std::string& why_not) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    why_not = dlerror();
    return false;
  }
#define PYRUNTIME_LOOK_UP(name) &&look_up(handle, "pyruntime_" #name, library.name)
  if (true PYRUNTIME_DEVICE_FUNCTIONS(PYRUNTIME_LOOK_UP) PYRUNTIME_COMPRESSION_FUNCTIONS(PYRUNTIME_LOOK_UP)
          PYRUNTIME_NORM_FUNCTIONS(PYRUNTIME_LOOK_UP) &&
      library.interface() == PYRUNTIME_INTERFACE) {
    library.hip = HipRuntime::of(handle);
    if (library.hip && !(why_not = why_no_single_hip_runtime()).empty()) {
      dlclose(handle);
      return false;
    }
    const bool hopper = true PYRUNTIME_HOPPER_FUNCTIONS(PYRUNTIME_LOOK_UP);
    if (!hopper) library.sm90_choose_tiles = nullptr;
    return true;
  }
#undef PYRUNTIME_LOOK_UP
  why_not = path + " is of another version; build it anew";
  dlclose(handle);
  return false;
}

}  // namespace

void DeviceLibrary::check(int code) const {
  TORCH_CHECK(code == PYRUNTIME_OK, "The device kernels refused: ", error());
}

const DeviceLibrary* DeviceLibrary::find(c10::DeviceType type, std::string& why_not) {
  auto& [mutex, libraries, kind, why_no_cuda] = loaded();
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
  if (why_no_cuda.empty() && !load(path_beside_the_extension(kind.file), library, reason)) {
    why_no_cuda =
        c10::str("the ", kind.name, " kernels are not built (", reason, "); run `make ", kind.target, "`");
  }
  why_not = why_no_cuda;
  return !why_no_cuda.empty() ? nullptr : &libraries.emplace(type, library).first->second;
}

void DeviceLibrary::set_torch_is_for_rocm(bool rocm) {
  auto& [mutex, libraries, kind, why_no_cuda] = loaded();
  const std::lock_guard<std::mutex> lock(mutex);
  kind = rocm ? kHip : kCuda;
  why_no_cuda.clear();
}

void DeviceLibrary::use(c10::DeviceType type, const std::string& path) {
  DeviceLibrary library{};
  std::string why_not;
  TORCH_CHECK(load(path, library, why_not), "The device kernels cannot be loaded: ", why_not, ".");
  auto& [mutex, libraries, kind, why_no_cuda] = loaded();
  const std::lock_guard<std::mutex> lock(mutex);
  libraries.insert_or_assign(type, library);
}

}  // namespace pyruntime
