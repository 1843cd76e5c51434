// A process group of the devices whose collectives are ordered by streams, as those of NCCL are: a group has
// a stream of its own, and one for each peer of a single send or receive. An operation there comes after what
// the caller's stream had, and its work handle makes the stream that waits come after it; the host does not
// wait.
//
// What NCCL answers with silence is told: ranks whose operations of one group differ, or whose sends and
// receives with a peer come in another order, break the device with a sentence that names both. In a group of
// messages (startCoalescing) a send ends with its receive, so ranks that wait for each other in a circle end
// by the group's timeout, with a sentence that names the message.
//
// The rows themselves travel by a group of gloo on the host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "sim/streams.h"

namespace sim {

class DeviceGroup : public c10d::Backend {
 public:
  explicit DeviceGroup(c10::intrusive_ptr<c10d::Backend> on_host);

  const std::string getBackendName() const override { return "sim"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { on_host_->setTimeout(timeout); }
  // Waits for what is under way: streams may not be stopped.
  void abort() override { finish(); }
  void shutdown() override { finish(); }

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;

 private:
  using Tensors = std::vector<at::Tensor>;
  using Host = c10::intrusive_ptr<c10d::Backend>;  // the group of gloo, which operations under way keep
  // Computes an operation on copies of its tensors on the host.
  using OnHost = std::function<void(c10d::Backend& host, Tensors& inputs, Tensors& outputs)>;

  struct Message {
    bool sends;
    int peer;
    at::Tensor tensor;
  };
  struct Call {
    c10d::OpType type;
    std::string what;      // the same on all ranks
    bool is_async = true;  // otherwise on the caller's stream, and nothing is kept for it, as NCCL's
  };

  c10::intrusive_ptr<c10d::Work> collective(Call call, Tensors inputs, Tensors outputs, OnHost run);
  c10::intrusive_ptr<c10d::Work> message(Message one);
  c10::intrusive_ptr<c10d::Work> put(const Call& call, int peer, const Tensors& kept, int device,
                                     std::function<void()> run);
  Queue& stream_with(int peer, int device);
  void finish();

  const Host on_host_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, c10::Stream> streams_;  // by (peer or -1, device)
  std::map<int, uint64_t> singles_;                     // operations with a peer that are no group's
  std::map<std::pair<int, bool>, uint64_t> grouped_;    // by (peer, whether sent)
  std::vector<Message> group_;
  std::vector<c10::intrusive_ptr<c10d::Work>> of_group_;
  bool is_grouping_ = false;
  std::deque<std::pair<Event, std::shared_ptr<Tensors>>> kept_;  // until waited for, or it has happened
};

}  // namespace sim
