// Bytes from one rank of a group to another.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pyruntime {

// A send or a receive under way. The memory stays in use until wait() has returned.
class PendingTransfer {
 public:
  virtual ~PendingTransfer() = default;
  // Returns when it is done, or false after abort(). Throws std::exception when the connection broke, or
  // after `seconds`; negative: no bound, for threads that wait for nothing else and can be aborted.
  virtual bool wait(double seconds) = 0;
  // Ends a wait() in another thread.
  virtual void abort() = 0;
};

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  // Neither blocks. A receive gets what the peer sends under the same tag. Any thread may call them.
  virtual std::unique_ptr<PendingTransfer> send(const void* data, int64_t bytes, int peer, int tag) = 0;
  virtual std::unique_ptr<PendingTransfer> receive(void* data, int64_t bytes, int peer, int tag) = 0;
  virtual std::string name() const = 0;
};

// Over the group's c10d backend for CPU tensors, among its `ranks`: peers are numbered by their place there.
// nullptr where the group has no such backend.
std::shared_ptr<PointToPoint> make_process_group_link(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                      std::vector<int> ranks);

}  // namespace pyruntime
