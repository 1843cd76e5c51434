#include <algorithm>
#include <vector>

#include "core/chunk_plan.h"
#include "transport/one_host_device_flight.h"

namespace pyruntime {

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
    const auto for_each_piece = [&](const auto& put) {
      for (int i = 0; i < pieces_that_exist(chunk); ++i) {
        const Chunk piece = pieces.piece(0, i);
        put(offset(chunk) + piece.begin * bytes_of_a_row(), piece.rows * bytes_of_a_row(), Flags{i, 1});
      }
    };
    if (flight_.has_multicast()) {
      // This rank's own rows are stored once more, with the bits that they have, while it may read them.
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

}  // namespace

std::unique_ptr<GatherFlight> make_device_gather(DeviceTransport& transport,
                                                 const FlightDescriptor& descriptor) {
  return std::make_unique<DeviceGather>(transport, descriptor);
}

}  // namespace pyruntime
