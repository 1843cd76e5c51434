// The ranks that share a workspace, as a process group in which torch's symmetric memory finds them on every
// kind of device. It is registered under the workspace's name while the workspace exists.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <string>
#include <vector>

namespace pyruntime {

class WorkspaceStore;

// It has no backend: symmetric memory needs only its ranks and its store.
class WorkspaceGroup {
 public:
  // `name` is no other group's in this process, and the same on all ranks; `store` is shared by them.
  // job_ranks: the ranks in the job, by rank.
  WorkspaceGroup(std::string name, int rank, std::vector<int> job_ranks,
                 c10::intrusive_ptr<c10d::Store> store);
  ~WorkspaceGroup();
  WorkspaceGroup(const WorkspaceGroup&) = delete;
  WorkspaceGroup& operator=(const WorkspaceGroup&) = delete;

  // Makes every rank's memory reachable from all. Collective. `memory` comes from `allocator` (nullptr:
  // torch's symmetric memory) and has the same size on every rank. Raises CommTimeout if the ranks have not
  // come within `seconds`.
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
