// Sums the ranks' parts in rank order, in fp32 (fp64 for doubles), rounded once at the end.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace pyruntime::cpu {

struct Sum {
  c10::ScalarType dtype;  // of parts and bias: fp32, bf16, fp16 or fp64
  std::vector<const void*> parts;
  int64_t count;  // elements in each part
  const void* bias = nullptr;
  int64_t width = 1;  // of bias
  // The sum of other ranks so far, added first; may be null.
  const void* partial = nullptr;
  c10::ScalarType partial_dtype;
  void* out;
  c10::ScalarType out_dtype;
};

// out[i] = round([partial[i] +] parts[0][i] + parts[1][i] + ... [+ bias[i % width]]). The arrays do not
// overlap, except that `out` may be an array of out_dtype among them.
void sum_over_ranks(const Sum& request);

// out[i] = round(parts[0][i] + parts[1][i] + ... [+ bias[i % width]]) for 0 <= i < count. All arrays have
// `dtype` (fp32, bf16, fp16 or fp64) and do not overlap, except that `out` may be one of the parts.
void sum_in_rank_order(c10::ScalarType dtype, void* out, const std::vector<const void*>& parts, int64_t count,
                       const void* bias, int64_t width);

}  // namespace pyruntime::cpu
