// Opens and closes a ring, and begins flights in it.
#include "transport/ring/ring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unistd.h>
#include <utility>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/text.h"
#include "transport/ring/control.h"
#include "transport/ring/flight.h"
#include "transport/ring/health.h"
#include "transport/ring/receiver.h"
#include "transport/ring/sender.h"

namespace pyruntime {

namespace {

// Keeps, until the process ends, memory that the link may still read and write after its group is gone.
void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>();  // never destroyed: transfers outlive statics
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

class RingTransport : public Transport {
 public:
  RingTransport(GroupContext& context, RingParts parts, const RingOptions& options, const Agree& agree)
      : Transport(context),
        parts_(std::move(parts)),
        options_(options),
        cost_(options.chunk_bytes == 0 ? settle_link_cost(context, parts_, agree) : LinkCost{}),
        pid_(getpid()),
        health_(context, parts_.layout),
        control_(context, parts_.layout, std::move(parts_.lines), slots_, health_),
        sender_(context, parts_, control_, health_) {
    for (const RingStream& stream : ring_streams(layout().hosts(), layout().host(), 2)) {
      const int peer = layout().on_rail(stream.upstream);
      receivers_.try_emplace(peer, peer, slots_, control_, health_, *parts_.arbiter);
    }
    for (const auto& [peer, line] : control_.lines()) {
      parts_.arbiter->listen(line->fd(), [this, peer = peer, line = line.get()] {
        if (line->receive([this, peer](const ControlMessage& message) { take(peer, message); })) return true;
        control_.closed_by(peer);
        return false;
      });
    }
  }

  ~RingTransport() override {
    sender_.stop();
    for (const auto& [peer, line] : control_.lines()) parts_.arbiter->forget(line->fd());
    control_.tell_all({ControlMessage::kBye});
    for (auto& [peer, receiver] : receivers_) context_.link_is_broken |= receiver.stop();
    for (auto& slot : slots_.all()) {
      if (slot.flight) context_.link_is_broken |= sender_.give_up(*slot.flight);
    }
    // Chunks were under way when an op failed. The link may still read and write that memory, so it stays.
    // The group cannot be opened again: the job ends or makes new process groups.
    if (!context_.link_is_broken) return;
    for (auto& slot : slots_.all()) {
      keep_for_good(std::move(slot.flight));
      keep_for_good(std::make_shared<Scratch>(std::move(slot.scratch)));
    }
    keep_for_good(std::shared_ptr<HostWorkspace>(std::move(parts_.workspace)));
  }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override {
    return make_ring_gather(control_, *parts_.arbiter,
                            begin(FlightKind::kGather, descriptor, plan_of(descriptor), descriptor));
  }
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override {
    return scatter(descriptor, all, plan_of(descriptor));
  }
  std::unique_ptr<ScatterFlight> scatter_some(const FlightDescriptor& descriptor, bool all,
                                              const std::vector<int64_t>& rows) override {
    const FlightDescriptor some = descriptor.of_some(rows);
    return scatter(some, all, plan_of(descriptor).of_some(rows, pieces_for(some)));
  }
  bool scatters_some() const override { return true; }
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override {
    FlightDescriptor held = rows_held_descriptor(descriptor, world_size());
    held.pieces = ring_directions(layout().hosts());
    const auto flight = make_ring_gather(control_, *parts_.arbiter,
                                         begin(FlightKind::kGather, held, plan_of(held), descriptor));
    return gather_rows_held(*flight, descriptor.own_rows, rank(), world_size());
  }

  std::string why_not_pieces(int pieces) const override {
    return why_no_ring_of_pieces(pieces, layout().hosts());
  }
  std::vector<int> other_pieces(const FlightDescriptor& descriptor) const override {
    return other_ring_pieces(pieces_for(descriptor), layout().hosts());
  }

  void flush() override;
  void leave() override {
    flush();
    control_.tell_all({ControlMessage::kBye});
  }
  bool crosses_hosts() const override { return true; }
  std::string description() const override;
  int64_t workspace_bytes() const override {
    int64_t total = parts_.workspace->bytes();
    for (const auto& slot : slots_.all()) total += slot.scratch.bytes();
    return total;
  }

 private:
  const HostLayout& layout() const { return parts_.layout; }

  // The op's thread. `announced` is the descriptor that ranks compare.
  std::shared_ptr<RingFlight> begin(FlightKind kind, const FlightDescriptor& descriptor, ChunkPlan plan,
                                    const FlightDescriptor& announced);
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all, ChunkPlan plan) {
    const FlightKind kind = all ? FlightKind::kScatterAll : FlightKind::kScatter;
    return make_ring_scatter(control_, *parts_.arbiter, begin(kind, descriptor, std::move(plan), descriptor));
  }
  void await_slot(uint64_t number);
  int pieces_for(const FlightDescriptor& descriptor) const;
  ChunkPlan plan_of(const FlightDescriptor& descriptor) const {
    return {descriptor.rows, world_size(), rank(), pieces_for(descriptor), descriptor.holder};
  }

  // The arbiter's thread: passes a neighbour's message to the part that it concerns.
  void take(int peer, const ControlMessage& message) {
    if (message.kind == ControlMessage::kArrived) return sender_.acknowledge(message, slots_);
    const auto receiver = receivers_.find(peer);
    if (message.kind == ControlMessage::kNotice && receiver != receivers_.end()) {
      return receiver->second.notice(message);
    }
    control_.take(peer, message);
  }

  // Written while the group is opened, then read by any thread.
  RingParts parts_;
  RingOptions options_;
  LinkCost cost_;
  pid_t pid_;
  // Only the op's thread.
  uint64_t last_number_ = 0;
  // Each with locks of its own.
  FlightSlots slots_;
  Health health_;
  Control control_;
  Sender sender_;
  std::map<int, Receiver> receivers_;  // by neighbour upstream
};

void RingTransport::flush() {
  const auto sent = [this] {
    return std::ranges::all_of(
        slots_.all(), [](const auto& slot) { return !slot.flight || slot.flight->all_acknowledged(); });
  };
  // After a failure there is nothing to wait for: some chunks will never be published.
  const auto possible = [this] {
    if (!health_.is_good()) throw std::runtime_error("failed");
  };
  try {
    wait_until(sent, context_.deadline_seconds, possible);
  } catch (const std::exception&) {
    // The group has failed, and every rank that waits for this one has been told why.
  }
}

std::string RingTransport::description() const {
  std::ostringstream text;
  if (layout().ranks_per_host() > 1) {
    text << "hierarchical: " << layout().hosts() << " hosts of " << layout().ranks_per_host()
         << " ranks, symmetric memory inside a host and " << parts_.link->name() << " between them";
  } else {
    text << "ring over " << parts_.link->name() << ", " << layout().hosts() << " hosts";
  }
  if (options_.chunk_bytes > 0) {
    text << ", chunks of about " << options_.chunk_bytes << " bytes";
  } else {
    text.precision(3);
    text << ", measured " << cost_.latency_s * 1e6 << " us and " << 1e-6 / cost_.seconds_per_byte << " MB/s";
  }
  return text.str();
}

int RingTransport::pieces_for(const FlightDescriptor& descriptor) const {
  if (descriptor.pieces > 0) return descriptor.pieces;
  const int64_t rows =
      rows_of_rank(descriptor.rows, world_size(), std::max(0, descriptor.holder), descriptor.holder);
  if (descriptor.op == Op::kSend) {
    return ring_send_pieces(rows * descriptor.row_bytes(), layout().hosts(), cost_, options_);
  }
  const bool with_matmul = descriptor.op == Op::kAllGatherMatmul ||
                           descriptor.op == Op::kMatmulReduceScatter || descriptor.op == Op::kMatmulAllReduce;
  return ring_pieces(rows * descriptor.row_bytes(), rows * descriptor.row_blocks * descriptor.inner,
                     with_matmul, layout().hosts(), cost_, options_);
}

std::shared_ptr<RingFlight> RingTransport::begin(FlightKind kind, const FlightDescriptor& descriptor,
                                                 ChunkPlan plan, const FlightDescriptor& announced) {
  check_process(context_, pid_);
  health_.raise_if_broken(slots_.find(last_number_).get());
  const auto& before = slots_.of(last_number_ + 1).flight;
  check_slot_is_free(context_, !before || before->finished(), announced.op);
  const uint64_t number = ++last_number_;
  try {
    await_slot(number);
    const bool own_wire = kind != FlightKind::kGather && options_.wire != c10::ScalarType::Undefined &&
                          descriptor.scalar_type() != c10::ScalarType::Double;
    auto flight = std::make_shared<RingFlight>(layout(), kind, descriptor, announced, std::move(plan),
                                               own_wire ? options_.wire : descriptor.scalar_type());
    flight->lay_out(parts_.workspace->begin(announced, flight->workspace_bytes()), slots_.of(number).scratch);
    slots_.put(flight);
    Receiver::post(*flight, parts_);
    control_.introduce(*flight);
    sender_.add(flight);
    return flight;
  } catch (const std::exception& error) {
    // The peers will count this op.
    health_.poison(std::string(name_of(announced.op)) + " could not begin: " + first_line(error.what()));
    throw;
  }
}

// The memory of flight number - kSlots is free when its rows have been read here and have left.
void RingTransport::await_slot(uint64_t number) {
  const std::shared_ptr<RingFlight> previous = slots_.of(number).flight;
  if (!previous) return;
  for (const auto& stream : previous->streams()) {
    control_.await([&] { return stream->all_acknowledged(); }, *previous,
                   layout().on_rail(stream->stream.downstream),
                   [&] {
                     return "take chunk " + std::to_string(stream->acknowledged.load()) + " of op " +
                            std::to_string(number - kSlots);
                   });
  }
  sender_.forget(number % kSlots);  // the arbiter has let go of the lanes too: nothing is left to send
}

}  // namespace

std::vector<int> ring_neighbours(const HostLayout& layout) {
  std::vector<int> neighbours;
  for (const RingStream& stream : ring_streams(layout.hosts(), layout.host(), 2)) {
    const int rank = layout.on_rail(stream.downstream);
    if (std::find(neighbours.begin(), neighbours.end(), rank) == neighbours.end()) neighbours.push_back(rank);
  }
  return neighbours;
}

std::unique_ptr<Transport> make_ring_transport(GroupContext& context, RingParts parts,
                                               const RingOptions& options, const Agree& agree) {
  return std::make_unique<RingTransport>(context, std::move(parts), options, agree);
}

}  // namespace pyruntime
