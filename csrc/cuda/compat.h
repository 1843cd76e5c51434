// One kernel source, three dialects. Kernels are written in CUDA's spelling. Everything that the dialects
// spell differently, and every operation whose order other ranks rely on, has a name here and its own
// definition in each:
//
//   CUDA    nvcc: dialect_cuda.h
//   HIP     hipcc or clang -x hip: hip/dialect_hip.h
//   host    any C++17 compiler: dialect_host.h of the tests (tests/cuda/emulated), which runs every thread of
//           a grid as a fiber of the calling thread: ranks as processes, real flags, no GPU
//
// Each dialect defines
//
//   PYRUNTIME_DEVICE           before a function that kernels call
//   PYRUNTIME_HOST_DEVICE      before a function that kernels and the host call
//   PYRUNTIME_KERNEL(threads, blocks)  before a kernel: threads a block, least blocks a multiprocessor
//   PYRUNTIME_PARAMETER        before a kernel's parameter that is indexed at run time: it is read in place,
//                              not copied into local memory. HIP does so only for the first parameter, read
//                              by device::first_parameter()
//   PYRUNTIME_SHARED(name)     declares `unsigned char* name`, the block's dynamic shared memory, 128-byte
//                              aligned
//   PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)
//   PYRUNTIME_CDNA             1 if waves, matrix instructions and shared memory are those of AMD's CDNA
//                              GPUs; the host emulates one with PYRUNTIME_HOST_WARP=64
//
// and, in namespace pyruntime::device,
//
//   kWarpSize                  a compile-time constant (warpSize is not one everywhere)
//   first_parameter(x)         the kernel's first parameter, x, in place
//   copy_bits(to, from, bytes) memcpy() of a few bytes, as register moves
//   load_acquire_system(p)     8 bytes that another rank or device may write; its earlier writes are visible
//   store_release_system(p, v) the release: covers the calling thread's stores, and those that its block made
//                              before a publishing_barrier(). For several flags: release_system(), then a
//                              store_relaxed_system(p, v) for each
//   publishing_barrier()       __syncthreads() after which one thread's release covers the stores of all
//   shared_barrier()           only with PYRUNTIME_CDNA: __syncthreads() for shared memory only; loads into
//                              registers stay in flight
//   keep_order()               only with PYRUNTIME_CDNA: no load issued before it starts after it
//   barrier_and(x)             __syncthreads() that tells all threads whether x was true in each
//   warp_barrier()             orders the memory accesses of the warp's lanes before and after it
//   fence_device(), fence_system()
//   global_time_ns()           a clock that runs while the block waits
//   nap()                      yields to others in a waiting loop
//   shuffle_xor(x, mask)       over the whole warp
//   load_streaming(p)          16 bytes that another rank wrote, past caches that may be stale
//   store_global(p, v)         16 bytes into global memory as one access; nvcc may split an assignment
//   copy_async(to, from, n)    16 bytes into shared memory: n from `from`, the rest zero; not in HIP
//   copy_async_commit(), copy_async_wait<n>()
//   half_to_float(bits), float_to_half(x)
//   fast_exp(x), fast_divide(x, y)  by the special-function units: the last bits of fp32 are inexact, and a
//                              quotient by more than 2^126 may be 0
//
// In namespace pyruntime::runtime each defines what launchers ask the device or its runtime: Stream,
// last_error(), multiprocessors(), shared_bytes_per_block(), allow_shared_bytes(), resident_blocks(), copy(),
// set_zero(), read(), is_capturing(), why_no_multicast().
#pragma once

#if defined(__CUDACC__)
#include "cuda/dialect_cuda.h"
#elif defined(__HIP__) || defined(__HIPCC__)
#include "dialect_hip.h"
#else
#include "dialect_host.h"
#endif

namespace pyruntime::device {

PYRUNTIME_DEVICE void store_release_system(uint64_t* p, uint64_t value) {
  release_system();
  store_relaxed_system(p, value);
}

}  // namespace pyruntime::device
