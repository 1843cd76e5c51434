#include "sim/collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <future>
#include <optional>

#include "sim/memory.h"
#include "sim/operators.h"

namespace sim {

namespace {

using Tensors = std::vector<at::Tensor>;

class DeviceWork : public c10d::Work {
 public:
  // `kept`: tensors that live until somebody has waited.
  DeviceWork(int rank, c10d::OpType type, int device, Event ended, std::shared_ptr<Tensors> kept)
      : Work(rank, type), type_(type), device_(device), ended_(std::move(ended)), kept_(std::move(kept)) {}

  bool isCompleted() override { return ended_.has_happened(); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    ended_.block(current_queue(device_), /*may_drop=*/false);
    if (kept_) kept_->clear();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    raise_if_broken();
    synchronize();
    if (type_ == c10d::OpType::BARRIER || timeout != kNoTimeout) {  // the host's too, as NCCL's
      HostWaits::count(type_ == c10d::OpType::BARRIER ? "barrier" : "wait with a time");
      ended_.synchronize();
    }
    return true;
  }
  std::vector<at::Tensor> result() override { return {}; }

 private:
  const c10d::OpType type_;
  const int device_;
  Event ended_;
  const std::shared_ptr<Tensors> kept_;
};

// Several of them as one, what ends a group of operations.
class Together : public c10d::Work {
 public:
  Together(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const auto& each : works_) {
      if (!each->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    for (const auto& each : works_) each->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& each : works_) each->wait(timeout);
    return true;
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

at::Tensor on_host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
}

std::string text(const char* name, const at::Tensor& tensor) {
  return c10::str(name, " of ", tensor.numel(), " ", tensor.dtype());
}

std::string text(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return c10::str(text(name, tensor), ", op ", static_cast<int>(op.op_));
}

std::string text(const char* name, const at::Tensor& tensor, int64_t root) {
  return c10::str(text(name, tensor), ", root ", root);
}

constexpr int64_t kTextBytes = 192;

at::Tensor as_bytes(const std::string& said) {
  at::Tensor bytes = at::zeros({kTextBytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), said.data(), std::min<size_t>(said.size(), kTextBytes - 1));
  return bytes;
}

std::string as_text(const at::Tensor& bytes) {
  return static_cast<const char*>(bytes.const_data_ptr());
}

// A mean is a sum that is divided: gloo has none.
c10d::ReduceOp summed(const c10d::ReduceOp& op) {
  return op.op_ == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

void divide(const c10d::ReduceOp& op, at::Tensor& sum, int ranks) {
  if (op.op_ == c10d::ReduceOp::AVG) sum.div_(ranks);
}

// All ranks of the group come here, with the same words.
void agree(c10d::Backend& host, const std::string& what) {
  Tensors own{as_bytes(what)};
  std::vector<Tensors> all(1);
  for (int rank = 0; rank < host.getSize(); ++rank) all[0].push_back(at::empty({kTextBytes}, at::kByte));
  host.allgather(all, own, {})->wait();
  for (int rank = 0; rank < host.getSize(); ++rank) {
    const std::string said = as_text(all[0][rank]);
    TORCH_CHECK(said == what.substr(0, kTextBytes - 1), "rank ", host.getRank(), " came to '", what,
                "' and rank ", rank, " to '", said, "' as the next operation of one group; NCCL would hang.");
  }
}

// The peer comes here too, with the other direction.
void agree_with(c10d::Backend& host, int peer, uint64_t number, bool sends, int64_t bytes) {
  const std::string own = c10::str(sends ? "a send of " : "a receive of ", bytes, " bytes");
  const std::string wanted = c10::str(sends ? "a receive of " : "a send of ", bytes, " bytes");
  Tensors out{as_bytes(own)}, in{at::empty({kTextBytes}, at::kByte)};
  const int tag = static_cast<int>(2 * number);
  const auto sent = host.send(out, peer, tag);
  host.recv(in, peer, tag)->wait();
  sent->wait();
  const std::string said = as_text(in[0]);
  TORCH_CHECK(said == wanted, "rank ", host.getRank(), " came to ", own, " with rank ", peer,
              ", which came to ", said, "; NCCL would hang.");
}

// One message of a group of messages.
struct Part {
  bool sends;
  int peer, number;
  at::Tensor memory;  // on the device
};

// Sends or receives a part's buffer. A send ends when it has been received: NCCL promises no sooner.
void pass(c10d::Backend& host, const Part& part, const at::Tensor& buffer) {
  Tensors rows{buffer}, came{at::zeros({1}, at::kByte)};
  const int of_rows = part.number + (1 << 29), of_end = of_rows + (1 << 28);
  try {
    if (part.sends) {
      host.send(rows, part.peer, of_rows)->wait();
      host.recv(came, part.peer, of_end)->wait();
    } else {
      host.recv(rows, part.peer, of_rows)->wait();
      host.send(came, part.peer, of_end)->wait();
    }
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "rank ", host.getRank(), " waited for rank ", part.peer, " to ",
                part.sends ? "receive" : "send", " message ", part.number, " of their group, of ",
                buffer.nbytes(), " bytes, where NCCL would hang: ", error.what());
  }
}

void check_contiguous(const Tensors& tensors) {
  for (const at::Tensor& each : tensors) {
    TORCH_CHECK_VALUE(each.is_contiguous(), "Tensors must be contiguous, and one has shape ", each.sizes(),
                      " and strides ", each.strides(), ".");
  }
}

}  // namespace

DeviceGroup::DeviceGroup(c10::intrusive_ptr<c10d::Backend> on_host)
    : Backend(on_host->getRank(), on_host->getSize()), on_host_(std::move(on_host)) {}

Queue& DeviceGroup::stream_with(int peer, int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto key = std::pair(peer, device);
  auto found = streams_.find(key);
  if (found == streams_.end()) found = streams_.emplace(key, own_stream(device)).first;
  return queue(found->second);
}

void DeviceGroup::finish() {
  std::vector<Queue*> own;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, stream] : streams_) own.push_back(&queue(stream));
  }
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  for (Queue* each : own) each->drain();
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::put(const Call& call, int peer, const Tensors& tensors,
                                                int device, std::function<void()> run) {
  raise_if_broken();
  Event ended;
  std::shared_ptr<Tensors> kept;
  Queue& on = call.is_async ? stream_with(peer, device) : current_queue(device);
  if (call.is_async) {
    Event before;
    before.record(current_queue(device));
    before.block(on, /*may_drop=*/false);
    kept = std::make_shared<Tensors>(tensors);
  }
  on.enqueue({"collective " + call.what, std::move(run)});
  ended.record(on);
  if (call.is_async) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!kept_.empty() && kept_.front().first.has_happened()) kept_.pop_front();
    kept_.emplace_back(ended, kept);
  }
  return c10::make_intrusive<DeviceWork>(getRank(), call.type, device, ended, kept);
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::collective(Call call, Tensors inputs, Tensors outputs,
                                                       OnHost run) {
  Tensors kept = inputs, from, to;
  kept.insert(kept.end(), outputs.begin(), outputs.end());
  check_contiguous(kept);
  for (const at::Tensor& each : inputs) from.push_back(over(each));
  for (const at::Tensor& each : outputs) to.push_back(over(each));
  const int device = kept.at(0).device().index();
  const auto later = [host = on_host_, what = call.what, from, to, run]() mutable {
    agree(*host, what);
    Tensors in, out;
    for (const at::Tensor& each : from) in.push_back(each.clone());
    for (const at::Tensor& each : to) out.push_back(on_host_like(each));
    run(*host, in, out);
    for (size_t i = 0; i < to.size(); ++i) {
      if (out[i].defined()) to[i].copy_(out[i]);
    }
  };
  const auto work = put(call, -1, kept, device, later);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_grouping_) of_group_.push_back(work);
  return work;
}

void DeviceGroup::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_grouping_ = true;
  group_.clear();
  of_group_.clear();
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::endCoalescing() {
  std::vector<Message> group;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<uint64_t> numbers;  // of each message among those with its peer in its direction
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_grouping_ = false;
    std::swap(group, group_);
    std::swap(works, of_group_);
    for (const Message& each : group) numbers.push_back(grouped_[{each.peer, each.sends}]++);
  }
  if (!group.empty()) {
    Tensors kept;
    std::vector<Part> parts;
    const int device = group.front().tensor.device().index();
    for (size_t i = 0; i < group.size(); ++i) {
      const Message& each = group[i];
      kept.push_back(each.tensor);
      parts.push_back({each.sends, each.peer, static_cast<int>(numbers[i] % (1 << 28)), over(each.tensor)});
    }
    const auto run = [host = on_host_, parts]() mutable {
      std::vector<at::Tensor> buffers;
      std::vector<std::future<void>> others;
      for (const Part& part : parts) {
        buffers.push_back(part.sends ? part.memory.clone() : on_host_like(part.memory));
      }
      for (size_t i = 1; i < parts.size(); ++i) {
        others.push_back(std::async(std::launch::async, [&, i] { pass(*host, parts[i], buffers[i]); }));
      }
      pass(*host, parts[0], buffers[0]);
      for (auto& other : others) other.get();
      for (size_t i = 0; i < parts.size(); ++i) {
        if (!parts[i].sends) parts[i].memory.copy_(buffers[i]);
      }
    };
    works.push_back(put({c10d::OpType::COALESCED, "messages"}, -1, kept, device, run));
  }
  return c10::make_intrusive<Together>(getRank(), std::move(works));
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::message(Message one) {
  check_contiguous({one.tensor});
  const int device = one.tensor.device().index();
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_grouping_) {
      group_.push_back(std::move(one));
      return c10::make_intrusive<Together>(getRank(), std::vector<c10::intrusive_ptr<c10d::Work>>{});
    }
    number = singles_[one.peer]++ % (1 << 28);
  }
  const auto run = [host = on_host_, number, sends = one.sends, peer = one.peer,
                    memory = over(one.tensor)]() mutable {
    agree_with(*host, peer, number, sends, memory.numel() * memory.element_size());
    Tensors buffer{sends ? memory.clone() : on_host_like(memory)};
    const int tag = static_cast<int>(2 * number + 1);
    (sends ? host->send(buffer, peer, tag) : host->recv(buffer, peer, tag))->wait();
    if (!sends) memory.copy_(buffer[0]);
  };
  const Call call{one.sends ? c10d::OpType::SEND : c10d::OpType::RECV, one.sends ? "send" : "receive"};
  return put(call, one.peer, {one.tensor}, device, run);
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::send(Tensors& tensors, int peer, int) {
  return message({true, peer, tensors.at(0)});
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::recv(Tensors& tensors, int peer, int) {
  return message({false, peer, tensors.at(0)});
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::broadcast(Tensors& tensors,
                                                      const c10d::BroadcastOptions& options) {
  const Call call{c10d::OpType::BROADCAST, text("broadcast", tensors.at(0), options.rootRank),
                  options.asyncOp};
  return collective(call, tensors, tensors, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    host.broadcast(in, options)->wait();
    out = in;
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::allreduce(Tensors& tensors,
                                                      const c10d::AllreduceOptions& options) {
  const Call call{c10d::OpType::ALLREDUCE, text("all-reduce", tensors.at(0), options.reduceOp),
                  options.asyncOp};
  return collective(call, tensors, tensors, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    auto with = options;
    with.reduceOp = summed(options.reduceOp);
    host.allreduce(in, with)->wait();
    divide(options.reduceOp, in.at(0), host.getSize());
    out = in;
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const at::Tensor& each : tensors) {
    Tensors one{each};
    works.push_back(allreduce(one, options));
  }
  return c10::make_intrusive<Together>(getRank(), std::move(works));
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Call call{c10d::OpType::REDUCE, text("reduce", tensors.at(0), options.rootRank), options.asyncOp};
  return collective(call, tensors, tensors, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    auto with = options;
    with.reduceOp = summed(options.reduceOp);
    host.reduce(in, with)->wait();
    divide(options.reduceOp, in.at(0), host.getSize());
    out = host.getRank() == options.rootRank ? in : Tensors(1);  // the others' tensors stay as they are
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  const Call call{c10d::OpType::ALLGATHER, text("all-gather", inputs.at(0)), options.asyncOp};
  return collective(call, inputs, outputs.at(0), [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    std::vector<Tensors> all{out};
    host.allgather(all, in, options)->wait();
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize() && output.dtype() == input.dtype(),
                    "An all-gather of ", input.numel(), " ", input.dtype(), " from ", getSize(),
                    " ranks into ", output.numel(), " ", output.dtype(), ".");
  const Call call{c10d::OpType::_ALLGATHER_BASE, text("all-gather", input), options.asyncOp};
  return collective(call, {input}, {output}, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    std::vector<Tensors> all(1);
    for (int rank = 0; rank < host.getSize(); ++rank) {
      all[0].push_back(on_host_like(in.at(0)));
    }
    host.allgather(all, in, options)->wait();
    const at::Tensor rows = out.at(0).view({host.getSize(), -1});
    for (int rank = 0; rank < host.getSize(); ++rank) {
      rows.select(0, rank).copy_(all[0][rank].reshape({-1}));
    }
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (size_t i = 0; i < inputs.size(); ++i) works.push_back(_allgather_base(outputs[i], inputs[i], options));
  return c10::make_intrusive<Together>(getRank(), std::move(works));
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize() && output.dtype() == input.dtype(),
                    "A reduce-scatter of ", input.numel(), " ", input.dtype(), " over ", getSize(),
                    " ranks into ", output.numel(), " ", output.dtype(), ".");
  const Call call{c10d::OpType::_REDUCE_SCATTER_BASE, text("reduce-scatter", input, options.reduceOp),
                  options.asyncOp};
  return collective(call, {input}, {output}, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    c10d::AllreduceOptions with;
    with.reduceOp = summed(options.reduceOp);
    host.allreduce(in, with)->wait();
    const at::Tensor own = in.at(0).reshape({host.getSize(), -1}).select(0, host.getRank());
    out.at(0).copy_(own.view(out.at(0).sizes()));
    divide(options.reduceOp, out.at(0), host.getSize());
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                           const c10d::ReduceScatterOptions& options) {
  const Call call{c10d::OpType::REDUCE_SCATTER,
                  text("reduce-scatter of a list", outputs.at(0), options.reduceOp), options.asyncOp};
  return collective(call, inputs.at(0), outputs, [options](c10d::Backend& host, Tensors& in, Tensors& out) {
    for (int rank = 0; rank < host.getSize(); ++rank) {
      c10d::AllreduceOptions with;
      with.reduceOp = summed(options.reduceOp);
      Tensors one{in.at(rank)};
      host.allreduce(one, with)->wait();
    }
    out.at(0).copy_(in.at(host.getRank()));
    divide(options.reduceOp, out.at(0), host.getSize());
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return c10::make_intrusive<Together>(getRank(), std::move(works));
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_sizes,
                                                          std::vector<int64_t>& input_sizes,
                                                          const c10d::AllToAllOptions& options) {
  const Call call{c10d::OpType::ALLTOALL_BASE, "all-to-all", options.asyncOp};
  return collective(
      call, {input}, {output},
      [options, output_sizes, input_sizes](c10d::Backend& host, Tensors& in, Tensors& out) mutable {
        host.alltoall_base(out.at(0), in.at(0), output_sizes, input_sizes, options)->wait();
      });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllToAllOptions& options) {
  const Call call{c10d::OpType::ALLTOALL, "all-to-all of lists", options.asyncOp};
  return collective(call, inputs, outputs, [](c10d::Backend& host, Tensors& in, Tensors& out) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int rank = 0; rank < host.getSize(); ++rank) {
      Tensors to{in.at(rank)}, from{out.at(rank)};
      if (rank == host.getRank()) {
        out.at(rank).copy_(in.at(rank));
        continue;
      }
      works.push_back(host.send(to, rank, (1 << 30) + host.getRank()));
      works.push_back(host.recv(from, rank, (1 << 30) + rank));
    }
    for (const auto& work : works) work->wait();
  });
}

c10::intrusive_ptr<c10d::Work> DeviceGroup::barrier(const c10d::BarrierOptions&) {
  return put({c10d::OpType::BARRIER, "barrier"}, -1, {}, current_device(), [host = on_host_] {
    agree(*host, "barrier");  // to which every rank comes
  });
}

}  // namespace sim
