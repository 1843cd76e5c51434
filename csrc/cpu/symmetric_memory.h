// Symmetric memory for CPU tensors: torch's own interface (torch.distributed._symmetric_memory), across the
// processes of one host.
//
// Every allocation is one memfd: it has no name that could outlive a killed rank, and it does not count
// against /dev/shm. Peers open it through /proc/<pid>/fd/<fd>. One memfd holds
//
//     header (one page) | signal pad | buffer
//
// and every rank maps every peer's memfd, so that a chunk is read where its owner wrote it.
#pragma once

#include <cstddef>

namespace pyruntime::cpu {

// Registers the allocator for c10::kCPU. Called once, on import.
void register_symmetric_memory();

// Deadline of every wait that names none (rendezvous, and timeout_ms = 0), in seconds.
void set_symmetric_memory_deadline(double seconds);
double symmetric_memory_deadline();

// Bytes of symmetric memory that this process holds now, its own allocations only.
size_t symmetric_memory_bytes();

// Bounds the rendezvous inside a scope by the group's own deadline.
class ScopedSymmetricMemoryDeadline {
 public:
  explicit ScopedSymmetricMemoryDeadline(double seconds) : before_(symmetric_memory_deadline()) {
    set_symmetric_memory_deadline(seconds);
  }
  ~ScopedSymmetricMemoryDeadline() { set_symmetric_memory_deadline(before_); }
  ScopedSymmetricMemoryDeadline(const ScopedSymmetricMemoryDeadline&) = delete;
  ScopedSymmetricMemoryDeadline& operator=(const ScopedSymmetricMemoryDeadline&) = delete;

 private:
  double before_;
};

}  // namespace pyruntime::cpu
