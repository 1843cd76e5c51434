// One rank that stands for all ranks of its program, which do the same as it does at the same time.
//
// Whatever a peer would say is what this rank has said in its place: a store answers with this rank's own
// value, a process group brings this rank's own tensors, and symmetric memory of a peer is this rank's. Ranks
// of other programs (programs.h) say the same too, but when their messages leave is asked of them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "sim/clock/message_line.h"
#include "sim/streams.h"

namespace sim {

// Keys name ranks in parts of their own: "pyruntime/host/1/0/3" is rank 3's. For a key that is not there the
// one that differs from it in one such number, the last if it can be, is read.
class MirrorStore : public c10d::Store {
 public:
  using c10d::Store::compareSet;
  using c10d::Store::set;

  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  // Raises RuntimeError for what no mirror has said: nobody else would ever say it.
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  const std::vector<uint8_t>* find(const std::string& key);

  std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
  std::map<std::string, std::string> alike_;  // the key, by itself without one of its numbers
};

// Tensors of the host are given at once; on a device a collective takes time on the group's own stream, as
// NCCL's do. What is sent in one call leaves at once, by the links of a host or those between hosts, and all
// ranks begin together. Where every rank is of a program of its own, a message waits for its two ends only,
// and a single one has a stream for its peer, as NCCL's has.
class MirrorGroup : public c10d::Backend {
 public:
  // `job_ranks`: the group's, by rank in it.
  MirrorGroup(std::string name, int rank, std::vector<int> job_ranks);
  ~MirrorGroup() override;

  const std::string getBackendName() const override { return "mirror"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;
  // One after the other.
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Message {
    bool sends;
    int peer;
    int64_t bytes;
    int device;
  };

  c10::intrusive_ptr<c10d::Work> put(c10d::OpType type, const char* what, const at::Tensor& tensor,
                                     bool is_async, const std::function<void()>& on_host);
  c10::intrusive_ptr<c10d::Work> add(Message message);
  c10::intrusive_ptr<c10d::Work> exchange(const std::vector<Message>& messages);
  c10::intrusive_ptr<c10d::Work> between_programs(const std::vector<Message>& messages);
  // The group's own stream, or that for a peer, after what the caller's has so far.
  Queue& after_current(int device, int peer = -1);
  void meet(Queue& on);
  double seconds_of(const Message& message, const char* what) const;
  bool crosses_hosts(int peer) const;

  const std::string name_;
  const std::vector<int> job_ranks_;
  const bool has_others_;  // programs
  const bool all_differ_;  // every rank is of a program of its own
  std::mutex mutex_;
  std::map<std::pair<int, int>, c10::Stream> streams_;  // by device and peer, -1 for the group's own
  bool is_grouping_ = false;
  std::vector<Message> messages_;
  std::map<int, MessageLine> lines_;  // by peer, -1 for batches
};

// Comes to the next meeting of all ranks of a group, with this host and its current stream, which takes so
// many seconds.
void meet_on_host(const std::string& group, double seconds);

// Symmetric memory of the devices and of the host.
void register_mirrored_memory();
// The group whose ranks share that memory of a device, and how many memories it had before; "" before they
// have met. The name is the one that its ops have.
struct PlaceOfMemory {
  std::string name;
  int generation;
};
PlaceOfMemory group_of_memory(const void* memory);

}  // namespace sim
