// Fences and waits of Hopper's "async proxy". Bulk copies (TMA) go through it, and only these order them with
// ordinary loads and stores (PTX ISA, "Memory Consistency Model: Proxies" and "cp.async.bulk").
#pragma once

#include "cuda/compat.h"

namespace pyruntime::sm90 {

// Orders what this thread has acquired, or is about to release, with bulk copies from or to global memory.
PYRUNTIME_DEVICE void fence_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders this thread's stores to shared memory before bulk copies from it; then a barrier, then the copy.
PYRUNTIME_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the bulk stores that this thread committed have been read: shared memory may be written again.
PYRUNTIME_DEVICE void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until the same stores are complete: this thread may tell others.
PYRUNTIME_DEVICE void wait_until_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace pyruntime::sm90
