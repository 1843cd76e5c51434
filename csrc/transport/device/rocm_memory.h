// Symmetric memory of GPUs of AMD that no cache keeps, for flags that a peer raises while a kernel polls
// them.
//
// torch's own (2.11 to 2.13) is hipMemCreate() of pinned memory, which the L2 of its device caches, so a poll
// may read an old flag for ever; this is hipExtMallocWithFlags() of uncached memory (ROCm 5.7 and newer),
// which peers open by its hipIpc handle. Not registered with torch: what a user's own code asks torch for
// stays torch's.
//
// Ranks find each other through a page of CPU symmetric memory for each allocation, which carries the handle.
// It has the deadline, the checks and the sentences of that rendezvous.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "transport/device/hip_runtime.h"

namespace pyruntime {

// alloc() and rendezvous() raise RuntimeError with HIP's name for what went wrong; rendezvous() also
// CommTimeout and PeerLost, and ValueError where sizes differ. Memory that peers still have open is given
// back later, at the first allocation or release after the last of them has closed it; that of a peer that
// died, with this process. `hip` stays loaded.
c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemoryAllocator> rocm_memory(c10::DeviceType type,
                                                                                 const HipRuntime& hip);

}  // namespace pyruntime
