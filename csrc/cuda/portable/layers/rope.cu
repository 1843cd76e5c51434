// Rotary position embedding in the half-rotated convention of csrc/cpu/layers/rope.cpp, on the heads of q and
// k of all tokens in one launch.
//
//   [a | b] are the halves of a head:   a' = a cos_a - b sin_a        b' = b cos_b + a sin_b
//   its inverse (the transpose):        a  = a' cos_a + b' sin_b      b  = b' cos_b - a' sin_a
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;
// A thread reads its angles once for so many heads of a token: angles are fp32, twice as large as a head.
constexpr int kHeadsPerThread = 8;

struct Rotation {
  PyruntimeRope rope;
  int32_t heads;    // in all parts that are written
  int32_t slots;    // threads that share the heads of a token, for each place in a head
  int32_t columns;  // places in half a head
};

// A head's source and destination.
template <class T>
struct Head {
  const T* from;
  T* to;
  bool rotated;
};

template <class T>
PYRUNTIME_DEVICE Head<T> head_at(const PyruntimeRope& rope, int64_t batch, int64_t position, int64_t head) {
  int part = 0;
  for (; part < 2 && head >= rope.heads[part]; ++part) head -= rope.heads[part];
  const auto offset = [&](const PyruntimeHeads& side) {
    return batch * side.batch_stride + position * side.position_stride + head * side.head_stride;
  };
  const PyruntimeHeads &from = rope.from[part], &to = rope.to[part];
  return {static_cast<const T*>(from.data) + offset(from), static_cast<T*>(to.data) + offset(to), part < 2};
}

template <class T, int kCount, bool kInverse>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
rotate_heads(PYRUNTIME_PARAMETER Rotation parameter) {
  const Rotation& r = device::first_parameter(parameter);
  const PyruntimeRope& rope = r.rope;
  const int64_t half = rope.head_dim / 2, of_token = static_cast<int64_t>(r.slots) * r.columns;
  const int64_t count = rope.batch * rope.positions * of_token;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const auto [token, place] = split(i, of_token);
    const auto [slot, column] = split(place, r.columns);
    const auto [batch, position] = split(token, rope.positions);
    const int64_t a_at = column * kCount, b_at = half + a_at, angle = position * rope.head_dim;
    float cos_a[kCount], sin_a[kCount], cos_b[kCount], sin_b[kCount];
    load_floats<kCount>(rope.cos + angle + a_at, cos_a);
    load_floats<kCount>(rope.cos + angle + b_at, cos_b);
    load_floats<kCount>(rope.sin + angle + a_at, sin_a);
    load_floats<kCount>(rope.sin + angle + b_at, sin_b);
    for (int64_t head = slot; head < r.heads; head += r.slots) {
      const Head<T> here = head_at<T>(rope, batch, position, head);
      float a[kCount], b[kCount], to_a[kCount], to_b[kCount];
      load_floats<kCount>(here.from + a_at, a);
      load_floats<kCount>(here.from + b_at, b);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        to_a[e] = kInverse ? a[e] * cos_a[e] + b[e] * sin_b[e] : a[e] * cos_a[e] - b[e] * sin_a[e];
        to_b[e] = kInverse ? b[e] * cos_b[e] - a[e] * sin_a[e] : b[e] * cos_b[e] + a[e] * sin_b[e];
        if (!here.rotated) to_a[e] = a[e], to_b[e] = b[e];
      }
      store_floats<kCount>(here.to + a_at, to_a);
      store_floats<kCount>(here.to + b_at, to_b);
    }
  }
}

template <class T, int kCount>
void launch(const PyruntimeRope& rope, int64_t heads, void* stream) {
  const int64_t slots = (heads + kHeadsPerThread - 1) / kHeadsPerThread, columns = rope.head_dim / 2 / kCount;
  const Rotation rotation{rope, static_cast<int32_t>(heads), static_cast<int32_t>(slots),
                          static_cast<int32_t>(columns)};
  const auto kernel =
      rope.inverse != 0 ? rotate_heads<T, kCount, /*kInverse=*/true> : rotate_heads<T, kCount, false>;
  const int64_t work = rope.batch * rope.positions * slots * columns;
  PYRUNTIME_LAUNCH(kernel, blocks_for((work + kThreads - 1) / kThreads, 0, kBlocksPerMultiprocessor),
                   kThreads, 0, stream, rotation);
}

template <class T>
bool takes_packs(const PyruntimeRope& rope, int parts) {
  constexpr int kCount = Vector<T>::kCount;
  const auto lies_so = [](const PyruntimeHeads& side) {
    return is_aligned(side.data) && side.batch_stride % kCount == 0 && side.position_stride % kCount == 0 &&
           side.head_stride % kCount == 0;
  };
  bool all = rope.head_dim / 2 % kCount == 0 && is_aligned(rope.cos) && is_aligned(rope.sin);
  for (int part = 0; part < parts; ++part) all = all && lies_so(rope.from[part]) && lies_so(rope.to[part]);
  return all;
}

template <class T>
void launch(const PyruntimeRope& rope, void* stream) {
  const int parts = rope.from[2].data == rope.to[2].data ? 2 : 3;  // v stays where it is
  const int64_t heads = rope.heads[0] + rope.heads[1] + (parts == 3 ? rope.heads[2] : 0);
  if (heads == 0) return;
  if (takes_packs<T>(rope, parts)) return launch<T, Vector<T>::kCount>(rope, heads, stream);
  launch<T, 1>(rope, heads, stream);
}

void check_rope(const PyruntimeRope* rope) {
  require(rope != nullptr, "the operands are a null pointer.");
  check_dtype(rope->dtype, /*with_fp32=*/true);
  require(rope->batch >= 0 && rope->positions >= 0, "batch=", rope->batch, ", positions=", rope->positions,
          "; neither may be negative.");
  require(rope->head_dim >= 0 && rope->head_dim % 2 == 0 && rope->head_dim < 1 << 20,
          "head_dim=", rope->head_dim, "; it must be even, and below 2^20.");
  const char* const names[] = {"q", "k", "v"};
  for (int part = 0; part < 3; ++part) {
    require(rope->heads[part] >= 0 && rope->heads[part] < 1 << 20, names[part], " has ", rope->heads[part],
            " heads; it may have 0 to 2^20.");
  }
  if (rope->batch == 0 || rope->positions == 0 || rope->head_dim == 0) return;
  require(rope->cos != nullptr && rope->sin != nullptr, "one of cos and sin is a null pointer.");
  for (int part = 0; part < 3; ++part) {
    const bool here = rope->from[part].data != nullptr && rope->to[part].data != nullptr;
    const bool left = part == 2 && rope->from[part].data == rope->to[part].data;
    require(here || left || rope->heads[part] == 0, names[part], " is a null pointer.");
  }
}

}  // namespace

int pyruntime_rope(const PyruntimeRope* rope, void* stream) {
  return guarded("rope", [&] {
    check_rope(rope);
    if (rope->batch == 0 || rope->positions == 0 || rope->head_dim == 0) return;
    with_element(rope->dtype, [&](auto element) { launch<decltype(element)>(*rope, stream); });
  });
}
