// Gathers and scatters over a ring.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/arbiter.h"
#include "cpu/reduce.h"
#include "transport/ring/control.h"
#include "transport/ring/flight.h"

namespace pyruntime {

namespace {

// The common part of a gather and a scatter.
class RingOp {
 public:
  RingOp(Control& control, Arbiter& arbiter, std::shared_ptr<RingFlight> flight)
      : control_(control), arbiter_(arbiter), flight_(std::move(flight)) {}
  ~RingOp() {
    if (!flight_->finished()) {
      control_.health().poison(std::string(name_of(flight_->announced().op)) +
                               " ended before it was finished");
    }
  }
  RingOp(const RingOp&) = delete;
  RingOp& operator=(const RingOp&) = delete;

  RingFlight& flight() const { return *flight_; }
  GroupContext& context() const { return control_.context(); }
  const HostLayout& layout() const { return control_.layout(); }
  int own_local() const { return layout().local_rank(); }

  at::Tensor view(char* memory, const Chunk& chunk) const {
    return view_of(memory, flight_->descriptor(), chunk);
  }
  void publish(int flag) {
    flight_->host().publish(flag);
    wake();
  }
  // Called when a part that a lane may send has been written.
  void wake() { arbiter_.wake(); }
  void await(const std::function<bool()>& arrived, int peer, const std::function<std::string()>& what) {
    control_.await(arrived, *flight_, peer, what);
  }
  // Waits until a rank of this host sets the flag for an action of `peer`.
  void await(int local, int flag, int peer, const std::function<std::string()>& what) {
    await([&] { return flight_->host().ready(local, flag); }, peer, what);
  }

  // Whether the chunk's rows, or their sums, are there.
  bool have_come(const Chunk& chunk) const {
    return std::ranges::all_of(flight_->pieces_of(chunk), [&](int piece) {
      return flight_->is_empty(chunk.owner, piece) ||
             flight_->host().ready(layout().local_rank_of(chunk.owner),
                                   flight_->rows_flag(chunk.owner, piece));
    });
  }
  void await_rows(const Chunk& chunk, const char* name) {
    for (const int piece : flight_->pieces_of(chunk)) {
      if (flight_->is_empty(chunk.owner, piece)) continue;
      await(layout().local_rank_of(chunk.owner), flight_->rows_flag(chunk.owner, piece), chunk.owner,
            [&] { return "send chunk " + std::to_string(piece) + " of its " + name; });
    }
  }

 private:
  Control& control_;
  Arbiter& arbiter_;
  std::shared_ptr<RingFlight> flight_;
};

class RingGather : public GatherFlight {
 public:
  RingGather(Control& control, Arbiter& arbiter, std::shared_ptr<RingFlight> flight)
      : ring_(control, arbiter, std::move(flight)), own_(ring_.flight().own_chunks()) {}

  const std::vector<Chunk>& order() const override { return ring_.flight().order(); }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override { return ring_.view(ring_.flight().rows_at(chunk), chunk); }
  void publish(const Chunk& chunk) override {
    ring_.publish(ring_.flight().rows_flag(chunk.owner, chunk.piece));
  }
  void wait(const Chunk& chunk) override {
    const int local = ring_.layout().local_rank_of(chunk.owner);
    if (local != ring_.own_local()) ring_.flight().host().rendezvous(local);
    ring_.await_rows(chunk, "rows");
  }
  bool has_come(const Chunk& chunk) const override { return ring_.have_come(chunk); }
  Travelled travelled(const Chunk& chunk) const override { return ring_.flight().travelled(chunk); }
  void finish() override { ring_.flight().finish(); }

 private:
  RingOp ring_;
  std::vector<Chunk> own_;
};

class RingScatter : public ScatterFlight {
 public:
  RingScatter(Control& control, Arbiter& arbiter, std::shared_ptr<RingFlight> flight)
      : ring_(control, arbiter, std::move(flight)) {}

  const std::vector<Chunk>& order() const override { return ring_.flight().order(); }
  at::Tensor part(const Chunk& chunk) override {
    return ring_.view(ring_.flight().part_at(ring_.own_local(), chunk), chunk);
  }
  void publish(const Chunk& chunk) override {
    RingFlight& flight = ring_.flight();
    for (const int piece : flight.pieces_of(chunk))
      flight.host().publish(flight.part_flag(chunk.owner, piece));
    ring_.wake();
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const at::Tensor row_bias = bias.defined() ? bias.contiguous() : bias;
    RingFlight& flight = ring_.flight();
    for (const Chunk& piece : flight.own_chunks()) {
      if (!flight.is_empty(piece.owner, piece.piece)) {
        const RingFlight::OwnPartial& partial = flight.own_partial(piece.piece);
        Reading reading(ring_.context(), flight.announced().op,
                        ring_.layout().on_rail(partial.stream->stream.upstream), flight.begun());
        await_parts(piece);
        reading.came(flight.wire_bytes(piece.owner, piece.piece, /*partial=*/true),
                     partial.stream->travelled[partial.index]);
        sum_piece(piece, out, row_bias);
      }
      if (flight.kind() == FlightKind::kScatterAll) ring_.publish(flight.rows_flag(piece.owner, piece.piece));
    }
  }
  bool parts_have_come() const override {
    return std::ranges::all_of(ring_.flight().own_chunks(), [&](const Chunk& piece) {
      return ring_.flight().is_empty(piece.owner, piece.piece) || parts_have_come(piece);
    });
  }

  const std::vector<Chunk>& sums_order() const override { return ring_.flight().sums_order(); }
  void wait_for_sum(const Chunk& chunk) override {
    if (!is_own(chunk)) ring_.await_rows(chunk, "sums");
  }
  bool sum_has_come(const Chunk& chunk) const override { return is_own(chunk) || ring_.have_come(chunk); }
  Travelled travelled(const Chunk& chunk) const override { return ring_.flight().travelled(chunk); }
  at::Tensor sum(const Chunk& chunk) override { return ring_.view(ring_.flight().rows_at(chunk), chunk); }
  void finish() override {
    count_passed_on();
    ring_.flight().finish();
  }

 private:
  // Counts other hosts' sums, which pass here to get this host's parts.
  void count_passed_on() {
    RingFlight& flight = ring_.flight();
    for (const auto& state : flight.streams()) {
      const int from = ring_.layout().on_rail(state->stream.upstream);
      for (size_t i = 0; i < state->receives.size(); ++i) {
        const Hop& hop = state->receives[i];
        if (hop.phase != RingPhase::kScatter || hop.owner_host == ring_.layout().host()) continue;
        // They came before this rank's own sums, unless it has no rows: then they may still be on their way.
        const bool is_here = state->arrived[i].load(std::memory_order_acquire);
        Reading(ring_.context(), flight.announced().op, from, flight.begun())
            .came(hop.bytes, is_here ? state->travelled[i] : Travelled{});
      }
    }
  }

  bool is_own(const Chunk& chunk) const { return chunk.owner == ring_.flight().plan().own().owner; }

  bool parts_have_come(const Chunk& piece) const {
    const RingFlight& flight = ring_.flight();
    for (int local = 0; local < ring_.layout().ranks_per_host(); ++local) {
      if (local != ring_.own_local() &&
          !flight.host().ready(local, flight.part_flag(piece.owner, piece.piece)))
        return false;
    }
    return has_arrived(flight.own_partial(piece.piece));
  }

  static bool has_arrived(const RingFlight::OwnPartial& partial) {
    return partial.stream->arrived[partial.index].load(std::memory_order_acquire);
  }

  void await_parts(const Chunk& piece) {
    const RingFlight& flight = ring_.flight();
    const HostLayout& layout = ring_.layout();
    for (int local = 0; local < layout.ranks_per_host(); ++local) {
      if (local == ring_.own_local()) continue;
      flight.host().rendezvous(local);
      ring_.await(local, flight.part_flag(piece.owner, piece.piece), layout.rank_at(layout.host(), local),
                  [&] { return "write its part of chunk " + std::to_string(piece.piece); });
    }
    const RingFlight::OwnPartial& partial = flight.own_partial(piece.piece);
    ring_.await([&] { return has_arrived(partial); }, layout.on_rail(partial.stream->stream.upstream),
                [&] { return "send the sum of chunk " + std::to_string(piece.piece); });
  }

  void sum_piece(const Chunk& piece, const at::Tensor& out, const at::Tensor& bias) {
    const FlightDescriptor& descriptor = ring_.flight().descriptor();
    const bool in_place = ring_.flight().kind() == FlightKind::kScatterAll;
    const Spending summing(ring_.context(), Entered::kSum, name_of(ring_.flight().announced().op));
    const int64_t count = piece.rows * descriptor.inner * descriptor.width;  // of one block
    const int64_t out_block = in_place ? count : out.size(1) * out.size(2);
    const int64_t within = piece.begin - ring_.flight().plan().own().begin;
    char* target = in_place ? ring_.flight().part_at(ring_.own_local(), piece)
                            : static_cast<char*>(out.data_ptr()) +
                                  within * descriptor.inner * descriptor.width * out.element_size();
    const auto element = static_cast<int64_t>(c10::elementSize(descriptor.scalar_type()));
    const auto wire_element = static_cast<int64_t>(c10::elementSize(ring_.flight().wire()));
    for (int64_t block = 0; block < descriptor.row_blocks; ++block) {
      std::vector<const void*> parts;
      for (int local = 0; local < ring_.layout().ranks_per_host(); ++local) {
        parts.push_back(ring_.flight().part_at(local, piece) + block * count * element);
      }
      cpu::sum_over_ranks(
          {descriptor.scalar_type(), parts, count, bias.defined() ? bias.const_data_ptr() : nullptr,
           descriptor.width, ring_.flight().own_partial(piece.piece).memory + block * count * wire_element,
           ring_.flight().wire(), target + block * out_block * element, descriptor.scalar_type()});
    }
  }

  RingOp ring_;
};

}  // namespace

std::unique_ptr<GatherFlight> make_ring_gather(Control& control, Arbiter& arbiter,
                                               std::shared_ptr<RingFlight> flight) {
  return std::make_unique<RingGather>(control, arbiter, std::move(flight));
}

std::unique_ptr<ScatterFlight> make_ring_scatter(Control& control, Arbiter& arbiter,
                                                 std::shared_ptr<RingFlight> flight) {
  return std::make_unique<RingScatter>(control, arbiter, std::move(flight));
}

}  // namespace pyruntime
