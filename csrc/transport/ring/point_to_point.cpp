#include "transport/ring/point_to_point.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <utility>
#include <vector>

#include "core/host_process.h"

namespace pyruntime {

namespace {

// Sends and receives without torch.profiler. Backends record a range that ends with the transfer; a transfer
// may outlive the profiler that it began under, and would then write into freed memory.
class ProcessGroupLink : public PointToPoint {
 public:
  ProcessGroupLink(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                   c10::intrusive_ptr<c10d::Backend> backend, std::vector<int> ranks)
      : process_group_(std::move(process_group)), backend_(std::move(backend)), ranks_(std::move(ranks)) {}

  PendingTransfer send(const void* data, int64_t bytes, int peer, int tag) override {
    // Not written to: c10d has no const tensors.
    std::vector<at::Tensor> tensors{bytes_of(const_cast<void*>(data), bytes)};
    const at::DisableRecordFunctionGuard unrecorded;
    return backend_->send(tensors, ranks_.at(peer), tag);
  }
  PendingTransfer receive(void* data, int64_t bytes, int peer, int tag) override {
    std::vector<at::Tensor> tensors{bytes_of(data, bytes)};
    const at::DisableRecordFunctionGuard unrecorded;
    return backend_->recv(tensors, ranks_.at(peer), tag);
  }
  std::string name() const override { return backend_->getBackendName(); }

 private:
  static at::Tensor bytes_of(void* data, int64_t bytes) { return at::from_blob(data, {bytes}, at::kByte); }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;  // keeps the backend's threads
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<int> ranks_;
};

}  // namespace

std::shared_ptr<PointToPoint> make_process_group_link(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                      std::vector<int> ranks) {
  try {
    auto backend = process_group->getBackend(c10::DeviceType::CPU);
    make_threads_prompt("gloo_tcp_loop");  // reads and writes gloo's sockets
    return std::make_shared<ProcessGroupLink>(std::move(process_group), std::move(backend), std::move(ranks));
  } catch (const c10::Error&) {
    return nullptr;  // the group was made for other devices only
  }
}

}  // namespace pyruntime
