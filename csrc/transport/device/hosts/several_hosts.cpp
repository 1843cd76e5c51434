#include "transport/device/hosts/several_hosts.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <utility>

#include "transport/device/hosts/exchange.h"
#include "transport/device/streams.h"
#include "transport/device/sums.h"
#include "transport/flights.h"

namespace pyruntime {

class ExchangeTransport : public Transport {
 public:
  ExchangeTransport(GroupContext& context, std::unique_ptr<Exchange> exchange, c10::Device device, int hosts,
                    const DeviceLibrary* library)
      : Transport(context),
        exchange_(std::move(exchange)),
        device_(device),
        streams_(device),
        hosts_(hosts),
        library_(library) {}

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::unique_ptr<DealFlight> deal(const FlightDescriptor& descriptor, const DealtRows& rows) override;
  std::string why_not_deal() const override { return {}; }
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override {
    const auto flight = gather(rows_held_descriptor(descriptor, world_size()));
    std::vector<int64_t> held = gather_rows_held(*flight, descriptor.own_rows, rank(), world_size());
    streams_.synchronize();
    return held;
  }

  void flush() override {
    for (Slot& slot : slots_) slot.steps.end();
    streams_.synchronize();
  }
  void leave() override { flush(); }
  bool crosses_hosts() const override { return true; }
  std::string description() const override {
    return "sends and receives of " + exchange_->backend_name() + ", " + std::to_string(world_size()) +
           " ranks on " + std::to_string(hosts_) + " hosts";
  }
  int64_t workspace_bytes() const override {
    int64_t total = 0;
    for (const Slot& slot : slots_) {
      for (const at::Tensor* memory : {&slot.arriving, &slot.leaving}) {
        if (memory->defined()) total += memory->numel();
      }
    }
    return total;
  }

 private:
  friend class ExchangeFlight;

  // The slot of a flight under way, and of its predecessor until its sends have been waited for.
  struct Slot {
    bool in_flight = false;
    at::Tensor arriving, leaving;
    FlightSteps steps;
  };

  int claim(Op op) {
    FailureBoard::instance().raise_if_failed();
    const int slot = static_cast<int>(++last_number_ % slots_.size());
    Slot& claimed = slots_[slot];
    check_slot_is_free(context_, !claimed.in_flight, op, " on " + device_.str());
    claimed.steps.claim(*exchange_, op, last_number_);
    claimed.in_flight = true;
    ++context_.stats.ops;
    return slot;
  }

  at::Tensor& at_least(at::Tensor& memory, int64_t bytes) {
    if (!memory.defined() || memory.numel() < bytes) {
      memory = at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(device_));
    }
    return memory;
  }

  std::unique_ptr<Exchange> exchange_;
  c10::Device device_;
  DeviceStreams streams_;
  int hosts_;
  const DeviceLibrary* library_;
  uint64_t last_number_ = 0;
  std::array<Slot, kSlots> slots_;
};

// The common part of all flights: a slot, steps, and the end.
class ExchangeFlight {
 public:
  ExchangeFlight(ExchangeTransport& transport, const FlightDescriptor& descriptor, int64_t arriving_bytes,
                 int64_t leaving_bytes)
      : transport_(transport),
        descriptor_(descriptor),
        slot_(transport.slots_[transport.claim(descriptor.op)]) {
    transport.at_least(slot_.arriving, arriving_bytes);
    transport.at_least(slot_.leaving, leaving_bytes);
  }

  int rank() const { return transport_.rank(); }
  int world_size() const { return transport_.world_size(); }
  const DeviceLibrary* library() const { return transport_.library_; }
  c10::Device device() const { return transport_.device_; }
  GroupContext& context() const { return transport_.context(); }
  void* stream() const { return transport_.streams_.current(); }
  int64_t bytes(const Chunk& chunk) const { return chunk.rows * descriptor_.row_bytes(); }

  at::Tensor arriving(int64_t offset, const Chunk& chunk) const {
    return rows(slot_.arriving, offset, chunk);
  }
  at::Tensor leaving(int64_t offset, const Chunk& chunk) const { return rows(slot_.leaving, offset, chunk); }

  // The rank that is `distance` ranks after this one.
  int after(int distance) const { return (rank() + distance + world_size()) % world_size(); }
  // The distance from this rank to `other`, forwards and backwards.
  int distance_to(int other) const { return (other - rank() + world_size()) % world_size(); }
  int distance_from(int other) const { return (rank() - other + world_size()) % world_size(); }

  void begin(const std::vector<Passage>& passages) { slot_.steps.begin(passages); }
  void await(int index) { slot_.steps.await(index); }
  void finish() { slot_.in_flight = false; }

 private:
  at::Tensor rows(const at::Tensor& memory, int64_t offset, const Chunk& chunk) const {
    return memory.narrow(0, offset, bytes(chunk))
        .view(descriptor_.scalar_type())
        .view(descriptor_.sizes_of(chunk));
  }

  ExchangeTransport& transport_;
  FlightDescriptor descriptor_;
  ExchangeTransport::Slot& slot_;
};

namespace {

// Sends this rank's rows to every other rank; the rows of the nearest rank after it arrive first. In a send,
// whoever has no rows begins to receive with the flight, ahead of its wait.
class ExchangeGather : public GatherByRank {
 public:
  ExchangeGather(ExchangeTransport& transport, const FlightDescriptor& descriptor)
      : GatherByRank(transport.context(), descriptor),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes(), 0) {
    if (descriptor.op == Op::kSend && plan_.own().rows == 0) publish(plan_.own());
  }

  at::Tensor memory(const Chunk& chunk) override {
    return flight_.arriving(chunk.begin * descriptor_.row_bytes(), chunk);
  }
  void publish(const Chunk& /*own*/) override {
    for (const Passage& each : passages()) flight_.begin({each});
  }
  void publish_together(const std::vector<Chunk>& own) override {
    if (flight_.device().is_cpu()) return GatherByRank::publish_together(own);
    flight_.begin(passages());
  }
  void wait(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank()) flight_.await(flight_.distance_to(chunk.owner));
  }
  void finish() override { flight_.finish(); }

 private:
  std::vector<Passage> passages() {
    std::vector<Passage> all;
    for (int step = 1; step < flight_.world_size(); ++step) {
      const int from = flight_.after(step);
      all.push_back({step, flight_.after(-step), memory(plan_.own()), from, memory(plan_.of(from))});
    }
    return all;
  }

  ExchangeFlight flight_;
};

// Receives every rank's part of this rank's rows, by rank, and then, if requested, the sums of all rows.
class ExchangeScatter : public ScatterByRank {
 public:
  ExchangeScatter(ExchangeTransport& transport, const FlightDescriptor& descriptor, bool all)
      : ScatterByRank(transport.context(), descriptor, all),
        flight_(transport, descriptor,
                transport.world_size() * plan_.own().rows * descriptor.row_bytes() +
                    (all ? descriptor.rows * descriptor.row_bytes() : 0),
                descriptor.rows * descriptor.row_bytes()) {
    begun_ = begin_of_op(flight_.device());
  }

  at::Tensor part(const Chunk& chunk) override {
    return flight_.leaving(chunk.begin * descriptor_.row_bytes(), chunk);
  }
  void publish(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank()) flight_.begin({passage(chunk)});
  }
  void publish_together(const std::vector<Chunk>& chunks) override {
    if (flight_.device().is_cpu()) return ScatterByRank::publish_together(chunks);
    sums_together_ = true;
    std::vector<Passage> all;
    for (const Chunk& chunk : chunks) {
      if (chunk.owner != flight_.rank()) all.push_back(passage(chunk));
    }
    flight_.begin(all);
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < flight_.world_size(); ++rank) {
      if (rank != flight_.rank()) {
        Reading reading(flight_.context(), descriptor_.op, rank, begun_, flight_.device());
        flight_.await(flight_.distance_from(rank));
        reading.came(flight_.bytes(own));
      }
      parts.push_back(rank == flight_.rank() ? part(own) : part_of(rank));
    }
    if (own.rows > 0) {
      const Spending summing(flight_.context(), Entered::kSum, name_of(descriptor_.op), /*peer=*/-1,
                             flight_.device());
      const at::Tensor target = all_ ? sum(own) : out.view(parts.front().sizes());
      sum_in_order(target, parts, bias, flight_.library(), flight_.stream());
    }
    std::vector<Passage> sums;
    for (int step = 1; all_ && step < flight_.world_size(); ++step) {
      const int from = flight_.after(step);
      sums.push_back({sums_step(step), flight_.after(-step), sum(own), from, sum(plan_.of(from))});
    }
    if (sums_together_) return flight_.begin(sums);
    for (const Passage& each : sums) flight_.begin({each});
  }

  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != flight_.rank()) flight_.await(sums_step(flight_.distance_to(chunk.owner)));
  }
  at::Tensor sum(const Chunk& chunk) override {
    const int64_t row_bytes = descriptor_.row_bytes();
    return flight_.arriving((flight_.world_size() * plan_.own().rows + chunk.begin) * row_bytes, chunk);
  }
  void finish() override { flight_.finish(); }

 private:
  Passage passage(const Chunk& chunk) {
    const int step = flight_.distance_to(chunk.owner);
    const int from = flight_.after(-step);
    return {step, chunk.owner, part(chunk), from, part_of(from)};
  }
  // At equal distances, as sum_in_order() needs them: this rank's place stays empty.
  at::Tensor part_of(int rank) const {
    return flight_.arriving(rank * flight_.bytes(plan_.own()), plan_.own());
  }
  int sums_step(int step) const { return flight_.world_size() + step; }

  ExchangeFlight flight_;
  bool sums_together_ = false;
};

// Sends and receives rows of all ranks in one call.
class ExchangeDeal : public DealFlight {
 public:
  ExchangeDeal(ExchangeTransport& transport, const FlightDescriptor& descriptor, const DealtRows& rows)
      : rows_(rows),
        row_bytes_(descriptor.row_bytes()),
        flight_(transport, descriptor, rows.arriving(transport.rank()) * row_bytes_,
                rows.leaving(transport.rank()) * row_bytes_) {}

  at::Tensor leaving() override { return flight_.leaving(0, chunk(rows_.leaving(rank()))); }
  void publish() override {
    std::vector<Passage> passages;
    for (int step = 1; step < flight_.world_size(); ++step) {
      const int to = flight_.after(-step), from = flight_.after(step);
      passages.push_back({step, to, leaving_for(to), from, arriving_of(from)});
    }
    flight_.begin(passages);
    arriving_of(rank()).copy_(leaving_for(rank()));
  }
  void wait() override {
    if (flight_.world_size() > 1) flight_.await(/*index=*/1);  // all passages end together
  }
  at::Tensor arrived() override { return flight_.arriving(0, chunk(rows_.arriving(rank()))); }
  void finish() override { flight_.finish(); }

 private:
  int rank() const { return flight_.rank(); }
  Chunk chunk(int64_t rows) const { return {rank(), 0, rows}; }
  at::Tensor leaving_for(int to) const {
    return flight_.leaving(rows_.leaving_at(rank(), to) * row_bytes_, chunk(rows_.count(rank(), to)));
  }
  at::Tensor arriving_of(int from) const {
    return flight_.arriving(rows_.arriving_at(from, rank()) * row_bytes_, chunk(rows_.count(from, rank())));
  }

  DealtRows rows_;
  int64_t row_bytes_;
  ExchangeFlight flight_;
};

}  // namespace

std::unique_ptr<GatherFlight> ExchangeTransport::gather(const FlightDescriptor& descriptor) {
  return std::make_unique<ExchangeGather>(*this, descriptor);
}

std::unique_ptr<ScatterFlight> ExchangeTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<ExchangeScatter>(*this, descriptor, all);
}

std::unique_ptr<DealFlight> ExchangeTransport::deal(const FlightDescriptor& descriptor,
                                                    const DealtRows& rows) {
  return std::make_unique<ExchangeDeal>(*this, descriptor, rows);
}

std::unique_ptr<Transport> make_several_hosts_device_transport(GroupContext& context,
                                                               std::unique_ptr<Exchange> exchange,
                                                               c10::Device device, int hosts,
                                                               const DeviceLibrary* library) {
  return std::make_unique<ExchangeTransport>(context, std::move(exchange), device, hosts, library);
}

}  // namespace pyruntime
