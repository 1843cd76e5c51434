// What surrounds a copy engine's copies into a peer's slot: kernels of one thread, in the stream of the
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

PYRUNTIME_KERNEL(32, 1)
raise_flag(PYRUNTIME_PARAMETER Group group, int peer, int index) {
  // After a failed wait the copy has been made all the same, but nobody is told to read it.
  if (threadIdx.x == 0 && !has_failed(group)) {
    device::store_release_system(group.flag(peer, group.rank, index), group.control().pushes + 1);
  }
}

PYRUNTIME_KERNEL(32, 1)
count_puts(PYRUNTIME_PARAMETER Group group) {
  if (threadIdx.x == 0 && !has_failed(group)) ++group.control().pushes;
}

}  // namespace
}  // namespace pyruntime::portable
