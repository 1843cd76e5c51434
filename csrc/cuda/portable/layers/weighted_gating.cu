// Gate and up of an expert's rows joined and multiplied by the rows' weights p, with the equations of
// csrc/cpu/layers/weighted_gating.cpp; one pass over memory each. With g = min(gate, limit),
// u = clamp(up, -limit, limit) + shift, s = 1 / (1 + exp(-alpha g)):
//
//   y = p * g * s * u                      dp = sum over the row of dy * g * s * u
//   dgate = p * dy * u * s * (1 + alpha * g * (1 - s)), 0 beyond the limit
//   dup = p * dy * g * s, 0 beyond the limits
//
// A warp has a row, so it sums dp in the order of its lanes: every run gives the same bits.
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / device::kWarpSize;
// The backward needs more registers than four blocks leave.
constexpr int blocks_per_multiprocessor(bool backward) {
  return backward ? 3 : 4;
}

// Forward: grad, dgate_up and dweights are null.
template <class T>
struct Operands {
  const T *gate_up, *grad;
  const float* weights;
  T *y, *dgate_up;
  float* dweights;
  int64_t rows;
  int features;
  int packs;  // per row; 0 if elements are processed one by one
  float alpha, limit, shift;
};

template <bool kInterleaved, int kCount, class T>
PYRUNTIME_DEVICE void load_pair(const T* row, int features, int column, float (&gate)[kCount],
                                float (&up)[kCount]) {
  if constexpr (!kInterleaved) {
    load_floats<kCount>(row + column, gate);
    load_floats<kCount>(row + features + column, up);
  } else if constexpr (kCount == 1) {
    load_floats<1>(row + 2 * column, gate);
    load_floats<1>(row + 2 * column + 1, up);
  } else {
    float both[2 * kCount];
    load_floats<2 * kCount>(row + 2 * column, both);
#pragma unroll
    for (int e = 0; e < kCount; ++e) gate[e] = both[2 * e], up[e] = both[2 * e + 1];
  }
}

template <bool kInterleaved, int kCount, class T>
PYRUNTIME_DEVICE void store_pair(T* row, int features, int column, const float (&gate)[kCount],
                                 const float (&up)[kCount]) {
  if constexpr (!kInterleaved) {
    store_floats<kCount>(row + column, gate);
    store_floats<kCount>(row + features + column, up);
  } else if constexpr (kCount == 1) {
    store_floats<1>(row + 2 * column, gate);
    store_floats<1>(row + 2 * column + 1, up);
  } else {
    float both[2 * kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) both[2 * e] = gate[e], both[2 * e + 1] = up[e];
    store_floats<2 * kCount>(row + 2 * column, both);
  }
}

// Returns these elements' part of dp; 0 in the forward pass.
template <bool kBackward, bool kInterleaved, int kCount, class T>
PYRUNTIME_DEVICE float gate_at(const Operands<T>& o, int64_t row, int column, float weight) {
  const int64_t narrow = row * o.features, wide = 2 * narrow;
  float gate[kCount], up[kCount], y[kCount], dot = 0.0f;
  load_pair<kInterleaved>(o.gate_up + wide, o.features, column, gate, up);
  if constexpr (kBackward) load_floats<kCount>(o.grad + narrow + column, y);  // its gradient at first
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const bool is_gate_over = gate[e] > o.limit, is_up_over = up[e] > o.limit, is_up_under = up[e] < -o.limit;
    const float g = is_gate_over ? o.limit : gate[e];
    const float u = (is_up_over ? o.limit : is_up_under ? -o.limit : up[e]) + o.shift;
    const float s = device::fast_divide(1.0f, 1.0f + device::fast_exp(-o.alpha * g)), glu = g * s;
    if constexpr (kBackward) {
      const float dy = y[e], scaled = weight * dy;
      dot += dy * (glu * u);
      gate[e] = is_gate_over ? 0.0f : scaled * u * s * (1.0f + o.alpha * g * (1.0f - s));
      up[e] = is_up_over || is_up_under ? 0.0f : scaled * glu;
    }
    y[e] = weight * (glu * u);
  }
  store_floats<kCount>(o.y + narrow + column, y);
  if constexpr (kBackward) store_pair<kInterleaved>(o.dgate_up + wide, o.features, column, gate, up);
  return dot;
}

template <class T, bool kBackward, bool kInterleaved>
PYRUNTIME_KERNEL(kThreads, blocks_per_multiprocessor(kBackward))
gate_rows(PYRUNTIME_PARAMETER Operands<T> parameter) {
  constexpr int kCount = Vector<T>::kCount, kLanes = device::kWarpSize;
  const Operands<T>& o = device::first_parameter(parameter);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < o.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const float weight = o.weights[row];
    float dot = 0.0f;
    for (int pack = lane; pack < o.packs; pack += kLanes)
      dot += gate_at<kBackward, kInterleaved, kCount>(o, row, pack * kCount, weight);
    for (int column = o.packs * kCount + lane; column < o.features; column += kLanes)
      dot += gate_at<kBackward, kInterleaved, 1>(o, row, column, weight);
    if constexpr (kBackward) {
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) dot += device::shuffle_xor(dot, mask);
      if (lane == 0) o.dweights[row] = dot;
    }
  }
}

template <class T, bool kBackward>
void launch(const PyruntimeGating& gating, void* stream) {
  Operands<T> o{static_cast<const T*>(gating.gate_up),
                static_cast<const T*>(gating.grad),
                gating.weights,
                static_cast<T*>(gating.y),
                static_cast<T*>(gating.dgate_up),
                gating.dweights,
                gating.rows,
                static_cast<int>(gating.features),
                0,
                gating.alpha,
                gating.limit,
                gating.shift};
  bool packed = rows_are_aligned<T>(o.gate_up, o.features) && rows_are_aligned<T>(o.y, o.features);
  if (kBackward) packed = packed && is_aligned(o.grad) && is_aligned(o.dgate_up);
  if (packed) o.packs = o.features / Vector<T>::kCount;
  const auto kernel = gating.interleaved ? gate_rows<T, kBackward, true> : gate_rows<T, kBackward, false>;
  const int blocks = blocks_for((o.rows + kWarps - 1) / kWarps, 0, blocks_per_multiprocessor(kBackward));
  PYRUNTIME_LAUNCH(kernel, blocks, kThreads, 0, stream, o);
}

template <bool kBackward>
void launch_checked(const PyruntimeGating* gating, void* stream) {
  require(gating != nullptr, "the operands are a null pointer.");
  check_dtype(gating->dtype, /*with_fp32=*/true);
  require(gating->rows >= 0 && gating->features >= 0 && gating->features < int64_t{1} << 30,
          "rows=", gating->rows, ", features=", gating->features,
          "; neither may be negative, and features must be below 2^30.");
  require(gating->interleaved == 0 || gating->interleaved == 1, "interleaved=", gating->interleaved,
          "; use 0 (gate before up) or 1 (in turns).");
  require(gating->limit >= 0, "limit=", gating->limit, "; it may not be negative.");
  if (gating->rows == 0) return;
  require(gating->weights != nullptr, "weights is a null pointer.");
  require(!kBackward || gating->dweights != nullptr, "dweights is a null pointer.");
  require(gating->features == 0 || (gating->gate_up != nullptr && gating->y != nullptr),
          "one of gate_up and y is a null pointer.");
  require(!kBackward || gating->features == 0 || (gating->grad != nullptr && gating->dgate_up != nullptr),
          "one of grad and dgate_up is a null pointer.");
  with_element(gating->dtype, [&](auto element) { launch<decltype(element), kBackward>(*gating, stream); });
}

}  // namespace

int pyruntime_weighted_gating(const PyruntimeGating* gating, void* stream) {
  return guarded("weighted_gating", [&] { launch_checked</*kBackward=*/false>(gating, stream); });
}

int pyruntime_weighted_gating_backward(const PyruntimeGating* gating, void* stream) {
  return guarded("weighted_gating_backward", [&] { launch_checked</*kBackward=*/true>(gating, stream); });
}
