// Rounds two sums to 16 bits each by the instruction for pairs, bit for bit as portable/numbers.cuh does.
#pragma once

#include <cuda_bf16.h>

#include "cuda/portable/numbers.cuh"

namespace pyruntime::sm90 {

template <class T>
PYRUNTIME_DEVICE uint32_t round_pair(float low, float high);

template <>
PYRUNTIME_DEVICE uint32_t round_pair<portable::Bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  // The instruction turns NaN into 0x7fff.
  __nv_bfloat162 values;
  memcpy(&values, &pair, sizeof(pair));
  const uint32_t nans = __hneu2_mask(values, values);
  return (pair & ~nans) | (0x7fc07fc0u & nans);
}

template <>
PYRUNTIME_DEVICE uint32_t round_pair<portable::Fp16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace pyruntime::sm90
