// The bulk copies of Hopper (TMA) go through the "async proxy": they are not ordered with ordinary loads and
// stores but by these fences and waits (PTX ISA, "Memory Consistency Model: Proxies" and "cp.async.bulk").
#pragma once

#include "cuda/compat.h"

namespace pyruntime::sm90 {

// Between what this thread has acquired, or is about to release, and bulk copies from or to global memory.
PYRUNTIME_DEVICE void fence_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Between this thread's stores to shared memory and bulk copies from it; then a barrier, then the copy.
PYRUNTIME_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Of the bulk stores that this thread has committed: shared memory may be written again.
PYRUNTIME_DEVICE void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Of the same: they are done, and this thread may tell others.
PYRUNTIME_DEVICE void wait_until_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace pyruntime::sm90
