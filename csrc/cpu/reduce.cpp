#include "cpu/reduce.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

namespace {

constexpr int64_t kBlock = 2048;  // accumulators of one block stay in the L1 cache

struct AddPart {
  template <typename T, typename Accumulator>
  static PYRUNTIME_INLINE void run(Accumulator* sum, const T* part, int64_t count) {
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<Accumulator>(layers::load(part[i]));
  }
};

struct Round {
  template <typename T, typename Accumulator>
  static PYRUNTIME_INLINE void run(T* out, const Accumulator* sum, int64_t count) {
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) layers::store(out[i], sum[i]);
  }
};

// Calls f with a value of type `dtype`, which check_summable() has accepted.
template <typename F>
void with_type(c10::ScalarType dtype, const F& f) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return f(float());
    case c10::ScalarType::BFloat16:
      return f(c10::BFloat16());
    case c10::ScalarType::Half:
      return f(c10::Half());
    default:
      return f(double());
  }
}

template <typename Accumulator>
void add_from(Accumulator* sum, c10::ScalarType dtype, const void* part, int64_t begin, int64_t count) {
  with_type(dtype, [&](auto of_type) {
    layers::simd_run<AddPart>(sum, static_cast<const decltype(of_type)*>(part) + begin, count);
  });
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
    with_type(request.out_dtype, [&](auto of_type) {
      const Accumulator* rounded = sum;
      layers::simd_run<Round>(static_cast<decltype(of_type)*>(request.out) + begin, rounded, length);
    });
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
