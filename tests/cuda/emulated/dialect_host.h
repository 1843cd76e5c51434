// The host dialect of csrc/cuda/compat.h; see there.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <time.h>

#include "grid.h"
#include "instructions.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict

#define PYRUNTIME_DEVICE inline
#define PYRUNTIME_HOST_DEVICE inline
#define PYRUNTIME_KERNEL(threads, blocks) void
#define PYRUNTIME_PARAMETER const
#define PYRUNTIME_SHARED(name) unsigned char* name = ::pyruntime::host::current->shared
#define PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)                            \
  ::pyruntime::host::launch(                                                                            \
      blocks, threads, shared_bytes, stream, [=](const auto&... parameters) { kernel(parameters...); }, \
      __VA_ARGS__)
#define PYRUNTIME_CDNA (PYRUNTIME_HOST_WARP == 64)

#define threadIdx (::pyruntime::host::current->thread)
#define blockIdx (::pyruntime::host::current->block)
#define blockDim (::pyruntime::host::current->threads)
#define gridDim (::pyruntime::host::current->blocks)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

inline void __syncthreads() {
  ::pyruntime::host::barrier_and(true);
}

// Grids of several streams may run at once; the value before is returned.
inline uint32_t atomicAdd(uint32_t* p, uint32_t value) {
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

inline uint32_t atomicCAS(uint32_t* p, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

namespace pyruntime::device {

constexpr int kWarpSize = host::kWarpSize;

template <class T>
const T& first_parameter(const T& parameter) {
  return parameter;
}

inline void copy_bits(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

inline uint64_t load_acquire_system(const uint64_t* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

inline void release_system() {
  __atomic_thread_fence(__ATOMIC_RELEASE);
}

inline void store_relaxed_system(uint64_t* p, uint64_t value) {
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

inline void publishing_barrier() {
  __syncthreads();
}

inline void shared_barrier() {
  __syncthreads();
}

inline void keep_order() {}

inline bool barrier_and(bool x) {
  return host::barrier_and(x);
}

inline void warp_barrier() {
  const char nothing = 0;
  host::warp_exchange(&nothing, 1);
}

inline void fence_device() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

inline void fence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

inline uint64_t global_time_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

inline void nap() {
  host::yield();
}

inline float shuffle_xor(float x, int mask) {
  const unsigned char* table = host::warp_exchange(&x, sizeof(x));
  const unsigned lane = (threadIdx.x % kWarpSize) ^ static_cast<unsigned>(mask);
  float other;
  std::memcpy(&other, table + lane * host::kMostExchangedBytes, sizeof(other));
  return other;
}

inline uint4 load_streaming(const void* p) {
  uint4 value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

inline void store_global(void* p, uint4 value) {
  *static_cast<uint4*>(p) = value;
}

inline void copy_async(void* to, const void* from, int bytes) {
  host::copy_async(to, from, bytes);
}

inline void copy_async_commit() {
  host::copy_async_commit();
}

template <int kGroupsLeft>
inline void copy_async_wait() {
  host::copy_async_wait(kGroupsLeft);
}

inline float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value;
  if (exponent == 31) {
    value = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

inline uint16_t float_to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | 0x7c00;  // values that round to 65536 become infinite
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // exponent of the last bit; -24 below 2^-14
  // nearbyint() rounds to even. A fraction of 2048 carries into the exponent by itself.
  const auto fraction = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
  return static_cast<uint16_t>(sign | (((unit + 24) << 10) + fraction));
}

inline float fast_exp(float x) {
  return std::exp(x);
}

inline float fast_divide(float x, float y) {
  return x / y;
}

}  // namespace pyruntime::device

namespace pyruntime::runtime {

using Stream = void*;

inline const char* last_error() {
  return nullptr;
}

inline int multiprocessors() {
  return host::multiprocessors();
}

inline bool is_capturing(Stream) {
  return false;
}

template <class Kernel>
const char* why_no_multicast(Kernel) {
  return nullptr;
}

inline int shared_bytes_per_block() {
  return PYRUNTIME_CDNA ? 64 * 1024 : 227 * 1024;
}

template <class Kernel>
void allow_shared_bytes(Kernel, int) {}

template <class Kernel>
int resident_blocks(Kernel, int, int) {
  return 1;
}

inline void copy(void* to, const void* from, size_t bytes, Stream stream) {
  host::run_on(stream, [=] { std::memcpy(to, from, bytes); });
}

inline void make_stream(Stream* stream) {
  *stream = host::make_stream();
}

inline void set_zero(void* to, size_t bytes, Stream stream) {
  host::run_on(stream, [=] { std::memset(to, 0, bytes); });
}

inline void copy_now(void* to, const void* from, size_t bytes, Stream stream) {
  copy(to, from, bytes, stream);
  host::wait_for(stream);
}

}  // namespace pyruntime::runtime
