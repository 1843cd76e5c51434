// Which fused kernels run beside each other on a device.
//
// The blocks of a fused kernel wait for other ranks, so all of them must be resident at once. Where two such
// grids have a part of the multiprocessors each, or one of them and a kernel of NCCL, those of one rank can
// wait for those of another in a circle, which only the deadline ends. So every launch takes its blocks from
// what the device has, at one block a multiprocessor, and gives them back when it has ended:
//
//   on one stream         launches come one after the other, and hold what the largest of them has
//   on several streams    a launch gets what the others leave, if that is at least half of what it has a use
//                         for; else it is crowded
//   captured into a graph what it holds stays held, because a graph may be replayed at any time, on any
//                         stream, until forget(): a graph is of no use without its group. Graphs that were
//                         captured on one stream count as one, as if they came one after the other
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
  // Blocks of one of NCCL's communicators, a multiprocessor each: as many as it has channels, where
  // NCCL_MAX_CTAS does not say less.
  static constexpr int kBlocksOfNccl = 32;

  struct Launch {
    c10::Stream stream;
    int multiprocessors;  // of the device
    int blocks;           // that it has a use for, at most
    bool is_captured;     // into a graph, and not run now
    const void* owner;    // whose forget() ends what it holds where it is captured
  };

  explicit BlockBudget(c10::Device device) : device_(device) {}
  // One for each device of the process.
  static BlockBudget& of(c10::Device device);

  // Why the launch would be crowded now, in words; empty where it would not.
  std::string why_crowded(const Launch& launch);
  // Calls `put(blocks)`, which puts a grid of at most so many blocks on the stream. A crowded launch first
  // waits: its stream, for the kernels on other streams; where graphs hold what it needs, the calling thread,
  // for all that the device was given, since nobody knows on which stream a graph is replayed. A crowded
  // launch that is captured can wait for neither, and raises ValueError.
  void put(const Launch& launch, const std::function<void(int blocks)>& put);
  // The graphs into which the owner's launches were captured are of no use any more.
  void forget(const void* owner);

  // From now on there is room for the kernels of one more process group, until no_room(). They would run
  // beside fused kernels, not in their turn.
  void leave_room(const void* process_group);
  void no_room(const void* process_group);

 private:
  // Under way on a stream.
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
  // By others than what the launch comes after anyway.
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
