// Stores and sums chunks, at the same place in every rank's slot, through one address for all copies.
#include "checks.h"
#include "multicast.cuh"

namespace pyruntime::portable {

namespace {

constexpr int kThreads = 256, kFlagThreads = 128;
// Takes few multiprocessors from a GEMM, because stores need no answer. Not measured.
constexpr int kMostBlocks = 16;

// `count` units of `size` bytes from byte `at` of a workspace on: aligned vectors of 16 bytes, and the other
// units before and after them.
struct Span {
  int64_t at, count, size, head, vectors;

  PYRUNTIME_HOST_DEVICE Span(int64_t at, int64_t count, int64_t size) : at(at), count(count), size(size) {
    const int64_t before = (16 - at % 16) % 16 / size;
    head = before < count ? before : count;
    vectors = (count - head) * size / 16;
  }
  PYRUNTIME_HOST_DEVICE int64_t per_vector() const { return 16 / size; }
  PYRUNTIME_HOST_DEVICE int64_t others() const { return count - vectors * per_vector(); }
  // The first unit of vector v, and the i-th of the other units.
  PYRUNTIME_HOST_DEVICE int64_t of_vector(int64_t v) const { return head + v * per_vector(); }
  PYRUNTIME_HOST_DEVICE int64_t other(int64_t i) const { return i < head ? i : i + vectors * per_vector(); }
};

PYRUNTIME_DEVICE int64_t own_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

PYRUNTIME_DEVICE int64_t all_threads() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

// Also rewrites this rank's own copy with the same bits.
PYRUNTIME_KERNEL(kThreads, 4)
copy_to_copies(PYRUNTIME_PARAMETER Group parameter, Copies copies, Span span) {
  const Group& group = device::first_parameter(parameter);
  if (has_failed(group)) return;  // a credit may be missing
  alias_fence();
  const unsigned char* own = group.bases[group.rank] + span.at;
  for (int64_t v = own_thread(); v < span.vectors; v += all_threads()) {
    const int64_t at = span.of_vector(v);
    store_to_copies(group, copies, span.at + at, *reinterpret_cast<const uint4*>(own + at));
  }
  const int64_t others = span.others();
  for (int64_t i = own_thread(); i < others * group.world_size(); i += all_threads()) {
    const int64_t at = span.other(i % others);
    const auto peer = static_cast<int>(i / others);
    if (peer != group.rank) group.bases[peer][span.at + at] = own[at];
  }
  alias_fence();
}

template <class T>
PYRUNTIME_DEVICE void store_with_bias(T* out, int64_t i, float sum, const T* bias, int64_t width) {
  out[i] = round_to<T>(bias == nullptr ? sum : sum + to_float(bias[i % width]));
}

// Elements outside whole vectors are summed in rank order, as elsewhere.
template <class T>
PYRUNTIME_KERNEL(kThreads, 2)
sum_copies(PYRUNTIME_PARAMETER Group parameter, Copies copies, Span span, T* out, const T* bias,
           int64_t width) {
  const Group& group = device::first_parameter(parameter);
  if (has_failed(group)) return;  // a part may be missing
  alias_fence();
  for (int64_t v = own_thread(); v < span.vectors; v += all_threads()) {
    const int64_t first = span.of_vector(v);
    const Vector<T> sum = sum_of_copies<T>(group, copies, span.at + first * span.size);
    if (bias == nullptr && is_aligned(out + first)) {
      store_vector(out + first, sum);
      continue;
    }
#pragma unroll
    for (int e = 0; e < Vector<T>::kCount; ++e) {
      store_with_bias(out, first + e, to_float(sum.values[e]), bias, width);
    }
  }
  for (int64_t i = own_thread(); i < span.others(); i += all_threads()) {
    const int64_t at = span.other(i);
    float sum = 0.0f;
    for (int rank = 0; rank < group.world_size(); ++rank) {
      sum += to_float(reinterpret_cast<const T*>(group.bases[rank] + span.at)[at]);
    }
    store_with_bias(out, at, to_float(round_to<T>(sum)), bias, width);  // as the switch rounds
  }
  alias_fence();
}

// Waits for the credits of all peers. to_put: for a put, which runs ahead of its flight.
PYRUNTIME_KERNEL(kFlagThreads, 1)
await_leave_of_all(PYRUNTIME_PARAMETER Group group, bool to_put) {
  const uint64_t epoch = (to_put ? group.control().puts : group.control().epochs) + 1;
  for (int peer = static_cast<int>(threadIdx.x); peer < group.world_size(); peer += kFlagThreads) {
    if (peer != group.rank && !wait_for_credit(group, peer, epoch)) return;
  }
}

PYRUNTIME_KERNEL(kFlagThreads, 1)
raise_flags_of_all(PYRUNTIME_PARAMETER Group group, int first, int flags) {
  if (has_failed(group)) return;
  const uint64_t epoch = group.control().puts + 1;
  device::release_system();
  for (int i = static_cast<int>(threadIdx.x); i < flags * group.world_size(); i += kFlagThreads) {
    const int peer = i / flags;
    if (peer != group.rank) {
      device::store_relaxed_system(group.flag(peer, group.rank, first + i % flags), epoch);
    }
  }
}

// Checks the common arguments of put_to_all and sum_copies; returns the chunk's offset in a workspace.
int64_t checked_place(const Group& group, const void* copies, int64_t offset, int64_t bytes) {
  if (const char* why = runtime::why_no_multicast(copy_to_copies)) require(false, why);
  require(copies != nullptr && is_aligned(copies), "the multicast address is ", copies,
          "; it must be mapped, at a multiple of 16 bytes.");
  require(bytes >= 0 && offset >= 0 && bytes <= group.layout.slot_bytes - offset, "bytes ", offset, " to ",
          offset + bytes, " of a slot of ", group.layout.slot_bytes, "; make a larger workspace.");
  return group.data<unsigned char>(group.rank) + offset - group.bases[group.rank];
}

int blocks_of(const Span& span) {
  return blocks_for(span.vectors / kThreads + 1, kMostBlocks, 1);
}

}  // namespace
}  // namespace pyruntime::portable

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_can_multicast(void) {
  return guarded("multicast", [&] {
    if (const char* why = runtime::why_no_multicast(copy_to_copies)) require(false, why);
  });
}

int pyruntime_put_to_all(const PyruntimeGroup* group, void* multicast, int64_t offset, int64_t bytes,
                         int32_t first, int32_t flags, void* stream) {
  return guarded("put_to_all", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MULTICAST);
    const Span span(checked_place(view, multicast, offset, bytes), bytes, 1);
    require(first >= 0 && flags >= 1 && flags <= view.layout.flags - first, "flags ", first, " to ",
            int64_t{first} + flags, "; this workspace has ", view.layout.flags, " a rank.");
    PYRUNTIME_LAUNCH(await_leave_of_all, 1, kFlagThreads, 0, stream, view, /*to_put=*/true);
    if (bytes > 0) {
      PYRUNTIME_LAUNCH(copy_to_copies, blocks_of(span), kThreads, 0, stream, view,
                       static_cast<Copies>(multicast), span);
    }
    PYRUNTIME_LAUNCH(raise_flags_of_all, 1, kFlagThreads, 0, stream, view, first, flags);
  });
}

int pyruntime_await_leave(const PyruntimeGroup* group, void* stream) {
  return guarded("await_leave", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MULTICAST);
    PYRUNTIME_LAUNCH(await_leave_of_all, 1, kFlagThreads, 0, stream, view,
                     /*to_put=*/false);
  });
}

int pyruntime_sum_copies(const PyruntimeGroup* group, void* multicast, void* out, int64_t offset,
                         int64_t count, int32_t dtype, const void* bias, int64_t width, void* stream) {
  return guarded("sum_copies", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MULTICAST);
    check_dtype(dtype, /*with_fp32=*/true);
    const int64_t size = element_bytes(dtype);
    require(count >= 0, "count=", count, "; it must not be negative.");
    require(offset % size == 0, "offset=", offset, "; it must be a multiple of an element's ", size,
            " bytes.");
    require(bias == nullptr || width >= 1, "width=", width, "; a bias has at least one element.");
    const Span span(checked_place(view, multicast, offset, count * size), count, size);
    if (count == 0) return;
    require(out != nullptr, "the result is a null pointer.");
    with_element(dtype, [&](auto element) {
      using T = decltype(element);
      const auto kernel = sum_copies<T>;
      PYRUNTIME_LAUNCH(kernel, blocks_for(span.vectors / kThreads + 1, 0, 2), kThreads, 0, stream, view,
                       static_cast<Copies>(multicast), span, static_cast<T*>(out),
                       static_cast<const T*>(bias), width);
    });
  });
}
