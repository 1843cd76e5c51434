// Symmetric memory for CPU tensors of the processes of one host, behind torch's own interface
// (torch.distributed._symmetric_memory).
//
// Every allocation is one memfd. It has no name that could outlive a killed rank, and it does not count
// against /dev/shm. Peers open it through /proc/<pid>/fd/<fd>. One memfd holds
//
//     header (one page) | signal pad | buffer
//
// Every rank maps every peer's memfd and reads a chunk where its owner wrote it.
#pragma once

#include <cstddef>

namespace pyruntime::cpu {

// Registers the allocator for c10::kCPU. Called once, at import.
void register_symmetric_memory();

// The deadline, in seconds, of a wait that names none (rendezvous, and timeout_ms = 0).
void set_symmetric_memory_deadline(double seconds);
double symmetric_memory_deadline();

// The bytes of symmetric memory that this process has allocated and not freed; peers' segments do not count.
size_t symmetric_memory_bytes();

// Sets the deadline of rendezvous within a scope to that of a group.
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
