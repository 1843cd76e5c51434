// A flight as an op sees it: gather and scatter over the ring.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/reduce.h"
#include "transport/ring_transport.h"

namespace pyruntime {

namespace {

at::Tensor view(char* memory, const FlightDescriptor& descriptor, const Chunk& chunk) {
  const auto options = at::TensorOptions().dtype(descriptor.scalar_type());
  if (chunk.rows * descriptor.row_elements() == 0) return at::empty(descriptor.sizes_of(chunk), options);
  return at::from_blob(memory, descriptor.sizes_of(chunk), options);
}

class RingGather : public GatherFlight {
 public:
  RingGather(RingTransport& transport, std::shared_ptr<RingFlight> flight)
      : transport_(transport), flight_(std::move(flight)), own_(flight_->own_chunks()) {}
  ~RingGather() override {
    if (!flight_->finished()) {
      transport_.poison(std::string(name_of(flight_->descriptor().op)) + " ended before it was finished");
    }
  }

  const std::vector<Chunk>& order() const override { return flight_->order(); }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override {
    return view(flight_->rows_at(chunk), flight_->descriptor(), chunk);
  }
  void publish(const Chunk& chunk) override {
    flight_->host().publish(flight_->rows_flag(chunk.owner, chunk.piece));
    transport_.published();
  }
  void wait(const Chunk& chunk) override {
    const int local = transport_.layout().local_rank_of(chunk.owner);
    if (local != transport_.layout().local_rank()) flight_->host().meet(local);
    for (const int piece : flight_->pieces_of(chunk)) {
      if (flight_->is_empty(chunk.owner, piece)) continue;
      const int flag = flight_->rows_flag(chunk.owner, piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_, chunk.owner,
                       [&] { return "send chunk " + std::to_string(piece) + " of its rows"; });
    }
  }
  bool has_come(const Chunk& chunk) const override {
    const int local = transport_.layout().local_rank_of(chunk.owner);
    return std::ranges::all_of(flight_->pieces_of(chunk), [&](int piece) {
      return flight_->is_empty(chunk.owner, piece) ||
             flight_->host().ready(local, flight_->rows_flag(chunk.owner, piece));
    });
  }
  void finish() override { flight_->finish(); }

 private:
  RingTransport& transport_;
  std::shared_ptr<RingFlight> flight_;
  std::vector<Chunk> own_;
};

class RingScatter : public ScatterFlight {
 public:
  RingScatter(RingTransport& transport, std::shared_ptr<RingFlight> flight)
      : transport_(transport), flight_(std::move(flight)) {}
  ~RingScatter() override {
    if (!flight_->finished()) {
      transport_.poison(std::string(name_of(flight_->descriptor().op)) + " ended before it was finished");
    }
  }

  const std::vector<Chunk>& order() const override { return flight_->order(); }
  at::Tensor part(const Chunk& chunk) override {
    return view(flight_->part_at(own_local(), chunk), flight_->descriptor(), chunk);
  }
  void publish(const Chunk& chunk) override {
    for (const int piece : flight_->pieces_of(chunk)) {
      flight_->host().publish(flight_->part_flag(chunk.owner, piece));
    }
    transport_.published();
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const at::Tensor row_bias = bias.defined() ? bias.contiguous() : bias;
    for (const Chunk& piece : flight_->own_chunks()) {
      if (!flight_->is_empty(piece.owner, piece.piece)) {
        await_parts(piece);
        sum_piece(piece, out, row_bias);
      }
      if (flight_->kind() == FlightKind::kScatterAll) {
        flight_->host().publish(flight_->sum_flag(piece.owner, piece.piece));
        transport_.published();
      }
    }
  }

  bool parts_have_come() const override {
    return std::ranges::all_of(flight_->own_chunks(), [&](const Chunk& piece) {
      return flight_->is_empty(piece.owner, piece.piece) || parts_have_come(piece);
    });
  }

  const std::vector<Chunk>& sums_order() const override { return flight_->sums_order(); }
  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner == transport_.rank()) return;
    const int local = transport_.layout().local_rank_of(chunk.owner);
    for (const int piece : flight_->pieces_of(chunk)) {
      if (flight_->is_empty(chunk.owner, piece)) continue;
      const int flag = flight_->sum_flag(chunk.owner, piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_, chunk.owner,
                       [&] { return "send chunk " + std::to_string(piece) + " of its sums"; });
    }
  }
  bool sum_has_come(const Chunk& chunk) const override {
    if (chunk.owner == transport_.rank()) return true;
    const int local = transport_.layout().local_rank_of(chunk.owner);
    return std::ranges::all_of(flight_->pieces_of(chunk), [&](int piece) {
      return flight_->is_empty(chunk.owner, piece) ||
             flight_->host().ready(local, flight_->sum_flag(chunk.owner, piece));
    });
  }
  at::Tensor sum(const Chunk& chunk) override {
    return view(flight_->rows_at(chunk), flight_->descriptor(), chunk);
  }
  void finish() override { flight_->finish(); }

 private:
  int own_local() const { return transport_.layout().local_rank(); }

  bool parts_have_come(const Chunk& piece) const {
    for (int local = 0; local < transport_.layout().ranks_per_host(); ++local) {
      if (local != own_local() && !flight_->host().ready(local, flight_->part_flag(piece.owner, piece.piece)))
        return false;
    }
    return has_arrived(flight_->own_partial(piece.piece));
  }

  static bool has_arrived(const RingFlight::OwnPartial& partial) {
    return partial.stream->arrived[partial.index].load(std::memory_order_acquire);
  }

  void await_parts(const Chunk& piece) {
    for (int local = 0; local < transport_.layout().ranks_per_host(); ++local) {
      if (local == own_local()) continue;
      flight_->host().meet(local);
      const int flag = flight_->part_flag(piece.owner, piece.piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_,
                       transport_.layout().rank_at(transport_.layout().host(), local),
                       [&] { return "write its part of chunk " + std::to_string(piece.piece); });
    }
    const RingFlight::OwnPartial& partial = flight_->own_partial(piece.piece);
    const int sender = transport_.layout().rank_at(partial.stream->stream.upstream, own_local());
    transport_.await([&] { return has_arrived(partial); }, *flight_, sender,
                     [&] { return "send the sum of chunk " + std::to_string(piece.piece); });
  }

  void sum_piece(const Chunk& piece, const at::Tensor& out, const at::Tensor& bias) {
    const FlightDescriptor& descriptor = flight_->descriptor();
    const bool in_place = flight_->kind() == FlightKind::kScatterAll;
    const ScopedSeconds moving(transport_.stats().moving_s);
    const int64_t count = piece.rows * descriptor.inner * descriptor.width;  // of one block
    const int64_t out_block = in_place ? count : out.size(1) * out.size(2);
    const int64_t within = piece.begin - flight_->plan().own().begin;
    char* target = in_place ? flight_->part_at(own_local(), piece)
                            : static_cast<char*>(out.data_ptr()) +
                                  within * descriptor.inner * descriptor.width * out.element_size();
    const auto element = static_cast<int64_t>(c10::elementSize(descriptor.scalar_type()));
    const auto wire_element = static_cast<int64_t>(c10::elementSize(flight_->wire()));
    for (int64_t block = 0; block < descriptor.row_blocks; ++block) {
      std::vector<const void*> parts;
      for (int local = 0; local < transport_.layout().ranks_per_host(); ++local) {
        parts.push_back(flight_->part_at(local, piece) + block * count * element);
      }
      cpu::sum_over_ranks({descriptor.scalar_type(), parts, count,
                           bias.defined() ? bias.const_data_ptr() : nullptr, descriptor.width,
                           flight_->own_partial(piece.piece).memory + block * count * wire_element,
                           flight_->wire(), target + block * out_block * element, descriptor.scalar_type()});
    }
    transport_.stats().bytes += piece.rows * descriptor.row_elements() * wire_element;
  }

  RingTransport& transport_;
  std::shared_ptr<RingFlight> flight_;
};

}  // namespace

std::unique_ptr<GatherFlight> RingTransport::gather(const FlightDescriptor& descriptor) {
  return std::make_unique<RingGather>(
      *this, begin(FlightKind::kGather, descriptor, pieces_for(descriptor), descriptor));
}

std::unique_ptr<ScatterFlight> RingTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<RingScatter>(*this, begin(all ? FlightKind::kScatterAll : FlightKind::kScatter,
                                                    descriptor, pieces_for(descriptor), descriptor));
}

// A gather of one number from each rank.
std::vector<int64_t> RingTransport::rows_held(const FlightDescriptor& descriptor) {
  const FlightDescriptor numbers{
      descriptor.op, static_cast<int32_t>(c10::ScalarType::Long), world_size(), 1, 1, 1, false, 1};
  RingGather flight(*this, begin(FlightKind::kGather, numbers, layout().hosts() > 2 ? 2 : 1, descriptor));
  for (const Chunk& chunk : flight.own()) {
    if (chunk.rows > 0) flight.memory(chunk).fill_(descriptor.own_rows);
    flight.publish(chunk);
  }
  std::vector<int64_t> held(world_size());
  for (const Chunk& chunk : flight.order()) {
    if (chunk.owner != rank()) flight.wait(chunk);
    if (chunk.rows > 0) held[chunk.owner] = flight.memory(chunk).item<int64_t>();
  }
  flight.finish();
  return held;
}

}  // namespace pyruntime
