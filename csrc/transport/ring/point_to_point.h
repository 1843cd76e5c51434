// Sends bytes from one rank of a group to another.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pyruntime {

// A send or a receive under way. Its memory is in use until wait() returns: true when it is done, false after
// abort() in another thread. wait() throws std::exception if the connection broke, or after its timeout.
using PendingTransfer = c10::intrusive_ptr<c10d::Work>;

// For threads that wait for nothing else and can be aborted. Without a timeout backends use their own
// default, which would end the wait of an idle group.
inline constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  // Neither call blocks. A receive gets what the peer sends under the same tag. Any thread.
  virtual PendingTransfer send(const void* data, int64_t bytes, int peer, int tag) = 0;
  virtual PendingTransfer receive(void* data, int64_t bytes, int peer, int tag) = 0;
  virtual std::string name() const = 0;
};

// The group's c10d backend for CPU tensors, among its `ranks`: peers are numbered by their place there.
// nullptr if the group has no such backend.
std::shared_ptr<PointToPoint> make_process_group_link(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                      std::vector<int> ranks);

}  // namespace pyruntime
