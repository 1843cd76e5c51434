// One rank that stands for all ranks of a group, which do the same as it does at the same time.
//
// Whatever a peer would say is what this rank has said in its place: a store answers with this rank's own
// value, a process group brings this rank's own tensors, and symmetric memory of a peer is this rank's. So it
// needs ranks that are alike: no pipeline, and parts of equal size.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "streams.h"

namespace sim {

// Keys name ranks in parts of their own: "pyruntime/host/1/0/3" is rank 3's. A key that is not there is
// looked for with `rank` in place of one such number.
class MirrorStore : public c10d::Store {
 public:
  MirrorStore(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

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

  const int rank_, ranks_;
  std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

// Tensors of the host are given at once; on a device a collective takes time on the group's own stream, as
// NCCL's do.
class MirrorGroup : public c10d::Backend {
 public:
  // `inner`: how many ranks lie between two neighbours of the group.
  MirrorGroup(int rank, int ranks, int inner) : Backend(rank, ranks), inner_(inner) {}

  const std::string getBackendName() const override { return "mirror"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

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
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::Work> put(c10d::OpType type, const char* what, const at::Tensor& tensor,
                                     bool is_async, const std::function<void()>& on_host);

  const int inner_;
  std::mutex mutex_;
  std::map<int, c10::Stream> streams_;  // by device
};

// Symmetric memory of the devices and of the host.
void register_mirrored_memory();
// The group whose ranks share that memory of a device; "" before they have met.
std::string group_of_memory(const void* memory);

}  // namespace sim
