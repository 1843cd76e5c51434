// SwiGLU (Shazeer 2020, eq. 6), with the equations of csrc/cpu/layers/swiglu.cpp; one pass over memory each.
//
//   y = silu(gate) * up        silu(g) = g * s,  s = 1 / (1 + exp(-g))
//   dgate = dy * up * s * (1 + g * (1 - s))        dup = dy * g * s
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;

// Forward: y is written; grad, dgate and dup are null. Backward: the reverse.
template <class T>
struct Operands {
  const T *gate, *up, *grad;
  T *y, *dgate, *dup;
  int64_t gate_up_pitch, y_pitch, dgate_dup_pitch;
  int64_t rows, features;
  int64_t packs;  // per row; 0 if elements are processed one by one
};

PYRUNTIME_DEVICE float sigmoid(float x) {
  return device::fast_divide(1.0f, 1.0f + device::fast_exp(-x));
}

template <int kCount, class T>
PYRUNTIME_DEVICE void forward_at(const Operands<T>& o, int64_t row, int64_t column) {
  const int64_t from = row * o.gate_up_pitch + column;
  float gate[kCount], up[kCount], y[kCount];
  load_floats<kCount>(o.gate + from, gate);
  load_floats<kCount>(o.up + from, up);
#pragma unroll
  for (int e = 0; e < kCount; ++e) y[e] = gate[e] * sigmoid(gate[e]) * up[e];
  store_floats<kCount>(o.y + row * o.y_pitch + column, y);
}

template <int kCount, class T>
PYRUNTIME_DEVICE void backward_at(const Operands<T>& o, int64_t row, int64_t column) {
  const int64_t from = row * o.gate_up_pitch + column, to = row * o.dgate_dup_pitch + column;
  float gate[kCount], up[kCount], grad[kCount], dgate[kCount], dup[kCount];
  load_floats<kCount>(o.gate + from, gate);
  load_floats<kCount>(o.up + from, up);
  load_floats<kCount>(o.grad + row * o.y_pitch + column, grad);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float s = sigmoid(gate[e]), scaled = grad[e] * s;
    dgate[e] = scaled * up[e] * (1.0f + gate[e] * (1.0f - s));
    dup[e] = scaled * gate[e];
  }
  store_floats<kCount>(o.dgate + to, dgate);
  store_floats<kCount>(o.dup + to, dup);
}

template <int kCount, bool kBackward, class T>
PYRUNTIME_DEVICE void at(const Operands<T>& o, int64_t row, int64_t column) {
  if constexpr (kBackward) {
    backward_at<kCount>(o, row, column);
  } else {
    forward_at<kCount>(o, row, column);
  }
}

template <class T, bool kBackward>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
swiglu_rows(PYRUNTIME_PARAMETER Operands<T> parameter) {
  constexpr int kCount = Vector<T>::kCount;
  const Operands<T>& o = device::first_parameter(parameter);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = first; i < o.rows * o.packs; i += step) {
    const auto [row, pack] = split(i, o.packs);
    at<kCount, kBackward>(o, row, pack * kCount);
  }
  const int64_t rest = o.features - o.packs * kCount;
  for (int64_t i = first; i < o.rows * rest; i += step) {
    const auto [row, left] = split(i, rest);
    at<1, kBackward>(o, row, o.packs * kCount + left);
  }
}

template <class T, bool kBackward>
void launch(const PyruntimeSwiglu& swiglu, void* stream) {
  Operands<T> o{static_cast<const T*>(swiglu.gate),
                static_cast<const T*>(swiglu.up),
                kBackward ? static_cast<const T*>(swiglu.y) : nullptr,
                kBackward ? nullptr : static_cast<T*>(swiglu.y),
                static_cast<T*>(swiglu.dgate),
                static_cast<T*>(swiglu.dup),
                swiglu.gate_up_pitch,
                swiglu.y_pitch,
                swiglu.dgate_dup_pitch,
                swiglu.rows,
                swiglu.features,
                0};
  bool packed = rows_are_aligned<T>(o.gate, o.gate_up_pitch) && is_aligned(o.up) &&
                rows_are_aligned<T>(swiglu.y, o.y_pitch);
  if (kBackward) packed = packed && rows_are_aligned<T>(o.dgate, o.dgate_dup_pitch) && is_aligned(o.dup);
  if (packed) o.packs = o.features / Vector<T>::kCount;
  const int64_t work = packed ? o.rows * (o.packs > 0 ? o.packs : 1) : o.rows * o.features;
  const auto kernel = swiglu_rows<T, kBackward>;
  PYRUNTIME_LAUNCH(kernel, blocks_for((work + kThreads - 1) / kThreads, 0, kBlocksPerMultiprocessor),
                   kThreads, 0, stream, o);
}

template <bool kBackward>
void launch_checked(const PyruntimeSwiglu* swiglu, void* stream) {
  require(swiglu != nullptr, "the operands are a null pointer.");
  check_dtype(swiglu->dtype, /*with_fp32=*/true);
  require(swiglu->rows >= 0 && swiglu->features >= 0, "rows=", swiglu->rows, ", features=", swiglu->features,
          "; neither may be negative.");
  check_pitch("gate_up_pitch", swiglu->gate_up_pitch, swiglu->features);
  check_pitch("y_pitch", swiglu->y_pitch, swiglu->features);
  if (kBackward) check_pitch("dgate_dup_pitch", swiglu->dgate_dup_pitch, swiglu->features);
  if (swiglu->rows == 0 || swiglu->features == 0) return;
  require(swiglu->gate != nullptr && swiglu->up != nullptr && swiglu->y != nullptr,
          "one of gate, up and y is a null pointer.");
  require(!kBackward || (swiglu->dgate != nullptr && swiglu->dup != nullptr),
          "one of dgate and dup is a null pointer.");
  with_element(swiglu->dtype, [&](auto element) { launch<decltype(element), kBackward>(*swiglu, stream); });
}

}  // namespace

int pyruntime_swiglu(const PyruntimeSwiglu* swiglu, void* stream) {
  return guarded("swiglu", [&] { launch_checked</*kBackward=*/false>(swiglu, stream); });
}

int pyruntime_swiglu_backward(const PyruntimeSwiglu* swiglu, void* stream) {
  return guarded("swiglu_backward", [&] { launch_checked</*kBackward=*/true>(swiglu, stream); });
}
