#include "cpu/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

// One build runs everywhere: the loader picks the clone that the CPU can run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PYRUNTIME_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PYRUNTIME_SIMD_CLONES
#endif

namespace pyruntime::cpu {

namespace {

constexpr int64_t kBlock = 2048;  // accumulators of one block stay in the L1 cache

// bf16 by integer arithmetic, which vectorises; the same rounding (to nearest even) as c10::BFloat16.
PYRUNTIME_SIMD_CLONES void add_bf16(float* sum, const uint16_t* part, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(part[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    sum[i] += value;
  }
}

PYRUNTIME_SIMD_CLONES void round_to_bf16(uint16_t* out, const float* sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &sum[i], sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out[i] = static_cast<uint16_t>(sum[i] != sum[i] ? 0x7fc0u : rounded);
  }
}

template <typename T, typename Accumulator>
void add(Accumulator* sum, const T* part, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<Accumulator>(part[i]);
}
template <>
void add(float* sum, const c10::BFloat16* part, int64_t count) {
  add_bf16(sum, reinterpret_cast<const uint16_t*>(part), count);
}

template <typename T, typename Accumulator>
void round_to(T* out, const Accumulator* sum, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(sum[i]);
}
template <>
void round_to(c10::BFloat16* out, const float* sum, int64_t count) {
  round_to_bf16(reinterpret_cast<uint16_t*>(out), sum, count);
}

template <typename Accumulator>
void add_from(Accumulator* sum, c10::ScalarType dtype, const void* part, int64_t begin, int64_t count) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return add(sum, static_cast<const float*>(part) + begin, count);
    case c10::ScalarType::BFloat16:
      return add(sum, static_cast<const c10::BFloat16*>(part) + begin, count);
    case c10::ScalarType::Half:
      return add(sum, static_cast<const c10::Half*>(part) + begin, count);
    default:
      return add(sum, static_cast<const double*>(part) + begin, count);
  }
}

template <typename Accumulator>
void round_into(c10::ScalarType dtype, void* out, const Accumulator* sum, int64_t begin, int64_t count) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return round_to(static_cast<float*>(out) + begin, sum, count);
    case c10::ScalarType::BFloat16:
      return round_to(static_cast<c10::BFloat16*>(out) + begin, sum, count);
    case c10::ScalarType::Half:
      return round_to(static_cast<c10::Half*>(out) + begin, sum, count);
    default:
      return round_to(static_cast<double*>(out) + begin, sum, count);
  }
}

template <typename Accumulator>
void sum_blocks(const Sum& request) {
  alignas(64) Accumulator sum[kBlock];
  for (int64_t begin = 0; begin < request.count; begin += kBlock) {
    const int64_t length = std::min(kBlock, request.count - begin);
    std::fill_n(sum, length, Accumulator(0));
    if (request.partial != nullptr) {
      add_from(sum, request.partial_dtype, request.partial, begin, length);
    }
    for (const void* part : request.parts) add_from(sum, request.dtype, part, begin, length);
    if (request.bias != nullptr) {
      for (int64_t done = 0; done < length;) {
        const int64_t column = (begin + done) % request.width;
        const int64_t run = std::min(request.width - column, length - done);
        add_from(sum + done, request.dtype, request.bias, column, run);
        done += run;
      }
    }
    round_into(request.out_dtype, request.out, sum, begin, length);
  }
}

void check_summable(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 ||
                       dtype == c10::ScalarType::Half || dtype == c10::ScalarType::Double,
                   "Cannot sum ", c10::toString(dtype),
                   " over ranks; use float32, bfloat16, float16 or float64.");
}

}  // namespace

void sum_over_ranks(const Sum& request) {
  check_summable(request.dtype);
  check_summable(request.out_dtype);
  if (request.partial != nullptr) check_summable(request.partial_dtype);
  if (request.dtype == c10::ScalarType::Double) {
    sum_blocks<double>(request);
  } else {
    sum_blocks<float>(request);
  }
}

void sum_in_rank_order(c10::ScalarType dtype, void* out, const std::vector<const void*>& parts, int64_t count,
                       const void* bias, int64_t width) {
  sum_over_ranks({dtype, parts, count, bias, width, nullptr, dtype, out, dtype});
}

}  // namespace pyruntime::cpu
