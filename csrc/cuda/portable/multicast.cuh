// Stores and sums through a multicast address, which stands for the same place in the memory of several
// devices. One store writes all copies, one load adds them in the switch (NVLink SHARP). Only the
// instructions of PTX ISA, "Multimem addresses" and "multimem.ld_reduce, multimem.st, multimem.red", may use
// such an address, from sm_90 on. The switch decides the order and the precision of the sum.
//
// A copy's own address and the multicast address are aliases. To order an access through one before an access
// through the other, the flag's release and acquire are not enough: an alias proxy fence is needed on the way
// between them (PTX ISA, "Causality order", the third rule of proxy-preserved base causality order). So every
// thread that uses a multicast address calls alias_fence() before and after.
//
// The host dialect stores into every copy and sums the last rank's copy first, so that no caller comes to
// rely on the order. AMD GPUs have no such address, and the launchers refuse.
#pragma once

#include <type_traits>

#include "numbers.cuh"
#include "workspace.cuh"

namespace pyruntime::portable {

// The address of all ranks' workspaces. `at` below: bytes from it, a multiple of 16.
using Copies = unsigned char*;

#if defined(__CUDACC__)

PYRUNTIME_DEVICE void alias_fence() {
  asm volatile("fence.proxy.alias;" ::: "memory");
}

PYRUNTIME_DEVICE void store_to_copies(const Group&, Copies copies, int64_t at, uint4 bits) {
#if __CUDA_ARCH__ >= 900
  // .v4.f32 is the only 16-byte vector for any type; a store changes no bits.
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(copies + at),
               "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
#else
  __trap();  // pyruntime_can_multicast() has said no
#endif
}

template <class T>
PYRUNTIME_DEVICE Vector<T> sum_of_copies(const Group&, Copies copies, int64_t at) {
  uint4 bits{};
#if __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<T, Bf16>) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(copies + at)
                 : "memory");
  } else if constexpr (std::is_same_v<T, Fp16>) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(copies + at)
                 : "memory");
  } else {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(copies + at)
                 : "memory");
  }
#else
  __trap();
#endif
  Vector<T> sum;
  device::copy_bits(&sum, &bits, sizeof(sum));
  return sum;
}

#elif defined(__HIP__) || defined(__HIPCC__)

PYRUNTIME_DEVICE void alias_fence() {}

PYRUNTIME_DEVICE void store_to_copies(const Group&, Copies, int64_t, uint4) {
  __builtin_trap();  // pyruntime_can_multicast() has said no
}

template <class T>
PYRUNTIME_DEVICE Vector<T> sum_of_copies(const Group&, Copies, int64_t) {
  __builtin_trap();
}

#else

inline void alias_fence() {}

inline void store_to_copies(const Group& group, Copies, int64_t at, uint4 bits) {
  for (int rank = 0; rank < group.world_size(); ++rank) {
    device::copy_bits(group.bases[rank] + at, &bits, sizeof(bits));
  }
}

template <class T>
Vector<T> sum_of_copies(const Group& group, Copies, int64_t at) {
  Vector<T> sum;
  for (int e = 0; e < Vector<T>::kCount; ++e) {
    float total = 0.0f;
    for (int rank = group.world_size() - 1; rank >= 0; --rank) {
      total += to_float(reinterpret_cast<const T*>(group.bases[rank] + at)[e]);
    }
    sum.values[e] = round_to<T>(total);
  }
  return sum;
}

#endif

}  // namespace pyruntime::portable
