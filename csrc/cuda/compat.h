// One kernel source, three dialects. Kernels are written as CUDA spells them; what the three do not spell
// alike, and every operation whose order other ranks rely on, is named here and written by hand for each:
//
//   CUDA    nvcc: dialect_cuda.h
//   HIP     hipcc or clang -x hip: hip/dialect_hip.h
//   host    any C++17 compiler: dialect_host.h of the tests (tests/cuda/emulated), which runs every thread of
//           a grid as a fiber of the calling thread: ranks as processes, real flags, no GPU
//
// Each dialect defines
//
//   PYRUNTIME_DEVICE           of functions that kernels call
//   PYRUNTIME_HOST_DEVICE      of functions that both sides call
//   PYRUNTIME_KERNEL(threads, blocks)  of a kernel with so many threads a block, at least so many blocks a
//                              multiprocessor
//   PYRUNTIME_PARAMETER        of a kernel's parameter that is indexed at run time: it is read where it lies
//                              and not copied into local memory. For HIP to do so, it comes first and is
//                              taken by device::first_parameter()
//   PYRUNTIME_SHARED(name)     declares `unsigned char* name`, the block's dynamic shared memory, 128-byte
//                              aligned
//   PYRUNTIME_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...)
//   PYRUNTIME_CDNA             1 where waves, matrix instructions and shared memory are those of AMD's CDNA
//                              GPUs; the host plays one with PYRUNTIME_HOST_WARP=64
//
// and, in namespace pyruntime::device,
//
//   kWarpSize                  a compile-time constant, which warpSize is not everywhere
//   first_parameter(x)         the kernel's first parameter, x, where it lies
//   copy_bits(to, from, bytes) memcpy() of a few bytes, as moves of registers
//   load_acquire_system(p)     8 bytes that another rank or device may write; what it wrote before is seen
//   store_release_system(p, v) and the other side: of the calling thread's stores, and of those that its
//                              block made before a publishing_barrier(); release_system() and as many
//                              store_relaxed_system(p, v) as there are to say so
//   publishing_barrier()       __syncthreads() after which one thread's release covers the stores of all
//   shared_barrier()           where PYRUNTIME_CDNA: __syncthreads() of shared memory alone; loads into
//                              registers stay under way
//   keep_order()               there too: no load that was asked for before begins after it
//   barrier_and(x)             __syncthreads() that tells all threads whether x was true in each
//   warp_barrier()             memory of the warp's lanes before and after it is in order
//   fence_device(), fence_system()
//   global_time_ns()           a clock that goes on while the block waits
//   nap()                      gives way to others in a loop that waits
//   shuffle_xor(x, mask)       over the whole warp
//   load_streaming(p)          16 bytes that another rank wrote, past caches that may be stale
//   store_global(p, v)         16 bytes into global memory as one access; an assignment nvcc may split into
//                              several
//   copy_async(to, from, n)    16 bytes into shared memory, of which n come from `from` and the rest is zero;
//                              not in HIP
//   copy_async_commit(), copy_async_wait<n>()
//   half_to_float(bits), float_to_half(x)
//   fast_exp(x), fast_divide(x, y)  by the special-function units: a few last bits of fp32 are not right, and
//                              a quotient by more than 2^126 may be 0
//
// and, in namespace pyruntime::runtime, what launchers ask of the machine: Stream, last_error(),
// multiprocessors(), shared_bytes_per_block(), allow_shared_bytes(), resident_blocks(), copy(),
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
