#include <vector>

#include "core/chunk_plan.h"
#include "transport/device_sums.h"
#include "transport/one_host_device_flight.h"

namespace pyruntime {

namespace {

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
    if (all_ && own.rows > 0) flight_.put_own_to_all(sums_offset(own), bytes(own), sums_flag_);
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

std::unique_ptr<ScatterFlight> make_device_scatter(DeviceTransport& transport,
                                                   const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<DeviceScatter>(transport, descriptor, all);
}

}  // namespace pyruntime
