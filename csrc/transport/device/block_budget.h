// Decides which fused kernels may run at the same time on a device.
//
// The blocks of a fused kernel wait for other ranks, so all of them must be resident at once. If two such
// grids, or one and a kernel of NCCL, share the multiprocessors, those of one rank can wait for those of
// another in a circle, which only the deadline ends. So every launch takes its blocks from the device's
// budget, one block a multiprocessor, and returns them when it has ended:
//
//   on one stream         launches run one after the other, and take as many blocks as the largest of them
//   on several streams    a launch gets what the others leave, if that is at least half of what it can use;
//                         otherwise it is crowded
//   captured into a graph its blocks stay taken until forget(), because a graph may be replayed at any time,
//                         on any stream; without its group it is useless. Graphs captured on one stream
//                         count as one, as if they ran one after the other
//   NCCL                  has room of its own where it may be under way meanwhile: leave_room()
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace pyruntime {

class BlockBudget {
 public:
  // Left for waits and signals of other flights: a fused kernel may wait for ranks that wait for those.
  static constexpr int kSpare = 1;
  // Blocks of one NCCL communicator, a multiprocessor each: one per channel, if NCCL_MAX_CTAS is not less.
  static constexpr int kBlocksOfNccl = 32;

  struct Launch {
    c10::Stream stream;
    int multiprocessors;  // of the device
    int blocks;           // the most that it can use
    bool is_captured;     // into a graph, and not run now
    const void* owner;    // forget(owner) returns the blocks of a captured launch
  };

  explicit BlockBudget(c10::Device device) : device_(device) {}
  // The budget of a device; the process has one for each.
  static BlockBudget& of(c10::Device device);

  // Says why the launch would be crowded now; empty if it would not.
  std::string why_crowded(const Launch& launch);
  // Calls `put(blocks)`, which puts a grid of at most that many blocks on the stream. A crowded launch first
  // waits. Its stream waits for the kernels on other streams. If graphs hold the blocks, the calling thread
  // waits for all work of the device, since nobody knows on which stream a graph is replayed. A crowded
  // launch that is captured can wait for neither, and raises ValueError.
  void put(const Launch& launch, const std::function<void(int blocks)>& put);
  // Returns the blocks of the graphs into which the owner's launches were captured: they are useless now.
  void forget(const void* owner);

  // Leaves room for the kernels of one more process group, until no_room(): they run beside fused kernels,
  // not in turn with them.
  void leave_room(const void* process_group);
  void no_room(const void* process_group);

 private:
  // A launch under way on a stream.
  struct Running {
    explicit Running(c10::DeviceType type) : ended(type) {}
    int blocks = 0;
    c10::Event ended;
  };
  struct Held {
    int by_streams, by_graphs;
  };

  bool has_streams() const { return !device_.is_cpu(); }
  int all(const Launch& launch) const;
  int needed(const Launch& launch) const;
  // The blocks that others hold, except those that the launch comes after anyway.
  Held held(const Launch& launch);
  std::string crowd(const Launch& launch, const Held& held) const;
  void wait(const Launch& launch, const Held& held) const;
  void keep(const Launch& launch, int blocks);

  c10::Device device_;
  std::mutex mutex_;
  std::map<c10::StreamId, Running> running_;
  std::map<std::pair<const void*, c10::StreamId>, int> captured_;  // blocks, by owner and stream
  std::multiset<const void*> with_room_;                           // process groups
};

}  // namespace pyruntime
