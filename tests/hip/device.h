// The device that the cases run on: a GPU by HIP's runtime, or, compiled with PYRUNTIME_RUN_ON_HOST, the CPU,
// whose kernels are those of the host dialect (tests/cuda/emulated).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#if defined(PYRUNTIME_RUN_ON_HOST)
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#else
#include <hip/hip_runtime_api.h>
#endif

namespace run::device {

#if defined(PYRUNTIME_RUN_ON_HOST)

constexpr bool kEmulated = true;

inline void prepare_process() {}

inline std::string why_none() {
  return "";
}

inline std::string name() {
  return "the host dialect, waves of 64";
}

inline int count() {
  return 1;
}

inline void use(int) {}

inline void* allocate(size_t bytes) {
  void* made = nullptr;
  if (posix_memalign(&made, 256, bytes) != 0) throw std::bad_alloc();
  return made;
}

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

class Stream {
 public:
  void* get() const { return nullptr; }
};

// How another process finds what allocate_shared() made.
struct Handle {
  int process, file;
  size_t bytes;
};

inline void* map(int file, size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("mmap() failed");
  return mapped;
}

inline void* allocate_shared(size_t bytes, Handle& handle) {
  handle = {static_cast<int>(getpid()), memfd_create("run_kernels", 0), bytes};
  if (handle.file < 0 || ftruncate(handle.file, static_cast<off_t>(bytes)) != 0) {
    throw std::runtime_error("memfd_create() failed");
  }
  return map(handle.file, bytes);
}

inline void* open_shared(const Handle& handle) {
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) throw std::runtime_error("open(" + path + ") failed");
  void* mapped = map(file, handle.bytes);
  close(file);
  return mapped;
}

#else

constexpr bool kEmulated = false;

inline void check(hipError_t code, const char* call) {
  if (code != hipSuccess) throw std::runtime_error(std::string(call) + ": " + hipGetErrorString(code));
}
#define RUN_HIP(call) ::run::device::check(call, #call)

// Before the first call of HIP. Ranks of one process have a stream each, and streams that share a hardware
// queue run one after the other: a kernel would wait for what comes behind it. HIP has 4 queues by default,
// one of which the default stream may take. And a kernel that is loaded while another waits might wait too.
inline void prepare_process() {
  setenv("GPU_MAX_HW_QUEUES", "8", /*overwrite=*/0);
  setenv("HIP_ENABLE_DEFERRED_LOADING", "0", /*overwrite=*/0);
}

inline std::string why_none() {
  int devices = 0;
  const hipError_t code = hipGetDeviceCount(&devices);
  if (code != hipSuccess) return std::string("hipGetDeviceCount: ") + hipGetErrorString(code);
  return devices > 0 ? "" : "HIP knows of no device";
}

inline std::string name() {
  hipDeviceProp_t properties;
  RUN_HIP(hipGetDeviceProperties(&properties, 0));
  return std::string(properties.name) + " (" + properties.gcnArchName + ")";
}

inline int count() {
  int devices = 0;
  RUN_HIP(hipGetDeviceCount(&devices));
  return devices;
}

// By the thread that calls; its memory is then reached from all devices, and it reaches theirs.
inline void use(int index) {
  RUN_HIP(hipSetDevice(index));
  for (int other = 0; other < count(); ++other) {
    if (other == index) continue;
    const hipError_t code = hipDeviceEnablePeerAccess(other, 0);
    if (code == hipErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(hipGetLastError());
    } else {
      check(code, "hipDeviceEnablePeerAccess");
    }
  }
}

inline void* allocate(size_t bytes) {
  void* made = nullptr;
  RUN_HIP(hipMalloc(&made, bytes));
  return made;
}

// Either side may be the host's; ends when the copy has.
inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) RUN_HIP(hipMemcpy(to, from, bytes, hipMemcpyDefault));
}

class Stream {
 public:
  Stream() { RUN_HIP(hipStreamCreateWithFlags(&stream_, hipStreamNonBlocking)); }
  ~Stream() { static_cast<void>(hipStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }

 private:
  hipStream_t stream_ = nullptr;
};

using Handle = hipIpcMemHandle_t;

// Memory that other ranks write: in ordinary memory a line of L2 can be stale for good.
inline void* allocate_shared(size_t bytes, Handle& handle) {
#if defined(hipDeviceMallocUncached)
  constexpr unsigned kKind = hipDeviceMallocUncached;
#else
  constexpr unsigned kKind = hipDeviceMallocFinegrained;
#endif
  void* made = nullptr;
  RUN_HIP(hipExtMallocWithFlags(&made, bytes, kKind));
  RUN_HIP(hipIpcGetMemHandle(&handle, made));
  return made;
}

inline void* open_shared(const Handle& handle) {
  void* mapped = nullptr;
  RUN_HIP(hipIpcOpenMemHandle(&mapped, handle, hipIpcMemLazyEnablePeerAccess));
  return mapped;
}

#endif

}  // namespace run::device
