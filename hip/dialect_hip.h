// The HIP dialect of compat.h, for CDNA (gfx90a, gfx942, gfx950). Flags and buffers that peers write must be
// uncached or fine-grained memory (hipExtMallocWithFlags): in ordinary memory a line of L2 can stay stale for
// ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <hip/hip_runtime.h>

#define PYRUNTIME_DEVICE __device__ __forceinline__
#define PYRUNTIME_HOST_DEVICE __host__ __device__ __forceinline__
// The second bound counts waves per SIMD; a compute unit has four SIMDs.
#define PYRUNTIME_KERNEL(threads, blocks) \
  __global__ void __launch_bounds__(threads, ((threads) * (blocks) + 255) / 256)
#define PYRUNTIME_PARAMETER const
#define PYRUNTIME_SHARED(name) extern __shared__ __attribute__((aligned(128))) unsigned char name[]
#define PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)                              \
  hipLaunchKernelGGL(kernel, dim3(blocks), dim3(threads), shared_bytes, static_cast<hipStream_t>(stream), \
                     __VA_ARGS__)

#define PYRUNTIME_CDNA 1

namespace pyruntime::device {

constexpr int kWarpSize = 64;

template <class T>
PYRUNTIME_DEVICE const T& first_parameter(const T& parameter) {
#if defined(__HIP_DEVICE_COMPILE__)
  // Used by name it would be copied to every lane's scratch memory, and indexed there.
  static_cast<void>(parameter);
  return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
#else
  return parameter;  // the pass that compiles for the CPU lacks these builtins
#endif
}

// memcpy() would be a loop over bytes in scratch memory. 16 bytes are copied as words, because the compiler
// keeps no value in registers that is a vector of words on one side and halves of words on the other.
PYRUNTIME_DEVICE void copy_bits(void* to, const void* from, size_t bytes) {
  if (bytes != 16) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  const auto copy_word = [&](int at) {
    uint32_t word;
    __builtin_memcpy(&word, static_cast<const unsigned char*>(from) + at, 4);
    __builtin_memcpy(static_cast<unsigned char*>(to) + at, &word, 4);
  };
  copy_word(0);
  copy_word(4);
  copy_word(8);
  copy_word(12);
}

PYRUNTIME_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
  // Plain or cached polling never ends if L2 has a stale line.
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}

PYRUNTIME_DEVICE void drain_stores() {
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}

PYRUNTIME_DEVICE void release_system() {
  // A release store alone may be compiled to a write-back and the store without a wait between them; then the
  // flag overtakes the data.
  __atomic_thread_fence(__ATOMIC_RELEASE);
  drain_stores();
}

PYRUNTIME_DEVICE void store_relaxed_system(uint64_t* p, uint64_t value) {
  // Marks the flag for readers of the assembly: gfx90a stores a flag and 8 bytes of data alike.
  asm volatile("; flag" ::: "memory");
  __hip_atomic_store(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

PYRUNTIME_DEVICE void publishing_barrier() {
  // A barrier does not wait until the workgroup's stores reach L2, and a wave's drain covers only its own
  // stores.
  drain_stores();
  __syncthreads();
}

PYRUNTIME_DEVICE void shared_barrier() {
  // __syncthreads() may be compiled to a wait for all loads, including those of the next tile.
  asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
}

PYRUNTIME_DEVICE void keep_order() {
  asm volatile("" ::: "memory");
}

PYRUNTIME_DEVICE bool barrier_and(bool x) {
  return __syncthreads_and(x) != 0;
}

PYRUNTIME_DEVICE void warp_barrier() {
  // A wave runs in lockstep; only the compiler must not move accesses across.
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

PYRUNTIME_DEVICE void fence_device() {
  __threadfence();
}

PYRUNTIME_DEVICE void fence_system() {
  __threadfence_system();
}

PYRUNTIME_DEVICE uint64_t global_time_ns() {
  return __builtin_amdgcn_s_memrealtime() * 10;  // the counter runs at 100 MHz
}

PYRUNTIME_DEVICE void nap() {
  __builtin_amdgcn_s_sleep(2);
}

PYRUNTIME_DEVICE float shuffle_xor(float x, int mask) {
  return __shfl_xor(x, mask);
}

PYRUNTIME_DEVICE uint4 load_streaming(const void* p) {
  // As global memory: a generic load also counts as one of shared memory, so a wait for shared memory would
  // wait for it.
  typedef uint32_t Words __attribute__((ext_vector_type(4)));
  const auto words = *(const __attribute__((address_space(1))) Words*)reinterpret_cast<uintptr_t>(p);
  return make_uint4(words.x, words.y, words.z, words.w);
}

PYRUNTIME_DEVICE void store_global(void* p, uint4 value) {
  *static_cast<uint4*>(p) = value;
}

PYRUNTIME_DEVICE float half_to_float(uint16_t bits) {
  _Float16 value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return static_cast<float>(value);
}

PYRUNTIME_DEVICE uint16_t float_to_half(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  __builtin_memcpy(&bits, &half, sizeof(bits));
  return bits;
}

PYRUNTIME_DEVICE float fast_exp(float x) {
  return __expf(x);
}

PYRUNTIME_DEVICE float fast_divide(float x, float y) {
  return x * __builtin_amdgcn_rcpf(y);
}

}  // namespace pyruntime::device

namespace pyruntime::runtime {

using Stream = hipStream_t;

inline const char* last_error() {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

inline int attribute(hipDeviceAttribute_t which) {
  int device = 0, value = 0;
  if (hipGetDevice(&device) != hipSuccess) return 0;
  return hipDeviceGetAttribute(&value, which, device) == hipSuccess ? value : 0;
}

inline int multiprocessors() {
  return attribute(hipDeviceAttributeMultiprocessorCount);
}

inline bool is_capturing(Stream stream) {
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  return hipStreamIsCapturing(stream, &status) == hipSuccess && status != hipStreamCaptureStatusNone;
}

template <class Kernel>
const char* why_no_multicast(Kernel) {
  return "AMD GPUs have no multicast addresses.";
}

inline int shared_bytes_per_block() {
  return attribute(hipDeviceAttributeMaxSharedMemoryPerBlock);
}

template <class Kernel>
void allow_shared_bytes(Kernel, int) {}

template <class Kernel>
int resident_blocks(Kernel kernel, int threads, int shared_bytes) {
  int blocks = 0;
  static_cast<void>(hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
  return blocks;
}

inline void copy(void* to, const void* from, size_t bytes, Stream stream) {
  static_cast<void>(hipMemcpyAsync(to, from, bytes, hipMemcpyDefault, stream));
}

inline void make_stream(Stream* stream) {
  static_cast<void>(hipStreamCreateWithFlags(stream, hipStreamNonBlocking));
}

inline void set_zero(void* to, size_t bytes, Stream stream) {
  static_cast<void>(hipMemsetAsync(to, 0, bytes, stream));
}

inline void copy_now(void* to, const void* from, size_t bytes, Stream stream) {
  static_cast<void>(hipMemcpyAsync(to, from, bytes, hipMemcpyDefault, stream));
  static_cast<void>(hipStreamSynchronize(stream));
}

}  // namespace pyruntime::runtime
