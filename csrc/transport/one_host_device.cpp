#include "transport/one_host_device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "core/chunk_plan.h"
#include "core/failure_board.h"
#include "cpu/symmetric_memory.h"
#include "transport/device_streams.h"
#include "transport/device_sums.h"
#include "transport/rows_held.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

constexpr int64_t kSlotGranularity = int64_t{1} << 16;
// Of a workspace: what it begins with is zero until something fails.
constexpr int64_t kHeaderBytes = 128;

// Flags of a rank in a slot: its rows, or its part of them, are there; and its sums.
enum Flag : int { kRows = 0, kSums = 1, kFlags = 2 };

// Symmetric memory on every rank, as the library lays it out: PYRUNTIME_SLOTS slots of so many bytes.
struct Workspace {
  PyruntimeWorkspace shape;
  at::Tensor memory;
  c10::intrusive_ptr<symm::SymmetricMemory> handle;
  std::vector<void*> bases;  // every rank's
};

}  // namespace

class DeviceTransport : public Transport {
 public:
  DeviceTransport(GroupContext& context, std::string name, c10::Device device, const DeviceLibrary& library)
      : Transport(context), name_(std::move(name)), device_(device), library_(library), streams_(device) {
    const auto options = at::TensorOptions().dtype(c10::kByte);
    header_seen_ = at::zeros({kHeaderBytes}, device.is_cpu() ? options : options.pinned_memory(true));
  }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override;

  void flush() override {
    streams_.synchronize();
    if (has_failed()) {
      TORCH_WARN("Group '", context_.name, "' on ", device_,
                 " is closed after a wait that took too long: ", "results of its last ops are of no use.");
    }
  }
  void leave() override { flush(); }
  bool crosses_hosts() const override { return false; }
  std::string description() const override {
    return "symmetric memory and copy engines, " + std::to_string(world_size()) + " ranks of one host";
  }
  int64_t workspace_bytes() const override {
    int64_t total = 0;
    for (const auto& workspace : workspaces_) total += workspace->memory.numel();
    for (const Slot& slot : slots_) total += slot.staging.defined() ? slot.staging.numel() : 0;
    return total;
  }

 private:
  friend class DeviceFlight;

  struct Slot {
    bool in_flight = false;
    at::Tensor staging;  // what leaves from here
    // Until then the puts of the flight before read what that flight wrote.
    std::optional<c10::Event> puts_ended;
  };

  // A slot of the workspace for the next flight, with room for so many bytes on every rank.
  int claim(Op op, int64_t bytes) {
    raise_if_failed();
    const int slot = static_cast<int>(++last_number_ % slots_.size());
    TORCH_CHECK(!slots_[slot].in_flight, "Group '", context_.name, "' already has ", slots_.size(),
                " ops in flight on ", device_, "; finish one before beginning ", name_of(op), ".");
    if (workspaces_.empty() || workspaces_.back()->shape.slot_bytes < bytes) grow(bytes);
    slots_[slot].in_flight = true;
    ++context_.stats.ops;
    return slot;
  }

  // All ranks come here with the same op, as all have claimed the same bytes so far. The memory before stays,
  // because flights may be under way in it; together it is less than the new one.
  void grow(int64_t bytes) {
    auto made = std::make_unique<Workspace>();
    int64_t target = kSlotGranularity;
    while (target < bytes) target *= 2;
    made->shape = {world_size(), kFlags, target};
    const int64_t total = library_.workspace_bytes(&made->shape);
    library_.check(total < 0 ? static_cast<int>(-total) : PYRUNTIME_OK);
    const cpu::ScopedSymmetricMemoryDeadline bounded(context_.deadline_seconds);
    made->memory = symm::empty_strided_p2p({total}, {1}, c10::kByte, device_, std::nullopt, std::nullopt);
    library_.check(library_.prepare_workspace(&made->shape, made->memory.data_ptr(), streams_.current()));
    streams_.synchronize();  // prepared before any peer can have its address
    raise_if_failed();       // in the memory before, at which nobody looks from now on
    made->handle = symm::rendezvous(made->memory, name_);
    made->bases = made->handle->get_buffer_ptrs();
    workspaces_.push_back(std::move(made));
  }

  at::Tensor staging(int slot, int64_t bytes) {
    at::Tensor& memory = slots_[slot].staging;
    if (!memory.defined() || memory.numel() < bytes) {
      memory = at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(device_));
    }
    return memory;
  }

  bool has_failed() const {
    const auto* seen = static_cast<const char*>(header_seen_.const_data_ptr());
    return std::any_of(seen, seen + kHeaderBytes, [](char byte) { return byte != 0; });
  }

  // Looks at what the device had written down by the end of a flight that is over.
  void raise_if_failed() {
    FailureBoard::instance().raise_if_failed();
    if (!has_failed()) return;
    PyruntimeFailure failure{};
    library_.check(library_.failure(&group_seen_, &failure, streams_.current()));
    std::array<char, 512> sentence{};
    library_.check(library_.describe_failure(&failure, sentence.data(), sentence.size()));
    raise_for_all({CommErrorKind::kTimeout,
                   "group '" + context_.name + "' on " + device_.str() + ": " + sentence.data(),
                   context_.name});
  }

  std::string name_;
  c10::Device device_;
  const DeviceLibrary& library_;
  DeviceStreams streams_;
  uint64_t last_number_ = 0;
  std::array<Slot, PYRUNTIME_SLOTS> slots_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;  // the last one is the one to use
  at::Tensor header_seen_;                              // of a workspace, copied here by the device
  PyruntimeGroup group_seen_{};                         // whose workspace that is
};

// What gathers and scatters have in common: a slot, chunks in it, and the end.
class DeviceFlight {
 public:
  DeviceFlight(DeviceTransport& transport, const FlightDescriptor& descriptor, int64_t bytes)
      : transport_(transport),
        descriptor_(descriptor),
        slot_(transport.claim(descriptor.op, bytes)),
        workspace_(*transport.workspaces_.back()) {
    group_ = {workspace_.shape, transport.rank(), slot_,
              static_cast<int64_t>(transport.context().deadline_seconds * 1e9), workspace_.bases.data()};
    void* data = nullptr;
    check(library().slot_data(&group_, &data));
    data_ = static_cast<char*>(data);
    streams().current_after(transport_.slots_[slot_].puts_ended);
  }

  const DeviceLibrary& library() const { return transport_.library_; }
  const DeviceStreams& streams() const { return transport_.streams_; }
  const FlightDescriptor& descriptor() const { return descriptor_; }
  void check(int code) const { library().check(code); }
  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }

  // `offset` in this rank's slot.
  char* at(int64_t offset) const { return data_ + offset; }
  char* staging(int64_t bytes) const {
    return static_cast<char*>(transport_.staging(slot_, bytes).data_ptr());
  }
  at::Tensor view(char* memory, const Chunk& chunk) const {
    const auto options = at::TensorOptions().dtype(descriptor_.scalar_type()).device(transport_.device_);
    if (chunk.rows * descriptor_.row_elements() == 0) return at::empty(descriptor_.sizes_of(chunk), options);
    return at::from_blob(memory, descriptor_.sizes_of(chunk), options);
  }

  // Puts what the caller's stream has written so far; nearest peer first, where it goes to all.
  void put(const char* from, int64_t bytes, int peer, int64_t offset, Flag flag) {
    streams().move_after_current();
    check(library().put(&group_, from, bytes, peer, offset, flag, streams().moving()));
  }
  void put_to_all(const char* from, int64_t bytes, int64_t offset, Flag flag) {
    for (int step = 1; step < world_size(); ++step) {
      put(from, bytes, (rank() + world_size() - step) % world_size(), offset, flag);
    }
  }
  void end_puts() {
    check(library().end_puts(&group_, streams().moving()));
    transport_.slots_[slot_].puts_ended = streams().moved();
  }
  void await(int peer, Flag flag) { check(library().await(&group_, peer, flag, streams().current())); }

  void finish() {
    check(library().finish(&group_, streams().current()));
    transport_.slots_[slot_].in_flight = false;
    streams().move_after_current();  // what this flight waited for is known by then
    const auto moving = streams().on_moving();
    transport_.header_seen_.copy_(workspace_.memory.narrow(0, 0, kHeaderBytes), /*non_blocking=*/true);
    transport_.group_seen_ = group_;
  }

 private:
  DeviceTransport& transport_;
  FlightDescriptor descriptor_;
  int slot_;
  Workspace& workspace_;
  PyruntimeGroup group_;
  char* data_;
};

namespace {

// The slot holds the rows of all ranks.
class DeviceGather : public GatherFlight {
 public:
  DeviceGather(DeviceTransport& transport, const FlightDescriptor& descriptor)
      : plan_(descriptor.rows, transport.world_size(), transport.rank(), /*pieces=*/1, descriptor.holder),
        order_(plan_.gather_order()),
        own_({plan_.own()}),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes()) {}

  const std::vector<Chunk>& order() const override { return order_; }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override { return flight_.view(flight_.at(offset(chunk)), chunk); }
  void publish(const Chunk& chunk) override {
    if (chunk.rows > 0) flight_.put_to_all(flight_.at(offset(chunk)), bytes(chunk), offset(chunk), kRows);
    flight_.end_puts();
  }
  void wait(const Chunk& chunk) override {
    if (chunk.rows > 0) flight_.await(chunk.owner, kRows);
  }
  void finish() override { flight_.finish(); }

 private:
  int64_t offset(const Chunk& chunk) const { return chunk.begin * flight_.descriptor().row_bytes(); }
  int64_t bytes(const Chunk& chunk) const { return chunk.rows * flight_.descriptor().row_bytes(); }

  ChunkPlan plan_;
  std::vector<Chunk> order_;
  std::vector<Chunk> own_;
  DeviceFlight flight_;
};

// The slot holds every rank's part of this rank's rows, by rank; then, where they are asked for, the sums of
// all rows.
class DeviceScatter : public ScatterFlight {
 public:
  DeviceScatter(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all)
      : all_(all),
        plan_(descriptor.rows, transport.world_size(), transport.rank()),
        order_(plan_.scatter_order()),
        sums_order_(plan_.gather_order()),
        part_bytes_(plan_.max_rows() * descriptor.row_bytes()),
        flight_(transport, descriptor,
                transport.world_size() * part_bytes_ + (all ? descriptor.rows * descriptor.row_bytes() : 0)) {
  }

  const std::vector<Chunk>& order() const override { return order_; }
  at::Tensor part(const Chunk& chunk) override {
    const bool stays = chunk.owner == flight_.rank();
    return flight_.view(stays ? part_of(flight_.rank()) : leaving(chunk), chunk);
  }
  void publish(const Chunk& chunk) override {
    if (chunk.owner == flight_.rank() || chunk.rows == 0) return;
    flight_.put(leaving(chunk), bytes(chunk), chunk.owner, flight_.rank() * part_bytes_, kRows);
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    const at::Tensor target = all_ ? sum(own) : out;
    if (own.rows > 0) {
      for (int rank = 0; rank < flight_.world_size(); ++rank) {
        if (rank != flight_.rank()) flight_.await(rank, kRows);
      }
      const std::vector<at::Tensor> summed = parts();
      sum_in_order(target.view(summed.front().sizes()), summed, bias, &flight_.library(),
                   flight_.streams().current());
    }
    if (all_ && own.rows > 0) flight_.put_to_all(sums_at(own), bytes(own), sums_offset(own), kSums);
    flight_.end_puts();
  }

  const std::vector<Chunk>& sums_order() const override { return sums_order_; }
  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank() && chunk.rows > 0) flight_.await(chunk.owner, kSums);
  }
  at::Tensor sum(const Chunk& chunk) override { return flight_.view(sums_at(chunk), chunk); }
  void finish() override { flight_.finish(); }

 private:
  char* part_of(int rank) const { return flight_.at(rank * part_bytes_); }
  char* leaving(const Chunk& chunk) const {
    const int64_t row_bytes = flight_.descriptor().row_bytes();
    return flight_.staging(plan_.rows() * row_bytes) + chunk.begin * row_bytes;
  }
  int64_t bytes(const Chunk& chunk) const { return chunk.rows * flight_.descriptor().row_bytes(); }
  int64_t sums_offset(const Chunk& chunk) const {
    return flight_.world_size() * part_bytes_ + chunk.begin * flight_.descriptor().row_bytes();
  }
  char* sums_at(const Chunk& chunk) const { return flight_.at(sums_offset(chunk)); }

  std::vector<at::Tensor> parts() const {
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < flight_.world_size(); ++rank) {
      all.push_back(flight_.view(part_of(rank), plan_.own()));
    }
    return all;
  }

  bool all_;
  ChunkPlan plan_;
  std::vector<Chunk> order_;
  std::vector<Chunk> sums_order_;
  int64_t part_bytes_;
  DeviceFlight flight_;
};

}  // namespace

std::unique_ptr<GatherFlight> DeviceTransport::gather(const FlightDescriptor& descriptor) {
  return std::make_unique<DeviceGather>(*this, descriptor);
}

std::unique_ptr<ScatterFlight> DeviceTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<DeviceScatter>(*this, descriptor, all);
}

std::vector<int64_t> DeviceTransport::rows_held(const FlightDescriptor& descriptor) {
  std::vector<int64_t> held = rows_held_by_gather(*this, descriptor);
  streams_.synchronize();
  raise_if_failed();  // before anybody believes these numbers
  return held;
}

std::unique_ptr<Transport> make_device_transport(GroupContext& context, const std::string& workspace,
                                                 c10::Device device, const DeviceLibrary& library) {
  return std::make_unique<DeviceTransport>(context, workspace, device, library);
}

}  // namespace pyruntime
