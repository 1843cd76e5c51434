// Gathers and scatters between the devices of one host.
#include <algorithm>
#include <vector>

#include "transport/device/fused_gemm.h"
#include "transport/device/one_host.h"
#include "transport/device/sums.h"
#include "transport/flights.h"

namespace pyruntime {

// Consecutive flags of a rank in a slot.
struct Flags {
  int first, count;
};

// The common part of gathers and scatters: a slot, its chunks, and its end.
class DeviceFlight {
 public:
  // `pieces`: how many each rank's rows have in a gather.
  DeviceFlight(DeviceTransport& transport, const FlightDescriptor& descriptor, int64_t bytes, int64_t flags,
               int pieces)
      : transport_(transport),
        descriptor_(descriptor),
        goes_around_(transport.goes_around(descriptor)),
        slot_(transport.claim(descriptor.op, bytes, flags)),
        workspace_(*transport.workspaces_.back()) {
    group_ = {workspace_.shape,
              transport.rank(),
              slot_,
              static_cast<int64_t>(transport.context().deadline_seconds * 1e9),
              workspace_.bases.data(),
              pieces,
              goes_around_ ? rings().ways() / 2 : 0,
              transport.ring_orders_.data()};
    void* data = nullptr;
    check(library().slot_data(&group_, &data));
    data_ = static_cast<char*>(data);
    if (goes_around_) around_number_ = ++transport.around_begun_;
    is_captured_ = transport.is_capturing();
    transport.was_captured_ |= is_captured_;
    await_leave();
  }

  const DeviceLibrary& library() const { return transport_.library_; }
  const DeviceStreams& streams() const { return transport_.streams_; }
  void check(int code) const { library().check(code); }
  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  const Rings& rings() const { return transport_.rings_; }

  // The offset of a chunk in the rows of all ranks.
  int64_t offset(const Chunk& chunk) const { return chunk.begin * descriptor_.row_bytes(); }
  int64_t bytes(const Chunk& chunk) const { return chunk.rows * descriptor_.row_bytes(); }
  // The address of `offset` in this rank's slot.
  char* at(int64_t offset) const { return data_ + offset; }
  char* staging(int64_t bytes) const {
    return static_cast<char*>(transport_.staging(slot_, bytes).data_ptr());
  }
  at::Tensor view(char* memory, const Chunk& chunk) const {
    return view_of(memory, descriptor_, chunk, transport_.device_);
  }

  // Puts what the caller's stream has written so far.
  void put(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    streams().move_after_current();
    put_more(from, bytes, peer, offset, flags);
  }
  // Puts what was written before the last put().
  void put_more(const char* from, int64_t bytes, int peer, int64_t offset, Flags flags) {
    check(library().put(&group_, from, bytes, peer, offset, flags.first, flags.count, streams().moving()));
  }
  // Puts what the caller's stream has written so far; all of it is announced behind the last.
  void put_together(const std::vector<PyruntimePut>& puts) {
    if (puts.empty()) return;
    streams().move_after_current();
    const auto count = static_cast<int32_t>(puts.size());
    check(library().put_together(&group_, puts.data(), count, streams().moving()));
  }
  int peer_at(int step) const { return (rank() + world_size() - step) % world_size(); }
  bool has_multicast() const { return workspace_.multicast != nullptr; }
  // Puts from this rank's slot to the same place in all others', nearest peer first.
  void put_own_to_all(int64_t offset, int64_t bytes, Flags flags) {
    streams().move_after_current();
    if (has_multicast()) return multicast_more(offset, bytes, flags);
    for (int step = 1; step < world_size(); ++step) {
      put_more(at(offset), bytes, peer_at(step), offset, flags);
    }
  }
  void multicast_more(int64_t offset, int64_t bytes, Flags flags) {
    check(library().put_to_all(&group_, workspace_.multicast, offset, bytes, flags.first, flags.count,
                               streams().moving()));
  }
  // out = the sum over all ranks of what their slots have at `offset` (+ bias); out is contiguous.
  void sum_copies(const at::Tensor& out, int64_t offset, const at::Tensor& bias) {
    const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
    check(library().sum_copies(
        &group_, workspace_.multicast, out.data_ptr(), offset, out.numel(), library_dtype(out.scalar_type()),
        added.defined() ? added.const_data_ptr() : nullptr, descriptor_.width, streams().current()));
  }
  void end_puts() {
    check(library().end_puts(&group_, streams().moving()));
    transport_.slots_[slot_].puts_ended = streams().moved();
  }
  // Puts this rank's pieces on their ways around the rings, then passes on what arrives on each way. Every
  // rank does this step by step and flight by flight in the same order, even if all ways share a queue: a
  // rank puts what another waits for before it waits for more.
  void put_around(const ChunkPlan& plan) {
    TORCH_CHECK(around_number_ == ++transport_.around_published_, name_of(descriptor_.op), " of group '",
                transport_.context().name, "' is published in another order than it began, beside gathers ",
                "that go around rings too; publish them as they begin, on all ranks.");
    streams().ways_after_current();
    for (int step = 0; step + 1 < world_size(); ++step) {
      for (int way = 0; way < rings().ways(); ++way) {
        const int owner = rings().before(way, rank(), step), next = rings().before(way, rank(), -1);
        const Chunk piece = plan.piece(owner, way);
        if (step == 0) {
          check(library().put(&group_, at(offset(piece)), bytes(piece), next, offset(piece), way, 1,
                              streams().way(way)));
        } else {
          check(library().pass_on(&group_, owner, bytes(piece), next, offset(piece), way, 1,
                                  streams().way(way)));
        }
      }
    }
    streams().join_ways();
    check(library().end_puts(&group_, streams().way(0)));
    transport_.slots_[slot_].puts_ended = streams().first_way();
  }
  void await(int peer, Flags flags) {
    const Spending waiting = waiting_for(peer);
    check(library().await(&group_, peer, flags.first, flags.count, streams().current()));
  }
  c10::Device device() const { return transport_.device_; }
  // Waits for all other ranks in one launch.
  void await_all(Flags flags) {
    const Spending waiting = waiting_for(world_size() == 2 ? peer_at(1) : -1);
    check(library().await_all(&group_, flags.first, flags.count, streams().current()));
  }
  GroupContext& context() const { return transport_.context(); }

  void gather_and_multiply(const FusedGemm& gemm) {
    multiply(gemm, library().all_gather_matmul, library().sm90_all_gather_matmul);
  }
  void multiply_and_scatter(const FusedGemm& gemm) {
    multiply(gemm, library().matmul_reduce_scatter, library().sm90_matmul_reduce_scatter);
    end_puts();
    is_finished_ = true;
  }

  void finish() {
    if (!is_finished_) {
      // A multicast store also writes this rank's own copy, and pieces that go around a ring are read from
      // there: peers may put other rows there once this has ended.
      if (has_multicast() || goes_around_) {
        const Spending waiting = waiting_for(/*peer=*/-1);
        streams().current_after(transport_.slots_[slot_].puts_ended);
      }
      check(library().finish(&group_, streams().current()));
    }
    transport_.slots_[slot_].in_flight = false;
    streams().move_after_current();  // by then it is known what this flight waited for
    {
      const auto moving = streams().on_moving();
      workspace_.header_seen.copy_(workspace_.memory.narrow(0, 0, kDeviceHeaderBytes), /*non_blocking=*/true);
    }
    if (is_captured_) leave_nothing_beside_the_graph();
  }

 private:
  Spending waiting_for(int peer) const {
    return {context(), Entered::kWait, name_of(descriptor_.op), peer, device()};
  }
  // Waits until this rank may write into its slot.
  void await_leave() {
    if (!is_captured_ && transport_.slots_[slot_].puts_ended) {
      const Spending waiting = waiting_for(/*peer=*/-1);
      streams().current_after(transport_.slots_[slot_].puts_ended);
    }
    // After a flight with sums in the switch, peers that have not finished may still read this rank's slot,
    // and a finished peer's slot may still be read by others. A put waits only for its own peer.
    if (transport_.multicast_ == Multicast::kGatherAndReduce) {
      const Spending waiting = waiting_for(/*peer=*/-1);
      check(library().await_leave(&group_, streams().current()));
    }
  }
  void multiply(const FusedGemm& gemm, FusedKernel portable, FusedKernel hopper) {
    multiply_fused(library(), group_, descriptor_.rows * descriptor_.inner, gemm, transport_.fused_place(),
                   portable, hopper);
  }
  // A graph ends on the stream that it began on, and its events mean nothing outside.
  void leave_nothing_beside_the_graph() {
    streams().current_after(streams().moved());
    transport_.slots_[slot_].puts_ended.reset();
  }

  DeviceTransport& transport_;
  FlightDescriptor descriptor_;
  bool goes_around_;
  uint64_t around_number_ = 0;  // among the gathers that go around rings
  int slot_;
  DeviceWorkspace& workspace_;
  PyruntimeGroup group_;
  char* data_;
  bool is_captured_;          // into a graph, and not run now
  bool is_finished_ = false;  // by the kernel that did everything
};

namespace {

// A gather: the slot contains the rows of all ranks.
class DeviceGather : public GatherByRank {
 public:
  DeviceGather(DeviceTransport& transport, const FlightDescriptor& descriptor)
      : GatherByRank(transport.context(), descriptor),
        pieces_(transport.pieces_of(descriptor)),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes(), pieces_, pieces_) {}

  at::Tensor memory(const Chunk& chunk) override {
    return flight_.view(flight_.at(flight_.offset(chunk)), chunk);
  }
  void publish(const Chunk& chunk) override {
    const ChunkPlan pieces = pieces_of(chunk);
    flight_.streams().move_after_current();
    const auto for_each_piece = [&](const auto& put) {
      for (int i = 0; i < pieces_that_exist(chunk); ++i) {
        const Chunk piece = pieces.piece(0, i);
        put(flight_.offset(chunk) + piece.begin * bytes_of_a_row(), piece.rows * bytes_of_a_row(),
            Flags{i, 1});
      }
    };
    if (flight_.has_multicast()) {
      // This rank's own rows are stored again, with the same bits, while this rank may be reading them.
      for_each_piece(
          [&](int64_t at, int64_t bytes, Flags flags) { flight_.multicast_more(at, bytes, flags); });
    } else {
      for (int step = 1; step < flight_.world_size(); ++step) {
        for_each_piece([&](int64_t at, int64_t bytes, Flags flags) {
          flight_.put_more(flight_.at(at), bytes, flight_.peer_at(step), at, flags);
        });
      }
    }
    flight_.end_puts();
  }
  void publish_together(const std::vector<Chunk>& own) override {
    const bool at_once = pieces_ == 1 && !flight_.has_multicast();
    if (!at_once || own.front().rows == 0) return GatherByRank::publish_together(own);
    const int64_t at = flight_.offset(own.front()), bytes = flight_.bytes(own.front());
    std::vector<PyruntimePut> puts;
    for (int step = 1; step < flight_.world_size(); ++step) {
      puts.push_back({flight_.at(at), bytes, flight_.peer_at(step), at, /*first=*/0, /*flags=*/1});
    }
    flight_.put_together(puts);
    flight_.end_puts();
  }
  void wait(const Chunk& chunk) override {
    if (chunk.rows > 0) flight_.await(chunk.owner, {0, pieces_that_exist(chunk)});
  }
  void wait_together(const std::vector<Chunk>& chunks) override {
    const auto has_all_pieces = [&](const Chunk& chunk) {
      return chunk.rows > 0 && pieces_that_exist(chunk) == pieces_;
    };
    const bool are_all = static_cast<int>(chunks.size()) + 1 == flight_.world_size();
    if (!are_all || !std::all_of(chunks.begin(), chunks.end(), has_all_pieces))
      return GatherByRank::wait_together(chunks);
    flight_.await_all({0, pieces_});
  }
  void multiply(const FusedGemm& gemm) override { flight_.gather_and_multiply(gemm); }
  void finish() override { flight_.finish(); }

 private:
  // The pieces of a chunk's rows in memory. With several pieces, `inner` rows in memory make a row.
  ChunkPlan pieces_of(const Chunk& chunk) const { return {rows_in_memory(chunk), 1, 0, pieces_}; }
  int64_t rows_in_memory(const Chunk& chunk) const {
    return chunk.rows * (pieces_ == 1 ? 1 : descriptor_.inner);
  }
  int64_t bytes_of_a_row() const {
    return pieces_ == 1 ? descriptor_.row_bytes() : descriptor_.row_bytes() / descriptor_.inner;
  }
  // With fewer rows than pieces, the first pieces have them.
  int pieces_that_exist(const Chunk& chunk) const {
    return static_cast<int>(std::min<int64_t>(pieces_, rows_in_memory(chunk)));
  }

  int pieces_;
  DeviceFlight flight_;
};

// A gather whose rows travel from neighbour to neighbour: see Rings.
class DeviceGatherAround : public GatherFlight {
 public:
  DeviceGatherAround(DeviceTransport& transport, const FlightDescriptor& descriptor)
      : plan_(descriptor.rows, transport.world_size(), transport.rank(), transport.pieces_of(descriptor)),
        own_({plan_.own()}),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes(), plan_.pieces(),
                plan_.pieces()),
        order_(flight_.rings().gather_order(plan_)) {}

  const std::vector<Chunk>& order() const override { return order_; }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override {
    return flight_.view(flight_.at(flight_.offset(chunk)), chunk);
  }
  void publish(const Chunk& /*chunk*/) override { flight_.put_around(plan_); }
  void wait(const Chunk& chunk) override { flight_.await(chunk.owner, {chunk.piece, chunk.pieces}); }
  void wait_together(const std::vector<Chunk>& chunks) override {
    if (chunks.size() + 1 != order_.size()) return GatherFlight::wait_together(chunks);
    flight_.await_all({0, plan_.pieces()});
  }
  void multiply(const FusedGemm& gemm) override { flight_.gather_and_multiply(gemm); }
  void finish() override { flight_.finish(); }

 private:
  ChunkPlan plan_;
  std::vector<Chunk> own_;
  DeviceFlight flight_;
  std::vector<Chunk> order_;
};

// A scatter: the slot contains parts and then, if requested, the sums of all rows.
class DeviceScatter : public ScatterByRank {
 public:
  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    if (own.rows > 0) {
      const int others = flight_.world_size() - 1;
      Reading reading(flight_.context(), descriptor_.op, others == 1 ? 1 - flight_.rank() : -1, begun_,
                      flight_.device());
      flight_.await_all(part_flags(own));
      reading.came(others * flight_.bytes(own));
      const Spending summing(flight_.context(), Entered::kSum, name_of(descriptor_.op), /*peer=*/-1,
                             flight_.device());
      sum_own(all_ ? sum(own) : out, bias);
      if (all_) flight_.put_own_to_all(sum_offset(own), flight_.bytes(own), sum_flag_);
    }
    flight_.end_puts();
  }

  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank() && chunk.rows > 0) flight_.await(chunk.owner, sum_flag_);
  }
  at::Tensor sum(const Chunk& chunk) override { return flight_.view(flight_.at(sum_offset(chunk)), chunk); }
  void finish() override { flight_.finish(); }

 protected:
  // The flag behind `flags_of_parts` announces an owner's sums.
  DeviceScatter(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all, int64_t parts_bytes,
                int flags_of_parts)
      : ScatterByRank(transport.context(), descriptor, all),
        parts_bytes_(parts_bytes),
        sum_flag_{flags_of_parts, 1},
        flight_(transport, descriptor, parts_bytes + (all ? descriptor.rows * descriptor.row_bytes() : 0),
                flags_of_parts + 1, /*pieces=*/0) {
    begun_ = begin_of_op(flight_.device());
  }

  virtual Flags part_flags(const Chunk& chunk) const = 0;
  // Sums the parts of this rank's rows, which have arrived.
  virtual void sum_own(const at::Tensor& out, const at::Tensor& bias) = 0;

 private:
  int64_t sum_offset(const Chunk& chunk) const { return parts_bytes_ + flight_.offset(chunk); }

  int64_t parts_bytes_;
  Flags sum_flag_;

 protected:
  DeviceFlight flight_;
};

// A scatter whose slot contains every rank's part of this rank's rows, by rank.
class PartsToOwners : public DeviceScatter {
 public:
  PartsToOwners(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all)
      : PartsToOwners(transport, descriptor, all, rows_of_rank(descriptor.rows, transport.world_size(), 0)) {}

  at::Tensor part(const Chunk& chunk) override { return flight_.view(leaving(chunk), chunk); }
  void publish(const Chunk& chunk) override {
    if (chunk.owner == flight_.rank() || chunk.rows == 0) return;
    flight_.put(leaving(chunk), flight_.bytes(chunk), chunk.owner, flight_.rank() * part_bytes_,
                part_flags(chunk));
  }
  void publish_together(const std::vector<Chunk>& chunks) override {
    std::vector<PyruntimePut> puts;
    for (const Chunk& chunk : chunks) {
      if (chunk.owner == flight_.rank() || chunk.rows == 0) continue;
      const Flags flags = part_flags(chunk);
      puts.push_back({leaving(chunk), flight_.bytes(chunk), chunk.owner, flight_.rank() * part_bytes_,
                      flags.first, flags.count});
    }
    flight_.put_together(puts);
  }
  void multiply(const FusedGemm& gemm) override { flight_.multiply_and_scatter(gemm); }

 private:
  PartsToOwners(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all, int64_t most_rows)
      : DeviceScatter(transport, descriptor, all, transport.world_size() * most_rows * descriptor.row_bytes(),
                      transport.flags_of_part(descriptor, most_rows)),
        transport_(transport),
        part_bytes_(most_rows * descriptor.row_bytes()) {}

  Flags part_flags(const Chunk& chunk) const override {
    return {0, transport_.flags_of_part(descriptor_, chunk.rows)};
  }
  void sum_own(const at::Tensor& out, const at::Tensor& bias) override {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < flight_.world_size(); ++rank) {
      const Chunk& own = plan_.own();
      parts.push_back(flight_.view(rank == own.owner ? leaving(own) : part_of(rank), own));
    }
    sum_in_order(out.view(parts.front().sizes()), parts, bias, &flight_.library(),
                 flight_.streams().current());
  }
  // Another rank's; this rank's place stays empty.
  char* part_of(int rank) const { return flight_.at(rank * part_bytes_); }
  char* leaving(const Chunk& chunk) const {
    return flight_.staging(plan_.rows() * descriptor_.row_bytes()) + flight_.offset(chunk);
  }

  const DeviceTransport& transport_;
  int64_t part_bytes_;
};

// A scatter with sums in the switch (NVLink multicast): the slot contains this rank's part of all rows, and
// each owner reads its own rows from all ranks at once. Peers read the slot, so nobody writes into it again
// before all have finished: see DeviceFlight.
class SwitchSums : public DeviceScatter {
 public:
  SwitchSums(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all)
      : DeviceScatter(transport, descriptor, all, descriptor.rows * descriptor.row_bytes(),
                      /*flags_of_parts=*/1) {}

  at::Tensor part(const Chunk& chunk) override {
    return flight_.view(flight_.at(flight_.offset(chunk)), chunk);
  }
  // The part stays in place; its owner is told that it may read.
  void publish(const Chunk& chunk) override {
    if (chunk.owner == flight_.rank() || chunk.rows == 0) return;
    flight_.put(nullptr, 0, chunk.owner, 0, part_flags(chunk));
  }

 private:
  Flags part_flags(const Chunk& /*chunk*/) const override { return {0, 1}; }
  void sum_own(const at::Tensor& out, const at::Tensor& bias) override {
    flight_.sum_copies(out, flight_.offset(plan_.own()), bias);
  }
};

}  // namespace

std::unique_ptr<GatherFlight> DeviceTransport::gather(const FlightDescriptor& descriptor) {
  if (goes_around(descriptor)) return std::make_unique<DeviceGatherAround>(*this, descriptor);
  return std::make_unique<DeviceGather>(*this, descriptor);
}

std::unique_ptr<ScatterFlight> DeviceTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  if (sums_in_the_switch(descriptor)) return std::make_unique<SwitchSums>(*this, descriptor, all);
  return std::make_unique<PartsToOwners>(*this, descriptor, all);
}

}  // namespace pyruntime
