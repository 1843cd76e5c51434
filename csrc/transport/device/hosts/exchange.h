// Sends and receives between ranks by a process group's backend (NCCL), in the order of streams. Nothing
// waits on the host. On the CPU (gloo) the caller waits.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>
#include <vector>

#include "transport/group_context.h"

namespace pyruntime {

// The process group whose backend sends and receives.
struct Link {
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  std::vector<int> ranks;  // in it, by rank
  // The owner of the blocks that are reserved beside fused kernels: the process group, or all of its pairs
  // together. A rank has at most four pairs under way: two neighbours, two directions.
  const void* with_room;
};

// Rows that leave for one rank and others that come from another. `index`: in the flight.
struct Passage {
  int index;
  int to;
  at::Tensor from_here;
  int from;
  at::Tensor here;
};

// Sends and receives that begin at once. Those of several passages end together.
struct Step {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<int> sends_to, receives_from;
  double begun_s = 0;
  bool is_awaited = false;
};

class Exchange {
 public:
  // Among the context's ranks. `instance`, the same on all ranks, tells apart the messages of groups that
  // share the process group. Returns nullptr, with the reason in `why_not`, if no backend sends and receives
  // in stream order. `pair`: for an edge, the name of a process group to make for its two ranks; else empty.
  static std::unique_ptr<Exchange> make(GroupContext& context,
                                        c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                        c10::Device device, int instance, const std::string& pair,
                                        std::string& why_not);
  Exchange(GroupContext& context, Link link, c10::intrusive_ptr<c10d::Backend> backend, c10::Device device,
           int instance);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  std::string backend_name() const { return backend_->getBackendName(); }
  // Begins passages of a flight, after all work of the caller's stream so far.
  std::shared_ptr<Step> begin(uint64_t flight, const char* what, const std::vector<Passage>& passages);
  // On a device the current stream waits; on the CPU this thread does, once.
  void await(Step& step, const char* what);
  // Another stream than the op's waits too.
  void follow(Step& step, const char* what);
  // Awaits what nobody has, and raises for steps that have not ended after the deadline: streams would wait
  // forever. Some may be null.
  void end(const std::vector<std::shared_ptr<Step>>& steps, const char* what);

 private:
  std::string names_of(const std::vector<int>& ranks) const;
  [[noreturn]] void raise(const Step& step, const char* what, const std::string& why);

  GroupContext& context_;
  Link link_;  // keeps the backend's threads
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::Device device_;
  int instance_;
};

// The steps of the flight in a slot, by the index of each passage.
class FlightSteps {
 public:
  // Ends those of the flight before. `number`: the flight's, the same on all ranks.
  void claim(Exchange& exchange, Op op, uint64_t number);
  void begin(const std::vector<Passage>& passages);
  void await(int index) { exchange_->await(step(index), name_of(op_)); }
  void follow(int index) { exchange_->follow(step(index), name_of(op_)); }
  void end() {
    if (exchange_ != nullptr) exchange_->end(steps_, name_of(op_));
  }

 private:
  Step& step(int index);

  Exchange* exchange_ = nullptr;  // of the group, if the slot was used
  Op op_ = Op::kAllGather;
  uint64_t number_ = 0;
  std::vector<std::shared_ptr<Step>> steps_;  // null: not begun
};

}  // namespace pyruntime
