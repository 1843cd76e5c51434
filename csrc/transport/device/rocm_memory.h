// Symmetric memory of AMD's GPUs that no cache keeps, for flags that a peer raises while a kernel polls them.
//
// torch's own (2.11 to 2.13) is hipMemCreate() of pinned memory. The device's L2 caches it, so a poll may
// read an old flag forever. This is hipExtMallocWithFlags() of uncached memory (ROCm 5.7 and newer), which
// peers open by its hipIpc handle. It is not registered with torch: what a user's code requests from torch
// stays torch's.
//
// For each allocation, ranks meet in a page of CPU symmetric memory, which carries the handle. Its rendezvous
// brings the deadline, the checks and the messages.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "transport/device/hip_runtime.h"

namespace pyruntime {

// alloc() and rendezvous() raise RuntimeError with HIP's name for the error; rendezvous() also CommTimeout
// and PeerLost, and ValueError if sizes differ. Memory that peers still have open is freed later: at the
// first allocation or release after the last peer has closed it, or with this process if a peer died. `hip`
// stays loaded.
c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemoryAllocator> rocm_memory(c10::DeviceType type,
                                                                                 const HipRuntime& hip);

}  // namespace pyruntime
