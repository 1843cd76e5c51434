// What surrounds a copy engine's copies into a peer's slot: kernels of one block, in the stream of the
// copies.
#pragma once

#include "workspace.cuh"

namespace pyruntime::portable {

namespace {

// Puts run ahead of the flights that they belong to, and so they have a count of their own.
PYRUNTIME_KERNEL(32, 1)
await_leave_to_put(PYRUNTIME_PARAMETER Group group, int peer) {
  if (threadIdx.x == 0) wait_for_credit(group, peer, group.control().pushes + 1);
}

constexpr int kFlagThreads = 128;

PYRUNTIME_KERNEL(kFlagThreads, 1)
raise_flags(PYRUNTIME_PARAMETER Group group, int peer, int first, int flags) {
  // After a failed wait the copy has been made all the same, but nobody is told to read it.
  if (has_failed(group)) return;
  const uint64_t epoch = group.control().pushes + 1;
  device::release_system();
  for (int i = static_cast<int>(threadIdx.x); i < flags; i += kFlagThreads) {
    device::store_relaxed_system(group.flag(peer, group.rank, first + i), epoch);
  }
}

PYRUNTIME_KERNEL(32, 1)
count_puts(PYRUNTIME_PARAMETER Group group) {
  if (threadIdx.x == 0 && !has_failed(group)) ++group.control().pushes;
}

}  // namespace
}  // namespace pyruntime::portable
