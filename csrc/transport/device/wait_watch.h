// Ends the waits of kernels when the host knows that they are in vain.
//
// A kernel that waits sees flags in memory and a clock. The host sees more: that a peer's process has ended,
// that another rank has reported a failure, that a kernel of another group has written one down. A thread
// looks for these ten times a second while there are workspaces. It reports what it finds to all ranks, and
// tells the kernels in every workspace of this process to stop, so that they do not wait out their deadlines
// one after the other.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/host_process.h"
#include "core/job/failure_board.h"
#include "transport/device/library.h"
#include "transport/group_context.h"

namespace pyruntime {

// The bytes at the start of a workspace that are zero until something fails.
inline constexpr int64_t kDeviceHeaderBytes = 128;

// The processes of a group's ranks, by rank.
using PeerProcesses = std::vector<WatchedProcess>;

struct WatchedWorkspace {
  const GroupContext* context;
  const DeviceLibrary* library;
  c10::Device device;
  PyruntimeGroup group;     // any slot
  const char* header_seen;  // the header, as the device last copied it to the host
  std::shared_ptr<const PeerProcesses> processes;
  std::shared_ptr<std::atomic<bool>> stopped;  // set once its waits have been ended
};

// Whether a kernel has written down a failure, as far as the host has been told.
bool has_failed(const char* header_seen);
// Returns the failure that a kernel has written down; none if the host stopped the kernels. Waits for the
// stream.
std::optional<Failure> read_failure(const WatchedWorkspace& workspace, void* stream);

class WaitWatch {
 public:
  static WaitWatch& instance();

  // Watches the workspace until remove() has returned. Not while a graph is captured.
  int64_t add(const WatchedWorkspace& workspace);
  void remove(int64_t number);

 private:
  struct Watched {
    WatchedWorkspace workspace;
    int64_t number;
    bool given_up = false;
    std::vector<bool> has_left;  // the job, by rank: such a rank has raised all flags that anybody waits for
  };

  struct DeviceOrder {
    bool operator()(c10::Device a, c10::Device b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };

  void watch();
  // Looks for what ends the waits of a workspace; none: they may go on.
  std::optional<Failure> find_failure(Watched& watched);
  void stop(const WatchedWorkspace& workspace);

  std::mutex mutex_;
  std::condition_variable added_;
  std::list<Watched> watched_;
  std::map<c10::Device, void*, DeviceOrder> streams_;  // of the library, for this alone: all others may wait
  int64_t last_ = 0;
  bool runs_ = false;
};

}  // namespace pyruntime
