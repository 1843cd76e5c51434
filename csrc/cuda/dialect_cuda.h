// The CUDA dialect of compat.h, for compute capability 8.0 and up.
#pragma once

#if defined(__CUDACC_RTC__)
#include "cuda/rtc.h"
#else
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#endif

#define PYRUNTIME_DEVICE __device__ __forceinline__
#define PYRUNTIME_HOST_DEVICE __host__ __device__ __forceinline__
#define PYRUNTIME_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define PYRUNTIME_PARAMETER const __grid_constant__
#define PYRUNTIME_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

#define PYRUNTIME_CDNA 0

namespace pyruntime::device {

constexpr int kWarpSize = 32;

template <class T>
PYRUNTIME_DEVICE const T& first_parameter(const T& parameter) {
  return parameter;
}

PYRUNTIME_DEVICE void copy_bits(void* to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
}

PYRUNTIME_DEVICE uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

PYRUNTIME_DEVICE void release_system() {
  // The fence is cumulative: it covers other threads' writes before a barrier that this thread has passed.
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

PYRUNTIME_DEVICE void store_relaxed_system(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

PYRUNTIME_DEVICE void publishing_barrier() {
  __syncthreads();
}

PYRUNTIME_DEVICE bool barrier_and(bool x) {
  return __syncthreads_and(x) != 0;
}

PYRUNTIME_DEVICE void warp_barrier() {
  __syncwarp();
}

PYRUNTIME_DEVICE void fence_device() {
  __threadfence();
}

PYRUNTIME_DEVICE void fence_system() {
  __threadfence_system();
}

PYRUNTIME_DEVICE uint64_t global_time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

PYRUNTIME_DEVICE void nap() {
  __nanosleep(64);
}

PYRUNTIME_DEVICE float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

PYRUNTIME_DEVICE uint4 load_streaming(const void* p) {
  // Past L1, which is not coherent and may contain a line of an earlier epoch.
  return __ldcg(static_cast<const uint4*>(p));
}

PYRUNTIME_DEVICE void store_global(void* p, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

PYRUNTIME_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

PYRUNTIME_DEVICE void copy_async(void* to, const void* from, int bytes) {
  // .cg: past L1, as in load_streaming(), so that what another rank wrote comes from L2 or memory.
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

PYRUNTIME_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroupsLeft>
PYRUNTIME_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
}

PYRUNTIME_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

PYRUNTIME_DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

PYRUNTIME_DEVICE float fast_exp(float x) {
  return __expf(x);
}

PYRUNTIME_DEVICE float fast_divide(float x, float y) {
  return __fdividef(x, y);
}

}  // namespace pyruntime::device

#if !defined(__CUDACC_RTC__)
namespace pyruntime::runtime {

using Stream = cudaStream_t;

// Returns nullptr if nothing failed. Reads and clears launch errors once, so that no later launch is blamed.
inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

inline int multiprocessors() {
  return attribute(cudaDevAttrMultiProcessorCount);
}

inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

// Returns nullptr if the device can run the kernel's instructions for multicast addresses, else the reason.
template <class Kernel>
const char* why_no_multicast(Kernel kernel) {
  cudaFuncAttributes built{};
  const bool new_enough = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  const bool known = cudaFuncGetAttributes(&built, reinterpret_cast<const void*>(kernel)) == cudaSuccess;
  static_cast<void>(cudaGetLastError());  // clears the query's error: no launch has failed
  if (!new_enough) return "it needs a GPU of compute capability 9.0 or newer.";
  if (known && built.ptxVersion >= 90) return nullptr;
  return "the kernels were built for older GPUs alone; name this one (9.0a: Hopper) in TORCH_CUDA_ARCH_LIST "
         "and build them anew.";
}

inline int shared_bytes_per_block() {
  return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

template <class Kernel>
void allow_shared_bytes(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                       bytes);
}

template <class Kernel>
int resident_blocks(Kernel kernel, int threads, int shared_bytes) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
  return blocks;
}

// Uses a copy engine if the two ends are on different devices or on the host.
inline void copy(void* to, const void* from, size_t bytes, Stream stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

inline void make_stream(Stream* stream) {
  cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
}

inline void set_zero(void* to, size_t bytes, Stream stream) {
  cudaMemsetAsync(to, 0, bytes, stream);
}

// Waits for the stream.
inline void copy_now(void* to, const void* from, size_t bytes, Stream stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  cudaStreamSynchronize(stream);
}

}  // namespace pyruntime::runtime
#endif
