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
#include "transport/fused_product.h"
#include "transport/rows_held.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

constexpr int64_t kSlotGranularity = int64_t{1} << 16;
// Of a workspace: what it begins with is zero until something fails.
constexpr int64_t kHeaderBytes = 128;

// Of a rank's rows, to a product: so the last wait is for a fraction of them. More would be more signals than
// time gained.
constexpr int kMostPieces = 4;
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kFewestFlags = kMostPieces;

// Flags of a rank in a slot, one after the other.
struct Flags {
  int first, count;
};

// Symmetric memory on every rank, as the library lays it out: slots of so many bytes.
struct Workspace {
  PyruntimeWorkspace shape;
  at::Tensor memory;
  c10::intrusive_ptr<symm::SymmetricMemory> handle;
  std::vector<void*> bases;  // every rank's
  at::Tensor header_seen;    // what it began with when the last flight here ended, copied by the device
  PyruntimeGroup seen{};     // that flight's
};

// The least power of two that is `size`, at least `least`.
int64_t rounded_up(int64_t size, int64_t least) {
  int64_t result = least;
  while (result < size) result *= 2;
  return result;
}

}  // namespace

class DeviceTransport : public Transport {
 public:
  DeviceTransport(GroupContext& context, std::string name, c10::Device device, const DeviceLibrary& library,
                  int64_t piece_bytes)
      : Transport(context),
        name_(std::move(name)),
        device_(device),
        library_(library),
        piece_bytes_(piece_bytes > 0 ? piece_bytes : kPieceBytes),
        streams_(device) {}

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override;
  std::string why_not_fused(const FlightDescriptor& descriptor) const override;
  std::vector<std::string> tiles() const override { return tile_names(library_); }
  std::vector<std::string> other_tiles(int64_t rows, int64_t n, int64_t k) const override {
    return other_tile_names(library_, world_size(), rows, n, k);
  }

  // How many flags say, piece by piece, that the rows of a rank have come.
  int pieces_of(const FlightDescriptor& descriptor) const;
  // How many flags say that a part of so many rows has come. Ranks whose kernels raise them one by one and
  // ranks that raise them together need not know of each other.
  int flags_of_part(const FlightDescriptor& descriptor, int64_t rows) const;

  void flush() override {
    streams_.synchronize();
    if (std::any_of(workspaces_.begin(), workspaces_.end(), has_failed)) {
      TORCH_WARN("Group '", context_.name, "' on ", device_,
                 " is closed after a wait that took too long: ", "results of its last ops are of no use.");
    }
  }
  void leave() override { flush(); }
  bool crosses_hosts() const override { return false; }
  bool is_capturing() const override { return library_.is_capturing(streams_.current()) != 0; }
  std::string description() const override {
    return "symmetric memory and copy engines, " + std::to_string(world_size()) + " ranks of one host";
  }
  int64_t workspace_bytes() const override {
    int64_t total = 0;
    for (const auto& workspace : workspaces_) total += workspace->memory.numel();
    for (const Slot& slot : slots_) total += slot.staging.defined() ? slot.staging.numel() : 0;
    for (const at::Tensor& memory : kept_) total += memory.numel();
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

  // A slot of the workspace for the next flight, with room for so many bytes and flags on every rank.
  int claim(Op op, int64_t bytes, int64_t flags) {
    raise_if_failed();
    const int slot = static_cast<int>(++last_number_ % slots_.size());
    TORCH_CHECK(!slots_[slot].in_flight, "Group '", context_.name, "' already has ", slots_.size(),
                " ops in flight on ", device_, "; finish one before beginning ", name_of(op), ".");
    const bool fits = !workspaces_.empty() && workspaces_.back()->shape.slot_bytes >= bytes &&
                      workspaces_.back()->shape.flags >= flags;
    if (!fits) grow(bytes, flags);
    slots_[slot].in_flight = true;
    ++context_.stats.ops;
    return slot;
  }

  // All ranks come here with the same op, as all have claimed the same bytes so far. The memory before stays,
  // because flights may be under way in it; together it is less than the new one.
  void grow(int64_t bytes, int64_t flags) {
    TORCH_CHECK(!is_capturing(), "Group '", context_.name, "' needs a larger workspace on ", device_,
                ", which cannot be made while a CUDA graph is captured; run the ops once before.");
    auto made = std::make_unique<Workspace>();
    const auto options = at::TensorOptions().dtype(c10::kByte).pinned_memory(!device_.is_cpu());
    made->header_seen = at::zeros({kHeaderBytes}, options);
    if (!workspaces_.empty()) {
      bytes = std::max(bytes, workspaces_.back()->shape.slot_bytes);
      flags = std::max<int64_t>(flags, workspaces_.back()->shape.flags);
    }
    made->shape = {world_size(), static_cast<int32_t>(rounded_up(flags, kFewestFlags)),
                   rounded_up(bytes, kSlotGranularity)};
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
      if (memory.defined() && was_captured_) kept_.push_back(memory);
      memory = at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(device_));
    }
    return memory;
  }

  static bool has_failed(const std::unique_ptr<Workspace>& workspace) {
    const auto* seen = static_cast<const char*>(workspace->header_seen.const_data_ptr());
    return std::any_of(seen, seen + kHeaderBytes, [](char byte) { return byte != 0; });
  }

  // Looks at what the device had written down by the end of a flight that is over.
  void raise_if_failed() {
    FailureBoard::instance().raise_if_failed();
    // In a workspace that was outgrown, too: a graph that was captured with it may still be replayed.
    const auto found = std::find_if(workspaces_.begin(), workspaces_.end(), has_failed);
    if (found == workspaces_.end()) return;
    PyruntimeFailure failure{};
    library_.check(library_.failure(&(*found)->seen, &failure, streams_.current()));
    std::array<char, 512> sentence{};
    library_.check(library_.describe_failure(&failure, sentence.data(), sentence.size()));
    raise_for_all({CommErrorKind::kTimeout,
                   "group '" + context_.name + "' on " + device_.str() + ": " + sentence.data(),
                   context_.name});
  }

  std::string name_;
  c10::Device device_;
  const DeviceLibrary& library_;
  int64_t piece_bytes_;
  DeviceStreams streams_;
  uint64_t last_number_ = 0;
  std::array<Slot, PYRUNTIME_SLOTS> slots_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;  // the last one is the one to use
  bool was_captured_ = false;                           // any flight, into a graph
  std::vector<at::Tensor> kept_;                        // what graphs still use
};

// What gathers and scatters have in common: a slot, chunks in it, and the end.
class DeviceFlight {
 public:
  // `pieces`: of each rank's rows in a gather.
  DeviceFlight(DeviceTransport& transport, const FlightDescriptor& descriptor, int64_t bytes, int64_t flags,
               int pieces)
      : transport_(transport),
        descriptor_(descriptor),
        slot_(transport.claim(descriptor.op, bytes, flags)),
        workspace_(*transport.workspaces_.back()) {
    group_ = {workspace_.shape,
              transport.rank(),
              slot_,
              static_cast<int64_t>(transport.context().deadline_seconds * 1e9),
              workspace_.bases.data(),
              pieces};
    void* data = nullptr;
    check(library().slot_data(&group_, &data));
    data_ = static_cast<char*>(data);
    is_captured_ = transport.is_capturing();
    transport.was_captured_ |= is_captured_;
    if (!is_captured_) streams().current_after(transport_.slots_[slot_].puts_ended);
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
  void put(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    streams().move_after_current();
    put_more(from, bytes, peer, offset, flags);
  }
  // What was written before the put before.
  void put_more(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    check(library().put(&group_, from, bytes, peer, offset, flags.first, flags.count, streams().moving()));
  }
  int peer_at(int step) const { return (rank() + world_size() - step) % world_size(); }
  void put_to_all(const char* from, int64_t bytes, int64_t offset, Flags flags) {
    streams().move_after_current();
    for (int step = 1; step < world_size(); ++step) put_more(from, bytes, peer_at(step), offset, flags);
  }
  void end_puts() {
    check(library().end_puts(&group_, streams().moving()));
    transport_.slots_[slot_].puts_ended = streams().moved();
  }
  void await(int peer, Flags flags) {
    check(library().await(&group_, peer, flags.first, flags.count, streams().current()));
  }

  // `rows`: over all ranks, as the kernels count them.
  void gather_and_multiply(int64_t rows, const FusedProduct& product) {
    pyruntime::gather_and_multiply(library(), group_, rows, product, streams().current());
  }
  void multiply_and_scatter(int64_t rows, const FusedProduct& product) {
    pyruntime::multiply_and_scatter(library(), group_, rows, product, streams().current());
    end_puts();
    is_finished_ = true;
  }

  void finish() {
    if (!is_finished_) check(library().finish(&group_, streams().current()));
    transport_.slots_[slot_].in_flight = false;
    streams().move_after_current();  // what this flight waited for is known by then
    {
      const auto moving = streams().on_moving();
      workspace_.header_seen.copy_(workspace_.memory.narrow(0, 0, kHeaderBytes), /*non_blocking=*/true);
      workspace_.seen = group_;
    }
    if (is_captured_) leave_nothing_beside_the_graph();
  }

 private:
  // A graph ends on the stream that it began on, and its events mean nothing outside.
  void leave_nothing_beside_the_graph() {
    streams().current_after(streams().moved());
    transport_.slots_[slot_].puts_ended.reset();
  }

  DeviceTransport& transport_;
  FlightDescriptor descriptor_;
  int slot_;
  Workspace& workspace_;
  PyruntimeGroup group_;
  char* data_;
  bool is_captured_;          // into a graph, and not run now
  bool is_finished_ = false;  // by the kernel that did it all
};

namespace {

// The slot holds the rows of all ranks.
class DeviceGather : public GatherFlight {
 public:
  DeviceGather(DeviceTransport& transport, const FlightDescriptor& descriptor)
      : plan_(descriptor.rows, transport.world_size(), transport.rank(), /*pieces=*/1, descriptor.holder),
        order_(plan_.gather_order()),
        own_({plan_.own()}),
        pieces_(transport.pieces_of(descriptor)),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes(), pieces_, pieces_) {}

  const std::vector<Chunk>& order() const override { return order_; }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override { return flight_.view(flight_.at(offset(chunk)), chunk); }
  void publish(const Chunk& chunk) override {
    const ChunkPlan pieces = pieces_of(chunk);
    flight_.streams().move_after_current();
    for (int step = 1; step < flight_.world_size(); ++step) {
      for (int i = 0; i < pieces_that_exist(chunk); ++i) {
        const Chunk piece = pieces.piece(0, i);
        const int64_t at = offset(chunk) + piece.begin * bytes_of_a_row();
        flight_.put_more(flight_.at(at), piece.rows * bytes_of_a_row(), flight_.peer_at(step), at, {i, 1});
      }
    }
    flight_.end_puts();
  }
  void wait(const Chunk& chunk) override {
    if (chunk.rows > 0) flight_.await(chunk.owner, {0, pieces_that_exist(chunk)});
  }
  void multiply(const FusedProduct& product) override {
    flight_.gather_and_multiply(descriptor().rows * descriptor().inner, product);
  }
  void finish() override { flight_.finish(); }

 private:
  const FlightDescriptor& descriptor() const { return flight_.descriptor(); }
  int64_t offset(const Chunk& chunk) const { return chunk.begin * descriptor().row_bytes(); }

  // Of a chunk's rows as they lie in memory. Where there are several pieces, `inner` of those make a row.
  ChunkPlan pieces_of(const Chunk& chunk) const { return {rows_in_memory(chunk), 1, 0, pieces_}; }
  int64_t rows_in_memory(const Chunk& chunk) const {
    return chunk.rows * (pieces_ == 1 ? 1 : descriptor().inner);
  }
  int64_t bytes_of_a_row() const {
    return pieces_ == 1 ? descriptor().row_bytes() : descriptor().row_bytes() / descriptor().inner;
  }
  // The first ones have the rows, where there are fewer of them.
  int pieces_that_exist(const Chunk& chunk) const {
    return static_cast<int>(std::min<int64_t>(pieces_, rows_in_memory(chunk)));
  }

  ChunkPlan plan_;
  std::vector<Chunk> order_;
  std::vector<Chunk> own_;
  int pieces_;
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
        sums_flag_{transport.flags_of_part(descriptor, plan_.max_rows()), 1},
        transport_(transport),
        flight_(transport, descriptor,
                transport.world_size() * part_bytes_ + (all ? descriptor.rows * descriptor.row_bytes() : 0),
                sums_flag_.first + sums_flag_.count, /*pieces=*/0) {}

  const std::vector<Chunk>& order() const override { return order_; }
  at::Tensor part(const Chunk& chunk) override {
    const bool stays = chunk.owner == flight_.rank();
    return flight_.view(stays ? part_of(flight_.rank()) : leaving(chunk), chunk);
  }
  void publish(const Chunk& chunk) override {
    if (chunk.owner == flight_.rank() || chunk.rows == 0) return;
    flight_.put(leaving(chunk), bytes(chunk), chunk.owner, flight_.rank() * part_bytes_, flags_of(chunk));
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    const at::Tensor target = all_ ? sum(own) : out;
    if (own.rows > 0) {
      for (int rank = 0; rank < flight_.world_size(); ++rank) {
        if (rank != flight_.rank()) flight_.await(rank, flags_of(own));
      }
      const std::vector<at::Tensor> summed = parts();
      sum_in_order(target.view(summed.front().sizes()), summed, bias, &flight_.library(),
                   flight_.streams().current());
    }
    if (all_ && own.rows > 0) flight_.put_to_all(sums_at(own), bytes(own), sums_offset(own), sums_flag_);
    flight_.end_puts();
  }

  void multiply(const FusedProduct& product) override {
    flight_.multiply_and_scatter(flight_.descriptor().rows * flight_.descriptor().inner, product);
  }

  const std::vector<Chunk>& sums_order() const override { return sums_order_; }
  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank() && chunk.rows > 0) flight_.await(chunk.owner, sums_flag_);
  }
  at::Tensor sum(const Chunk& chunk) override { return flight_.view(sums_at(chunk), chunk); }
  void finish() override { flight_.finish(); }

 private:
  Flags flags_of(const Chunk& chunk) const {
    return {0, transport_.flags_of_part(flight_.descriptor(), chunk.rows)};
  }
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
  Flags sums_flag_;  // behind those of the largest part
  const DeviceTransport& transport_;
  DeviceFlight flight_;
};

}  // namespace

std::unique_ptr<GatherFlight> DeviceTransport::gather(const FlightDescriptor& descriptor) {
  return std::make_unique<DeviceGather>(*this, descriptor);
}

std::unique_ptr<ScatterFlight> DeviceTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<DeviceScatter>(*this, descriptor, all);
}

// Of what all ranks know alone, so that slots look alike on all, whichever tier each of them takes.
std::string DeviceTransport::why_not_fused(const FlightDescriptor& descriptor) const {
  const auto why = [](const auto&... words) { return c10::str(words...); };
  if (descriptor.op != Op::kAllGatherMatmul && descriptor.op != Op::kMatmulReduceScatter) {
    return "no fused kernel computes it";
  }
  const c10::ScalarType dtype = descriptor.scalar_type();
  if (dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half) {
    return why("the fused kernels multiply bfloat16 and float16, and this is ", dtype);
  }
  if (descriptor.row_blocks != 1) {
    return why("a rank's rows lie in ", descriptor.row_blocks,
               " blocks, and the fused kernels take one; cut dimension 0, or batches of one");
  }
  if (descriptor.inner != 1 && descriptor.rows % world_size() != 0) {
    return why("the fused kernels cut ", descriptor.rows, " x ", descriptor.inner,
               " rows elsewhere than between the ", descriptor.rows,
               "; make them a multiple of the number of ranks");
  }
  if (descriptor.width % 8 != 0 || descriptor.width == 0) {
    return why("rows of ", descriptor.width,
               " elements travel, and those of the fused kernels are multiples of 8 wide");
  }
  return "";
}

int DeviceTransport::pieces_of(const FlightDescriptor& descriptor) const {
  if (descriptor.op != Op::kAllGatherMatmul || descriptor.row_blocks != 1) return 1;
  const int64_t bytes = rows_of_rank(descriptor.rows, world_size(), 0) * descriptor.row_bytes();
  return static_cast<int>(std::clamp<int64_t>(bytes / piece_bytes_, 1, kMostPieces));
}

int DeviceTransport::flags_of_part(const FlightDescriptor& descriptor, int64_t rows) const {
  if (descriptor.op != Op::kMatmulReduceScatter || !why_not_fused(descriptor).empty()) return 1;
  const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  return static_cast<int>(pieces(rows * descriptor.inner, PYRUNTIME_SIGNAL_ROWS) *
                          pieces(descriptor.width, PYRUNTIME_SIGNAL_COLUMNS));
}

std::vector<int64_t> DeviceTransport::rows_held(const FlightDescriptor& descriptor) {
  std::vector<int64_t> held = rows_held_by_gather(*this, descriptor);
  streams_.synchronize();
  raise_if_failed();  // before anybody believes these numbers
  return held;
}

std::unique_ptr<Transport> make_device_transport(GroupContext& context, const std::string& workspace,
                                                 c10::Device device, const DeviceLibrary& library,
                                                 int64_t piece_bytes) {
  return std::make_unique<DeviceTransport>(context, workspace, device, library, piece_bytes);
}

}  // namespace pyruntime
