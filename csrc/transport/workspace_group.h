// The ranks that share a workspace, as torch's symmetric memory finds them on every kind of device: a process
// group, registered under the workspace's name for as long as the workspace is there.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <string>
#include <vector>

namespace pyruntime {

class WorkspaceStore;

// It has no backend: symmetric memory asks it for ranks and the store alone.
class WorkspaceGroup {
 public:
  // `name` is that of no other group in this process, and the same on all ranks; `store` is theirs.
  // job_ranks: of its ranks, by rank.
  WorkspaceGroup(std::string name, int rank, std::vector<int> job_ranks,
                 c10::intrusive_ptr<c10d::Store> store);
  ~WorkspaceGroup();
  WorkspaceGroup(const WorkspaceGroup&) = delete;
  WorkspaceGroup& operator=(const WorkspaceGroup&) = delete;

  // Every rank's memory, reachable from all. Collective; `memory` is what `allocator` gave, nullptr for
  // torch's symmetric memory, of the same size on every rank. Raises CommTimeout where they have not come
  // within `seconds`.
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous(
      const at::Tensor& memory, double seconds,
      c10d::symmetric_memory::SymmetricMemoryAllocator* allocator = nullptr) const;

 private:
  std::string name_;
  c10::intrusive_ptr<WorkspaceStore> store_;
  // torch's registry holds no reference of its own.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

}  // namespace pyruntime
