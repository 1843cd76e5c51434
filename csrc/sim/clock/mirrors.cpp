#include "sim/clock/mirrors.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sys/mman.h>

#include "sim/clock/programs.h"
#include "sim/memory.h"

namespace sim {

namespace {

namespace symm = c10d::symmetric_memory;

using Lock = std::lock_guard<std::mutex>;

bool is_number(const std::string& part) {
  return !part.empty() && part.size() < 8 && part.find_first_not_of("0123456789") == std::string::npos;
}

class Done : public c10d::Work {
 public:
  Done(int rank, c10d::OpType type, int device, std::optional<Event> ended)
      : Work(rank, type), device_(device), ended_(std::move(ended)) {}

  bool isCompleted() override { return true; }  // it will, and nobody has to wait for it
  bool isSuccess() const override { return true; }
  void synchronize() override {
    if (ended_) ended_->block(current_queue(device_), /*may_drop=*/false);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return {}; }

 private:
  const int device_;
  std::optional<Event> ended_;
};

// The same memory for every rank.
class MirroredMemory : public symm::SymmetricMemory {
 public:
  MirroredMemory(void* memory, size_t bytes, size_t pads_at, int rank, int ranks, c10::Device device)
      : buffers_(ranks, memory),
        pads_(ranks, static_cast<char*>(memory) + pads_at),
        bytes_(bytes),
        rank_(rank),
        device_(device) {}

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int, size_t) override {}  // all come at the same time
  void put_signal(int, int, size_t) override {}
  void wait_signal(int, int, size_t) override {}
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return device_; }
  bool world_within_direct_access() override { return true; }

 private:
  std::vector<void*> buffers_, pads_;
  const size_t bytes_;
  const int rank_;
  const c10::Device device_;
};

class MirroringAllocator : public symm::SymmetricMemoryAllocator {
 public:
  explicit MirroringAllocator(c10::DeviceType type) : type_(type) {}

  void* alloc(size_t bytes, int device, const std::optional<std::string>&) override {
    const size_t aligned = (bytes + 4095) / 4096 * 4096, mapped = aligned + symm::get_signal_pad_size();
    const int access = type_ == kSim ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* memory = mmap(nullptr, mapped, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "Symmetric memory of ", bytes,
                " bytes cannot be mapped: ", std::strerror(errno));
    if (type_ == kSim) add_device_memory(memory, mapped, device);
    const Lock lock(mutex_);
    own_[memory] = {bytes, aligned, mapped, std::max(device, 0)};
    return memory;
  }
  void free(void* memory) override {
    const Lock lock(mutex_);
    const auto found = own_.find(memory);
    if (found == own_.end()) return;
    if (type_ == kSim) remove_device_memory(memory);
    munmap(memory, found->second.mapped);
    met_.erase(memory);
    own_.erase(found);
  }
  size_t get_alloc_size(void* memory) override {
    const Lock lock(mutex_);
    return own_.at(memory).bytes;
  }
  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* memory,
                                                       const std::optional<std::string>& group) override {
    const auto met = c10d::resolve_process_group(group.value());
    const Lock lock(mutex_);
    const Own& own = own_.at(memory);
    auto& found = met_[memory];
    if (found.memory == nullptr) {
      const c10::Device device = type_ == kSim ? c10::Device(kSim, own.device) : c10::Device(c10::kCPU);
      found = {c10::make_intrusive<MirroredMemory>(memory, own.bytes, own.pads_at, met->getRank(),
                                                   met->getSize(), device),
               {named(*group), generations_[named(*group)]++}};
    }
    return found.memory;
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return type_; }
  std::string name() override { return "mirrors"; }

  PlaceOfMemory group_of(void* memory) {
    const Lock lock(mutex_);
    const auto found = met_.find(memory);
    return found == met_.end() ? PlaceOfMemory{"", 0} : found->second.place;
  }

 private:
  struct Own {
    size_t bytes, pads_at, mapped;
    int device;
  };
  struct Met {
    c10::intrusive_ptr<symm::SymmetricMemory> memory;
    PlaceOfMemory place;
  };

  // "NAME/PROCESS.NUMBER/host0" without what other processes call otherwise.
  static std::string named(const std::string& workspaces) {
    const size_t host = workspaces.rfind('/');
    return workspaces.substr(0, workspaces.rfind('/', host == std::string::npos ? host : host - 1));
  }

  const c10::DeviceType type_;
  std::mutex mutex_;
  std::map<void*, Own> own_;
  std::map<void*, Met> met_;
  std::map<std::string, int> generations_;
};

c10::intrusive_ptr<MirroringAllocator>& device_memory() {
  static auto* made =
      new c10::intrusive_ptr<MirroringAllocator>(c10::make_intrusive<MirroringAllocator>(kSim));
  return *made;
}

}  // namespace

void register_mirrored_memory() {
  symm::register_allocator(kSim, device_memory());
  symm::register_allocator(c10::kCPU, c10::make_intrusive<MirroringAllocator>(c10::kCPU));
}

PlaceOfMemory group_of_memory(const void* memory) {
  return device_memory()->group_of(const_cast<void*>(memory));
}

// ------------------------------------------------------------------------------------------------ the store

// Calls `use` with the key without each of its numbers in turn, the last first, until that says true.
template <class Use>
void for_each_number(const std::string& key, const Use& use) {
  for (size_t begin = key.size(); begin > 0;) {
    const size_t slash = key.rfind('/', begin - 1);
    const size_t from = slash == std::string::npos ? 0 : slash + 1;
    const size_t end = std::min(key.find('/', from), key.size());
    if (is_number(key.substr(from, end - from)) && use(key.substr(0, from) + "*" + key.substr(end))) return;
    begin = slash == std::string::npos ? 0 : slash;
  }
}

const std::vector<uint8_t>* MirrorStore::find(const std::string& key) {
  if (const auto found = values_.find(key); found != values_.end()) return &found->second;
  const std::vector<uint8_t>* value = nullptr;
  for_each_number(key, [&](const std::string& without) {
    const auto alike = alike_.find(without);
    if (alike == alike_.end()) return false;
    const auto found = values_.find(alike->second);
    if (found != values_.end()) value = &found->second;
    return value != nullptr;
  });
  return value;
}

c10::intrusive_ptr<c10d::Store> MirrorStore::clone() {
  return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
}

void MirrorStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const Lock lock(mutex_);
  values_[key] = value;
  for_each_number(key, [&](const std::string& without) {
    alike_[without] = key;
    return false;
  });
}

std::vector<uint8_t> MirrorStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  const Lock lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end() ? expected.empty() : found->second == expected) return values_[key] = desired;
  return found == values_.end() ? expected : found->second;
}

std::vector<uint8_t> MirrorStore::get(const std::string& key) {
  const Lock lock(mutex_);
  const auto* found = find(key);
  TORCH_CHECK(found != nullptr,
              "The one rank that stands for all has not said what a peer would have said under '", key,
              "'; ranks that differ cannot be mirrored.");
  return *found;
}

int64_t MirrorStore::add(const std::string& key, int64_t value) {
  const Lock lock(mutex_);
  auto& bytes = values_[key];
  const int64_t sum = (bytes.empty() ? 0 : std::stoll(std::string(bytes.begin(), bytes.end()))) + value;
  const std::string text = std::to_string(sum);
  bytes.assign(text.begin(), text.end());
  return sum;
}

bool MirrorStore::deleteKey(const std::string& key) {
  const Lock lock(mutex_);
  return values_.erase(key) > 0;
}

bool MirrorStore::check(const std::vector<std::string>& keys) {
  const Lock lock(mutex_);
  for (const std::string& key : keys) {
    if (find(key) == nullptr) return false;
  }
  return true;
}

int64_t MirrorStore::getNumKeys() {
  const Lock lock(mutex_);
  return static_cast<int64_t>(values_.size());
}

void MirrorStore::wait(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) get(key);
}

void MirrorStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) {
  wait(keys);
}

// ------------------------------------------------------------------------------------------------ the group

// A batch of messages between programs, whose moments are asked when somebody waits.
class MessageWork : public c10d::Work {
 public:
  MessageWork(int rank, std::string group, MessageLine& line, int64_t number, int device)
      : Work(rank, c10d::OpType::COALESCED),
        group_(std::move(group)),
        line_(line),
        number_(number),
        device_(device) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    const MessageLine::Moments moments = line_.of(number_);
    Timeline& waiting = current_queue(device_).timeline();
    waiting.until(moments.begun, kWorkOfAnother + group_);
    waiting.until(moments.ended, "rows of " + group_, /*is_asked=*/false);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return {}; }

 private:
  const std::string group_;
  MessageLine& line_;  // whose group lives to the end of the process
  const int64_t number_;
  const int device_;
};

namespace {

bool are_all_of_different_programs(const std::vector<int>& job_ranks) {
  std::set<int> programs;
  for (const int rank : job_ranks) programs.insert(Programs::instance().of_rank(rank));
  return programs.size() == job_ranks.size();
}

}  // namespace

MirrorGroup::MirrorGroup(std::string name, int rank, std::vector<int> job_ranks)
    : Backend(rank, static_cast<int>(job_ranks.size())),
      name_(std::move(name)),
      job_ranks_(std::move(job_ranks)),
      has_others_(Programs::instance().are_several(job_ranks_)),
      all_differ_(has_others_ && are_all_of_different_programs(job_ranks_)) {}

MirrorGroup::~MirrorGroup() = default;

Queue& MirrorGroup::after_current(int device, int peer) {
  const Lock lock(mutex_);
  const std::pair<int, int> of{device, peer};
  const auto found = streams_.find(of);
  Queue& on =
      queue(found == streams_.end() ? streams_.emplace(of, own_stream(device)).first->second : found->second);
  Event before;
  before.record(current_queue(device));
  before.block(on, /*may_drop=*/false);
  return on;
}

void MirrorGroup::meet(Queue& on) {
  if (!has_others_) return;
  const double all = Programs::instance().meet(name_, job_ranks_, on.timeline().done());
  on.timeline().until(all, kWorkOfAnother + name_, /*is_asked=*/false);
}

bool MirrorGroup::crosses_hosts(int peer) const {
  const Programs& programs = Programs::instance();
  return programs.host_of(job_ranks_.at(peer)) != programs.host_of(job_ranks_.at(getRank()));
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::put(c10d::OpType type, const char* what, const at::Tensor& tensor,
                                                bool is_async, const std::function<void()>& on_host) {
  if (tensor.device().is_cpu()) {
    if (has_others_) meet_on_host(name_, 0);
    on_host();
    return c10::make_intrusive<Done>(getRank(), type, 0, std::nullopt);
  }
  const int device = tensor.device().index();
  Queue& on = is_async ? after_current(device) : current_queue(device);
  meet(on);
  int64_t inner = getSize() > 1 ? job_ranks_[1] - job_ranks_[0] : 1;
  on.enqueue({std::string(what) + " of " + name_,
              [] {},
              {what, {static_cast<int64_t>(tensor.nbytes()), getSize(), inner}}});
  Event ended;
  ended.record(on);
  return c10::make_intrusive<Done>(getRank(), type, device, ended);
}

void MirrorGroup::startCoalescing() {
  is_grouping_ = true;
  messages_.clear();
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::endCoalescing() {
  is_grouping_ = false;
  return exchange(std::exchange(messages_, {}));
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::add(Message message) {
  if (!is_grouping_) return exchange({message});
  messages_.push_back(message);
  return c10::make_intrusive<Done>(getRank(), c10d::OpType::COALESCED, message.device, std::nullopt);
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::send(std::vector<at::Tensor>& tensors, int peer, int) {
  const at::Tensor& one = tensors.at(0);
  TORCH_CHECK(!one.device().is_cpu(), "Messages between hosts' processors have no model in virtual time.");
  return add({true, peer, static_cast<int64_t>(one.nbytes()), one.device().index()});
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::recv(std::vector<at::Tensor>& tensors, int peer, int) {
  const at::Tensor& one = tensors.at(0);
  TORCH_CHECK(!one.device().is_cpu(), "Messages between hosts' processors have no model in virtual time.");
  return add({false, peer, static_cast<int64_t>(one.nbytes()), one.device().index()});
}

double MirrorGroup::seconds_of(const Message& message, const char* what) const {
  const std::string link = crosses_hosts(message.peer) ? " between hosts" : " inside a host";
  const std::vector<int64_t> sizes =
      *what == 'm' ? std::vector<int64_t>{message.bytes} : std::vector<int64_t>{};
  return Clock::instance().seconds({what + link, sizes});
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::exchange(const std::vector<Message>& messages) {
  if (messages.empty()) {
    return c10::make_intrusive<Done>(getRank(), c10d::OpType::COALESCED, 0, std::nullopt);
  }
  if (all_differ_) return between_programs(messages);
  const int device = messages.front().device;
  Queue& on = after_current(device);
  on.enqueue({"messages of " + name_, [] {}, {"signal", {}}});
  meet(on);
  double arrived = on.timeline().done();
  for (const Message& each : messages) {
    // A receive ends when the send of its rank does, which sends as much.
    if (each.sends) {
      const std::string link = crosses_hosts(each.peer) ? "between hosts" : "inside a host";
      const double left = on.timeline().store(seconds_of(each, "message"), link);
      arrived = std::max(arrived, left + seconds_of(each, "latency"));
    } else if (messages.size() == 1) {
      arrived =
          std::max(arrived, on.timeline().done() + seconds_of(each, "message") + seconds_of(each, "latency"));
    }
  }
  on.timeline().until(arrived, "messages of " + name_, /*is_asked=*/false);
  Event ended;
  ended.record(on);
  return c10::make_intrusive<Done>(getRank(), c10d::OpType::COALESCED, device, ended);
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::between_programs(const std::vector<Message>& messages) {
  const int device = messages.front().device, own = job_ranks_.at(getRank());
  const int peer = messages.size() == 1 ? messages.front().peer : -1;
  Queue& on = after_current(device, peer);
  on.enqueue({"messages of " + name_, [] {}, {"signal", {}}});
  std::vector<MessageLine::Message> of_line;
  for (const Message& each : messages) {
    const int other = job_ranks_.at(each.peer);
    of_line.push_back({each.sends ? own : other, each.sends ? other : own,
                       seconds_of(each, "message") + seconds_of(each, "latency")});
  }
  const std::string ends = peer < 0 ? ""
                                    : "/" + std::to_string(std::min(peer, getRank())) + ":" +
                                          std::to_string(std::max(peer, getRank()));
  MessageLine& line = lines_.try_emplace(peer, name_ + ends, own).first->second;
  const int64_t number = line.add(on.timeline().done(), of_line);
  return c10::make_intrusive<MessageWork>(getRank(), name_, line, number, device);
}

void meet_on_host(const std::string& group, double seconds) {
  Programs& programs = Programs::instance();
  Clock& clock = Clock::instance();
  const double all = programs.meet(group + "/host", programs.ranks_of(group), clock.host());
  Timeline& waiting = current_queue(current_device()).timeline();
  waiting.until(all, kWorkOfAnother + group, /*is_asked=*/false);
  waiting.until(all + seconds, "numbers of " + group, /*is_asked=*/false);
  clock.host_until(all + seconds);
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                      const c10d::BroadcastOptions& options) {
  return put(c10d::OpType::BROADCAST, "broadcast", tensors.at(0), options.asyncOp, [] {});
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::allreduce(std::vector<at::Tensor>& tensors,
                                                      const c10d::AllreduceOptions& options) {
  return put(c10d::OpType::ALLREDUCE, "all_reduce", tensors.at(0), options.asyncOp, [&] {
    if (options.reduceOp.op_ == c10d::ReduceOp::SUM) tensors.at(0).mul_(getSize());
  });
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                      std::vector<at::Tensor>& inputs,
                                                      const c10d::AllgatherOptions& options) {
  return put(c10d::OpType::ALLGATHER, "all_gather", inputs.at(0), options.asyncOp, [&] {
    for (at::Tensor& each : outputs.at(0)) each.copy_(inputs.at(0));
  });
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return put(c10d::OpType::_ALLGATHER_BASE, "all_gather", input, options.asyncOp,
             [&] { output.view({getSize(), -1}).copy_(input.reshape({1, -1}).expand({getSize(), -1})); });
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& options) {
  return put(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", output, options.asyncOp, [&] {
    output.copy_(input.reshape({getSize(), -1}).select(0, getRank()).view(output.sizes()));
    if (options.reduceOp.op_ == c10d::ReduceOp::SUM) output.mul_(getSize());
  });
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  c10::intrusive_ptr<c10d::Work> last;
  for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
  return last;
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  c10::intrusive_ptr<c10d::Work> last;
  for (size_t i = 0; i < inputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], options);
  return last;
}

c10::intrusive_ptr<c10d::Work> MirrorGroup::barrier(const c10d::BarrierOptions&) {
  if (has_others_) meet_on_host(name_, 0);
  return c10::make_intrusive<Done>(getRank(), c10d::OpType::BARRIER, 0, std::nullopt);
}

}  // namespace sim
