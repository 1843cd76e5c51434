// Scatters whose sums the switch takes (NVLink multicast).
#include <vector>

#include "core/chunk_plan.h"
#include "transport/one_host_device_flight.h"

namespace pyruntime {

namespace {

constexpr Flags kPart{0, 1}, kSum{1, 1};

// The slot holds this rank's part of all rows, where each owner reads its own of all ranks at once; then,
// where they are asked for, the sums of all rows. Since peers read it, nobody writes into a slot again before
// all have finished: see DeviceFlight.
class SwitchSums : public ScatterFlight {
 public:
  SwitchSums(DeviceTransport& transport, const FlightDescriptor& descriptor, bool all)
      : all_(all),
        plan_(descriptor.rows, transport.world_size(), transport.rank()),
        order_(plan_.scatter_order()),
        sums_order_(plan_.gather_order()),
        flight_(transport, descriptor, (all ? 2 : 1) * descriptor.rows * descriptor.row_bytes(),
                kPart.count + kSum.count, /*pieces=*/0) {}

  const std::vector<Chunk>& order() const override { return order_; }
  at::Tensor part(const Chunk& chunk) override { return flight_.view(flight_.at(offset(chunk)), chunk); }
  // It stays where it is; its owner is told that it may read.
  void publish(const Chunk& chunk) override {
    if (chunk.owner == flight_.rank() || chunk.rows == 0) return;
    flight_.put(nullptr, 0, chunk.owner, 0, kPart);
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    if (own.rows > 0) {
      for (int rank = 0; rank < flight_.world_size(); ++rank) {
        if (rank != flight_.rank()) flight_.await(rank, kPart);
      }
      flight_.sum_copies(all_ ? sum(own) : out, offset(own), bias);
      if (all_) flight_.put_own_to_all(sum_offset(own), own.rows * row_bytes(), kSum);
    }
    flight_.end_puts();
  }

  const std::vector<Chunk>& sums_order() const override { return sums_order_; }
  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank() && chunk.rows > 0) flight_.await(chunk.owner, kSum);
  }
  at::Tensor sum(const Chunk& chunk) override { return flight_.view(flight_.at(sum_offset(chunk)), chunk); }
  void finish() override { flight_.finish(); }

 private:
  int64_t row_bytes() const { return flight_.descriptor().row_bytes(); }
  int64_t offset(const Chunk& chunk) const { return chunk.begin * row_bytes(); }
  int64_t sum_offset(const Chunk& chunk) const { return (plan_.rows() + chunk.begin) * row_bytes(); }

  bool all_;
  ChunkPlan plan_;
  std::vector<Chunk> order_;
  std::vector<Chunk> sums_order_;
  DeviceFlight flight_;
};

}  // namespace

std::unique_ptr<ScatterFlight> make_switch_sums(DeviceTransport& transport,
                                                const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<SwitchSums>(transport, descriptor, all);
}

}  // namespace pyruntime
