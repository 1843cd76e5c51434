#include "checks.h"
#include "numbers.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread before its first store

PYRUNTIME_KERNEL(kThreads, 4)
copy_bytes(unsigned char* to, const unsigned char* from, int64_t bytes, int64_t vectors) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  int64_t i = thread;
  for (; i + (kInFlight - 1) * stride < vectors; i += kInFlight * stride) {
    uint4 values[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) values[j] = source[i + j * stride];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) target[i + j * stride] = values[j];
  }
  for (; i < vectors; i += stride) target[i] = source[i];
  for (int64_t b = vectors * 16 + thread; b < bytes; b += stride) to[b] = from[b];
}

}  // namespace

int pyruntime_copy(void* to, const void* from, int64_t bytes, int32_t blocks, void* stream) {
  return guarded("copy", [&] {
    require(bytes >= 0 && blocks >= 0, "bytes=", bytes, ", blocks=", blocks, "; neither may be negative.");
    if (bytes == 0) return;
    require(to != nullptr && from != nullptr, "one end of the copy is a null pointer.");
    const int64_t vectors = is_aligned(to) && is_aligned(from) ? bytes / 16 : 0;
    const int64_t work = (bytes + 16 * kThreads - 1) / (16 * kThreads);
    PYRUNTIME_LAUNCH(copy_bytes, blocks_for(work, blocks, 1), kThreads, 0,
                     static_cast<runtime::Stream>(stream), static_cast<unsigned char*>(to),
                     static_cast<const unsigned char*>(from), bytes, vectors);
  });
}
