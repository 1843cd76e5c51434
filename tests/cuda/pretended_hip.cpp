// The functions of the HIP runtime that the core calls (csrc/transport/device/hip_runtime.h), on shared CPU
// memory: a handle has the owner's pid and descriptor. It is stricter than HIP: memory is uncached or
// refused, memory that another process has open cannot be freed, and nothing may be closed twice. Compiled as
// libamdhip64.so, which a library of kernels needs.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#define PRETENDED __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidHandle = 17;
constexpr unsigned kUncached = 3;
constexpr size_t kHead = 4096;

// In front of the memory: the number of other processes that have it open.
struct Head {
  std::atomic<int> open;
};
struct Named {  // the content of a handle
  int pid, fd;
  size_t bytes;
};
struct Memory {
  void* base;
  int fd;  // -1: another process's
  size_t bytes;
};

std::mutex mutex;
std::map<void*, Memory> all;
int refuse_opens = 0;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "pretended HIP: %s\n", what);
  std::abort();
}

int map(int fd, size_t bytes, int kept, void** pointer) {
  void* base = mmap(nullptr, kHead + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return kOutOfMemory;
  *pointer = static_cast<char*>(base) + kHead;
  all[*pointer] = {base, kept, bytes};
  return 0;
}

// Removes `pointer` from the list and returns its entry.
Memory take(void* pointer, const char* unknown) {
  const auto found = all.find(pointer);
  if (found == all.end()) die(unknown);
  const Memory memory = found->second;
  all.erase(found);
  return memory;
}

}  // namespace

extern "C" {

PRETENDED int hipExtMallocWithFlags(void** pointer, size_t bytes, unsigned flags) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (flags != kUncached) return kInvalidValue;
  const int fd = memfd_create("pretended-hip", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(kHead + bytes)) != 0) return kOutOfMemory;
  const int error = map(fd, bytes, fd, pointer);
  if (error == 0) std::memset(*pointer, 0xa5, bytes);  // HIP does not promise zeros
  return error;
}

PRETENDED int hipFree(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Memory memory = take(pointer, "hipFree of what hipExtMallocWithFlags has not given");
  if (memory.fd < 0) die("hipFree of another process's memory");
  if (static_cast<Head*>(memory.base)->open.load() != 0) die("hipFree of memory that a peer has open");
  munmap(memory.base, kHead + memory.bytes);
  close(memory.fd);
  return 0;
}

struct Handle {
  char reserved[64];
};

PRETENDED int hipIpcGetMemHandle(Handle* handle, void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = all.find(pointer);
  if (found == all.end()) return kInvalidValue;
  const Named named{getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle->reserved, &named, sizeof(named));
  return 0;
}

PRETENDED int hipIpcOpenMemHandle(void** pointer, Handle handle, unsigned /*flags*/) {
  const std::lock_guard<std::mutex> lock(mutex);
  Named named;
  std::memcpy(&named, handle.reserved, sizeof(named));
  if (named.pid == getpid()) die("a handle is opened by the process that made it");
  if (refuse_opens) return kInvalidHandle;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", named.pid, named.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidHandle;
  const int error = map(fd, named.bytes, -1, pointer);
  close(fd);
  if (error == 0) static_cast<Head*>(all[*pointer].base)->open.fetch_add(1);
  return error;
}

PRETENDED int hipIpcCloseMemHandle(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Memory memory = take(pointer, "hipIpcCloseMemHandle of what was not opened");
  if (memory.fd >= 0) die("hipIpcCloseMemHandle of this process's own memory");
  static_cast<Head*>(memory.base)->open.fetch_sub(1);
  munmap(memory.base, kHead + memory.bytes);
  return 0;
}

PRETENDED int hipDeviceSynchronize() {
  return 0;
}

PRETENDED const char* hipGetErrorName(int error) {
  return error == kInvalidValue    ? "hipErrorInvalidValue"
         : error == kOutOfMemory   ? "hipErrorOutOfMemory"
         : error == kInvalidHandle ? "hipErrorInvalidResourceHandle"
                                   : "hipErrorUnknown";
}

// For tests: the number of this process's own allocations, the number of others' that it has open, and
// whether opening fails from now on.
PRETENDED int pretended_hip_own() {
  const std::lock_guard<std::mutex> lock(mutex);
  int count = 0;
  for (const auto& [pointer, memory] : all) count += memory.fd >= 0;
  return count;
}
PRETENDED int pretended_hip_opened() {
  const int own = pretended_hip_own();
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int>(all.size()) - own;
}
PRETENDED void pretended_hip_refuse_opens(int refuse) {
  refuse_opens = refuse;
}

}  // extern "C"
