// Attention over two sets of keys from that over each (Liu et al. 2023, ring attention):
//
//   lse = log(e^lse_1 + e^lse_2)      out = e^(lse_1 - lse) out_1 + e^(lse_2 - lse) out_2
//
// The result stays in fp32 until the last block is in: rounding it after each would add up.
#include "checks.h"
#include "numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;

struct Merge {
  float* out;
  float* lse;
  const void* block_out;
  const float* block_lse;
  int64_t batch, tokens, heads, width;

  PYRUNTIME_HOST_DEVICE int64_t rows() const { return batch * tokens * heads; }
  // Of row (b, t, h) of out.
  PYRUNTIME_HOST_DEVICE int64_t lse_at(int64_t row) const {
    const int64_t head = row % heads, token = row / heads % tokens, b = row / heads / tokens;
    return (b * heads + head) * tokens + token;
  }
};

struct Weights {
  float mine, theirs, lse;
};

PYRUNTIME_DEVICE Weights weights_of(float mine, float theirs) {
  const float most = mine > theirs ? mine : theirs;
  if (most == -INFINITY) return {0.0f, 0.0f, most};  // no keys in either: the difference would be a NaN
  const float left = expf(mine - most), right = expf(theirs - most);
  return {left / (left + right), right / (left + right), most + logf(left + right)};
}

// A warp for each row: all its lanes have read the row's lse before one of them writes it.
template <class T>
PYRUNTIME_KERNEL(kThreads, 2)
merge_rows(PYRUNTIME_PARAMETER Merge merge) {
  constexpr int kWarps = kThreads / device::kWarpSize, kCount = Vector<T>::kCount;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const bool aligned = is_aligned(merge.out) && is_aligned(merge.block_out) && merge.width % kCount == 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / device::kWarpSize;
       row < merge.rows(); row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t at = merge.lse_at(row);
    const Weights w = weights_of(merge.lse[at], merge.block_lse[at]);
    float* out = merge.out + row * merge.width;
    const T* block = static_cast<const T*>(merge.block_out) + row * merge.width;
    // A set without keys counts nothing, whatever its rows hold.
    const auto merged = [&](float mine, float theirs) {
      return (w.mine > 0 ? w.mine * mine : 0.0f) + (w.theirs > 0 ? w.theirs * theirs : 0.0f);
    };
    if (aligned) {
      for (int i = lane * kCount; i < merge.width; i += device::kWarpSize * kCount) {
        const Vector<T> theirs = load_vector(block + i);
#pragma unroll
        for (int part = 0; part < kCount; part += 4) {
          Vector<float> mine = load_vector(out + i + part);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            mine.values[e] = merged(mine.values[e], to_float(theirs.values[part + e]));
          device::store_global(out + i + part, bits_of(mine));
        }
      }
    } else {
      for (int i = lane; i < merge.width; i += device::kWarpSize) out[i] = merged(out[i], to_float(block[i]));
    }
    device::warp_barrier();
    if (lane == 0) merge.lse[at] = w.lse;
  }
}

template <class T>
void launch(const Merge& merge, runtime::Stream stream) {
  const auto kernel = merge_rows<T>;
  const int64_t work = merge.rows() * device::kWarpSize / kThreads + 1;
  PYRUNTIME_LAUNCH(kernel, blocks_for(work, 0, 8), kThreads, 0, stream, merge);
}

}  // namespace

int pyruntime_lse_merge(float* out, float* lse, const void* block_out, const float* block_lse, int64_t batch,
                        int64_t tokens, int64_t heads, int64_t width, int32_t dtype, void* stream) {
  return guarded("lse_merge", [&] {
    check_dtype(dtype, /*with_fp32=*/true);
    require(batch >= 0 && tokens >= 0 && heads >= 0 && width >= 0, "shape [", batch, ", ", tokens, ", ",
            heads, ", ", width, "]; no size may be negative.");
    const Merge merge{out, lse, block_out, block_lse, batch, tokens, heads, width};
    if (merge.rows() == 0) return;
    require(
        lse != nullptr && block_lse != nullptr && (width == 0 || (out != nullptr && block_out != nullptr)),
        "one of out, lse, block_out and block_lse is a null pointer.");
    const auto on = static_cast<runtime::Stream>(stream);
    if (dtype == PYRUNTIME_BF16) return launch<Bf16>(merge, on);
    if (dtype == PYRUNTIME_FP16) return launch<Fp16>(merge, on);
    launch<float>(merge, on);
  });
}
