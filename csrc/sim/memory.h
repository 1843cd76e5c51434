// The memory of the devices, and pinned memory of the host.
//
// Device memory is not the host's: where the processor has protection keys, a thread that is no stream's and
// touches it ends the process with a sentence. Memory has NaNs (all bits set) before it is first written, and
// again when it is freed.
//
// Blocks are kept and reused as CUDA's caching allocator does: a freed block is at once there for what its
// stream allocates next, because operations of a stream run in order. A block that other streams use is
// reused only after them, provided that the allocator was told (record_stream).
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <string>

namespace sim {

// Lets the calling thread touch device memory from now on.
void open_device_memory();

// The same for a scope of the host's: what only the backend itself does, after it has waited.
class OpenMemory {
 public:
  OpenMemory();
  ~OpenMemory();

 private:
  unsigned before_ = 0;
};

// "": host threads cannot touch device memory; else why they can.
std::string why_not_protected();

// Makes [memory, memory + bytes) memory of that device, and takes that back.
void add_device_memory(void* memory, size_t bytes, int device);
void remove_device_memory(void* memory);

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* memory);
// The device on which the memory is; -1 for memory of the host.
int device_of(const void* memory);

}  // namespace sim
