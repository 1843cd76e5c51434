// Opening and closing a ring, and beginning flights in it.
#include "transport/ring.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "transport/ring_transport.h"

namespace pyruntime {

namespace {

// What the link may still read and write after its group has gone lives as long as the process.
void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>();  // never destroyed: transfers outlive statics
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

void abort(PendingTransfer& transfer) {
  try {
    transfer.abort();
  } catch (const std::exception&) {
    // A backend that cannot; its wait ends when the connection does.
  }
}

}  // namespace

std::vector<int> ring_neighbours(const HostLayout& layout) {
  std::vector<int> neighbours;
  for (const RingStream& stream : ring_streams(layout.hosts(), layout.host(), 2)) {
    const int rank = layout.rank_at(stream.downstream, layout.local_rank());
    if (std::find(neighbours.begin(), neighbours.end(), rank) == neighbours.end()) neighbours.push_back(rank);
  }
  return neighbours;
}

RingTransport::RingTransport(GroupContext& context, RingParts parts, const RingOptions& options,
                             const std::function<std::vector<double>(const std::vector<double>&)>& agree)
    : Transport(context), parts_(std::move(parts)), options_(options), pid_(getpid()) {
  if (options_.chunk_bytes == 0) settle_cost(agree);
  for (const RingStream& stream : ring_streams(layout().hosts(), layout().host(), 2)) {
    upstream(stream);  // makes its receiver
    windows_[stream.downstream] = &arbiter().window_to(parts_.host_names[stream.downstream]);
  }
  for (auto& [peer, line] : parts_.lines) {
    arbiter().listen(line->fd(), [this, peer = peer, line = line.get()] {
      return line->receive([this, peer](const ControlMessage& message) { handle(peer, message); }) ||
             closed_by(peer);
    });
  }
  for (auto& [peer, receiver] : receivers_) {
    receiver.thread = std::thread([this, peer = peer, &receiver = receiver] { receive(peer, receiver); });
    pthread_setname_np(receiver.thread.native_handle(), "pyr-receive");
  }
}

RingTransport::~RingTransport() {
  for (const auto& lanes : lanes_) {
    for (const auto& lane : lanes) arbiter().remove(lane);
  }
  for (auto& [peer, line] : parts_.lines) {
    arbiter().forget(line->fd());
    line->send(message(ControlMessage::kBye, 0, 0, 0));
  }
  closing_.store(true);
  for (auto& [peer, receiver] : receivers_) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (receiver.current != nullptr) {
        context_.link_is_broken = true;
        abort(*receiver.current);
      }
    }
    receiver.noticed.notify_all();
    receiver.thread.join();
  }
  // What was under way when an op failed. The link may still read and write that memory, so it stays: the
  // group cannot be opened again, and the job ends or makes its process groups anew.
  for (auto& slot : slots_) {
    if (!slot.flight) continue;
    for (auto& stream : slot.flight->streams()) {
      for (const StreamState::Sent& sent : stream->under_way) {
        arbiter().give_up(window_to(stream->stream.downstream), sent.bytes);
        context_.link_is_broken = true;
      }
    }
  }
  if (context_.link_is_broken) {
    for (SlotState& slot : slots_) {
      keep_for_good(std::move(slot.flight));
      keep_for_good(std::make_shared<Scratch>(std::move(slot.scratch)));
    }
    keep_for_good(std::shared_ptr<HostWorkspace>(std::move(parts_.workspace)));
  }
}

void RingTransport::flush() {
  const auto sent = [this] {
    return std::all_of(slots_.begin(), slots_.end(),
                       [](const SlotState& slot) { return !slot.flight || slot.flight->all_acknowledged(); });
  };
  // After a failure there is nothing to wait for: some of it will never be published.
  const auto possible = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.load() || !poisoned_.empty()) throw std::runtime_error("failed");
  };
  try {
    wait_until(sent, context_.deadline_seconds, possible);
  } catch (const std::exception&) {
    // The group has failed, and whoever waits for this rank has been told why.
  }
}

void RingTransport::leave() {
  flush();
  for (auto& [peer, line] : parts_.lines) line->send(message(ControlMessage::kBye, 0, 0, 0));
}

std::string RingTransport::description() const {
  std::ostringstream text;
  if (layout().ranks_per_host() > 1) {
    text << "hierarchical: " << layout().hosts() << " hosts of " << layout().ranks_per_host()
         << " ranks, symmetric memory inside a host and " << link_name() << " between them";
  } else {
    text << "ring over " << link_name() << ", " << layout().hosts() << " hosts";
  }
  if (options_.chunk_bytes > 0) {
    text << ", chunks of about " << options_.chunk_bytes << " bytes";
  } else {
    text.precision(3);
    text << ", measured " << cost_.latency_s * 1e6 << " us and " << 1e-6 / cost_.seconds_per_byte << " MB/s";
  }
  return text.str();
}

int64_t RingTransport::workspace_bytes() const {
  int64_t total = parts_.workspace->bytes();
  for (const SlotState& slot : slots_) total += slot.scratch.bytes();
  return total;
}

std::shared_ptr<RingFlight> RingTransport::begin(FlightKind kind, const FlightDescriptor& descriptor,
                                                 int pieces, const FlightDescriptor& announced) {
  TORCH_CHECK(getpid() == pid_, "Group '", context_.name, "' was opened by process ", pid_,
              " and is used by its fork ", getpid(), "; start ranks as processes of their own.");
  raise_if_broken();
  const SlotState& slot = slots_[(last_number_ + 1) % kSlots];
  TORCH_CHECK(!slot.flight || slot.flight->finished(), "Group '", context_.name, "' already has ", kSlots,
              " ops in flight; finish one before beginning ", name_of(announced.op), ".");
  const uint64_t number = ++last_number_;
  try {
    return begin(number, kind, descriptor, pieces, announced);
  } catch (const std::exception& error) {
    // The peers will count this op.
    poison(std::string(name_of(announced.op)) + " could not begin: " + first_line(error.what()));
    throw;
  }
}

std::shared_ptr<RingFlight> RingTransport::begin(uint64_t number, FlightKind kind,
                                                 const FlightDescriptor& descriptor, int pieces,
                                                 const FlightDescriptor& announced) {
  SlotState& slot = slots_[number % kSlots];
  await_slot(slot, number);
  const bool own_wire = kind != FlightKind::kGather && options_.wire != c10::ScalarType::Undefined &&
                        descriptor.scalar_type() != c10::ScalarType::Double;
  auto flight = std::make_shared<RingFlight>(context_, layout(), kind, descriptor, pieces,
                                             own_wire ? options_.wire : descriptor.scalar_type());
  flight->lay_out(parts_.workspace->begin(announced, flight->workspace_bytes()), slot.scratch);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    slot.flight = flight;
    announced_[number % kSlots] = announced;
  }
  post_receives(*flight);
  introduce(*flight, announced);
  add_lanes(flight);
  return flight;
}

// The memory of flight number - kSlots is free when its rows have been read here and have left.
void RingTransport::await_slot(SlotState& slot, uint64_t number) {
  if (!slot.flight) return;
  const RingFlight& previous = *slot.flight;
  for (const auto& stream : slot.flight->streams()) {
    const auto sent = [&] { return stream->acknowledged.load() == stream->sends.size(); };
    await(sent, previous, rank_of_host(stream->stream.downstream), [&] {
      return "take chunk " + std::to_string(stream->acknowledged.load()) + " of op " +
             std::to_string(number - kSlots);
    });
  }
  lanes_[number % kSlots].clear();  // the arbiter has let go of them too: nothing is left to send
}

std::shared_ptr<RingFlight> RingTransport::flight_of(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const SlotState& slot = slots_[number % kSlots];
  return slot.flight && slot.flight->number() == number ? slot.flight : nullptr;
}

std::unique_ptr<Transport> make_ring_transport(
    GroupContext& context, RingParts parts, const RingOptions& options,
    const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
  return std::make_unique<RingTransport>(context, std::move(parts), options, agree);
}

}  // namespace pyruntime
