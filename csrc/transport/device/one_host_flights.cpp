// Gathers and scatters between the devices of one host.
#include <algorithm>
#include <optional>
#include <vector>

#include "transport/device/device_flight.h"

namespace pyruntime {

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
      sum_own(all_ ? sum(own) : out, bias, /*most_blocks=*/0);
      if (all_) flight_.put_own_to_all(sum_offset(own), flight_.bytes(own), sum_flag_);
    }
    flight_.end_puts();
  }

  bool can_reduce_beside() const override {
    return !all_ && plan_.own().rows > 0 && !flight_.device().is_cpu();
  }
  void reduce_beside(const at::Tensor& out, const at::Tensor& bias) override {
    const auto beside = flight_.streams().on_summing();
    out.record_stream(flight_.streams().current_stream());
    flight_.follow_all(part_flags(plan_.own()));
    sum_own(out, bias, kBlocksBeside);
    flight_.end_puts();
    flight_.finish_beside();
    summed_ = flight_.streams().done();
  }

  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank() && chunk.rows > 0) flight_.await(chunk.owner, sum_flag_);
  }
  at::Tensor sum(const Chunk& chunk) override { return flight_.view(flight_.at(sum_offset(chunk)), chunk); }
  void finish() override {
    if (summed_) {
      const int others = flight_.world_size() - 1;
      Reading reading(flight_.context(), descriptor_.op, others == 1 ? 1 - flight_.rank() : -1, begun_,
                      flight_.device());
      flight_.await_beside(summed_);
      reading.came(others * flight_.bytes(plan_.own()));
    }
    flight_.finish();
  }

 protected:
  // Blocks of a sum beside GEMMs: of an H100, a third, which draws the bandwidth of its memory.
  static constexpr int32_t kBlocksBeside = 384;

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
  virtual void sum_own(const at::Tensor& out, const at::Tensor& bias, int32_t most_blocks) = 0;

 private:
  std::optional<c10::Event> summed_;  // beside the caller's stream

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
  void sum_own(const at::Tensor& out, const at::Tensor& bias, int32_t most_blocks) override {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < flight_.world_size(); ++rank) {
      const Chunk& own = plan_.own();
      parts.push_back(flight_.view(rank == own.owner ? leaving(own) : part_of(rank), own));
    }
    sum_in_order(out.view(parts.front().sizes()), parts, bias, &flight_.library(),
                 flight_.streams().current(), most_blocks);
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
  void sum_own(const at::Tensor& out, const at::Tensor& bias, int32_t /*most_blocks*/) override {
    flight_.sum_copies(out, flight_.offset(plan_.own()), bias);
  }
};

// A deal: the slot contains what comes to this rank, by source. Every rank raises one flag on every other,
// also where it sends nothing, so one launch waits for all.
class DeviceDeal : public DealFlight {
 public:
  DeviceDeal(DeviceTransport& transport, const FlightDescriptor& descriptor, const DealtRows& rows)
      : rows_(rows),
        row_bytes_(descriptor.row_bytes()),
        flight_(transport, descriptor, rows.most_arriving() * row_bytes_, /*flags=*/1, /*pieces=*/1) {}

  at::Tensor leaving() override {
    return view(flight_.staging(rows_.leaving(rank()) * row_bytes_), rows_.leaving(rank()));
  }
  void publish() override {
    char* const from = flight_.staging(rows_.leaving(rank()) * row_bytes_);
    const auto at = [&](int peer) { return from + rows_.leaving_at(rank(), peer) * row_bytes_; };
    std::vector<PyruntimePut> puts;
    for (int step = 1; step < flight_.world_size(); ++step) {
      const int peer = flight_.peer_at(step);
      puts.push_back({at(peer), rows_.count(rank(), peer) * row_bytes_, peer,
                      rows_.arriving_at(rank(), peer) * row_bytes_, /*first=*/0, /*flags=*/1});
    }
    flight_.put_together(puts);
    flight_.end_puts();
    const int64_t own = rows_.count(rank(), rank());
    view(flight_.at(rows_.arriving_at(rank(), rank()) * row_bytes_), own).copy_(view(at(rank()), own));
  }
  void wait() override { flight_.await_all({0, 1}); }
  at::Tensor arrived() override { return view(flight_.at(0), rows_.arriving(rank())); }
  void finish() override { flight_.finish(); }

 private:
  int rank() const { return flight_.rank(); }
  at::Tensor view(char* memory, int64_t rows) const { return flight_.view(memory, {rank(), 0, rows}); }

  DealtRows rows_;
  int64_t row_bytes_;
  DeviceFlight flight_;
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

std::unique_ptr<DealFlight> DeviceTransport::deal(const FlightDescriptor& descriptor, const DealtRows& rows) {
  TORCH_CHECK(!is_capturing(), "Group '", context_.name, "' cannot deal rows on ", device_,
              " while a CUDA graph is captured: the graph would send as many in each replay.");
  return std::make_unique<DeviceDeal>(*this, descriptor, rows);
}

}  // namespace pyruntime
