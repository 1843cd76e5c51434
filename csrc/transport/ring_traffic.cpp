// Chunks leave and come in. What a flight sends on a stream is a lane, which the arbiter empties; a thread
// for each neighbour upstream takes in what that one sends. On the control line a chunk is announced before
// it leaves and acknowledged when it has come, which is what frees the send.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/prompt_thread.h"
#include "transport/ring_transport.h"

namespace pyruntime {

namespace {

// 9 bits of opening, 6 of flight, 1 of stream, 14 of piece.
int tag_of(int instance, uint64_t flight, int stream, size_t index) {
  TORCH_CHECK(index < size_t{1} << 14, "A flight sends ", index,
              " pieces on one stream, and tags tell 16384 ",
              "apart; set larger chunk_bytes (pyruntime.comm.configure), or use fewer ranks in one ring.");
  return kTagBase | (instance % 512) << 21 | static_cast<int>(flight % 64) << 15 | stream << 14 |
         static_cast<int>(index);
}

}  // namespace

// What one flight sends on one stream.
class RingTransport::FlightLane : public Lane {
 public:
  FlightLane(RingTransport& transport, std::shared_ptr<RingFlight> flight, StreamState& stream)
      : transport_(transport), flight_(std::move(flight)), stream_(stream) {}

  TrafficClass traffic_class() const override { return transport_.context_.traffic_class; }
  SendWindow& window() override { return transport_.window_to(stream_.stream.downstream); }
  bool ready() override {
    return stream_.credit.load(std::memory_order_acquire) && flight_->part_is_ready(stream_, head());
  }
  int64_t bytes() const override { return head().bytes; }
  void send() override { transport_.send_head(*flight_, stream_); }
  bool done() override {
    return stream_.next_send == stream_.sends.size() || transport_.failed_.load() ||
           transport_.closing_.load();
  }
  bool needs_polling() override {
    return transport_.layout().ranks_per_host() > 1 && head().phase == RingPhase::kScatter &&
           (head().after < 0 || stream_.arrived[head().after].load(std::memory_order_acquire));
  }

 private:
  const Hop& head() const { return stream_.sends[stream_.next_send]; }

  RingTransport& transport_;
  std::shared_ptr<RingFlight> flight_;
  StreamState& stream_;
};

void RingTransport::add_lanes(const std::shared_ptr<RingFlight>& flight) {
  for (auto& stream : flight->streams()) {
    if (stream->sends.empty()) continue;
    auto lane = std::make_shared<FlightLane>(*this, flight, *stream);
    lanes_[flight->number() % kSlots].push_back(lane);
    arbiter().add(lane);
  }
}

void RingTransport::post_receives(RingFlight& flight) {
  for (auto& stream : flight.streams()) {
    const int peer = rank_of_host(stream->stream.upstream);
    for (size_t i = 0; i < stream->receives.size(); ++i) {
      const Hop& hop = stream->receives[i];
      stream->receiving[i] = parts_.link->receive(
          hop.memory, hop.bytes, peer, tag_of(parts_.instance, flight.number(), stream->stream.index, i));
    }
  }
}

// --- the arbiter's thread

void RingTransport::send_head(RingFlight& flight, StreamState& stream) {
  const size_t index = stream.next_send++;
  const Hop& hop = stream.sends[index];
  const int peer = rank_of_host(stream.stream.downstream);
  stream.under_way.push_back({nullptr, hop.bytes, monotonic_seconds()});
  try {
    const void* data = flight.prepare(stream, hop);
    if (hop.phase == RingPhase::kScatter) flight.count_prepared();
    parts_.lines.at(peer)->send(
        message(ControlMessage::kNotice, stream.stream.index, flight.number(), index));
    stream.under_way.back().transfer = parts_.link->send(
        data, hop.bytes, peer, tag_of(parts_.instance, flight.number(), stream.stream.index, index));
  } catch (const std::exception& error) {
    lose(peer, std::string("cannot be sent to: ") + first_line(error.what()));
  }
}

void RingTransport::acknowledge(const ControlMessage& message) {
  std::shared_ptr<RingFlight> flight = flight_of(message.flight);
  if (!flight || message.stream >= static_cast<int>(flight->streams().size())) return;
  StreamState& stream = *flight->streams()[message.stream];
  if (stream.under_way.empty()) return;
  StreamState::Sent sent = std::move(stream.under_way.front());
  stream.under_way.pop_front();
  try {
    // It has arrived, so this returns at once; it is what frees the send.
    sent.transfer->wait(context_.deadline_seconds);
  } catch (const std::exception& error) {
    lose(rank_of_host(stream.stream.downstream), first_line(error.what()));
  }
  arbiter().acknowledge(context_.traffic_class, window_to(stream.stream.downstream), sent.bytes,
                        monotonic_seconds() - sent.at);
  stream.acknowledged.fetch_add(1);
}

// --- the receivers' threads

void RingTransport::receive(int peer, Receiver& receiver) {
  make_this_thread_prompt();
  while (true) {
    std::shared_ptr<RingFlight> flight;
    StreamState* stream = nullptr;
    size_t index = 0;
    std::unique_ptr<PendingTransfer> pending;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      receiver.noticed.wait(lock, [&] { return closing_.load() || !receiver.notices.empty(); });
      if (closing_.load()) return;
      const auto [number, where] = receiver.notices.front();
      receiver.notices.pop_front();
      const SlotState& slot = slots_[number % kSlots];
      if (slot.flight && slot.flight->number() == number &&
          where.first < static_cast<int>(slot.flight->streams().size())) {
        flight = slot.flight;
        stream = flight->streams()[where.first].get();
        index = where.second;
        if (index < stream->receives.size()) pending = std::move(stream->receiving[index]);
      }
      receiver.current = pending.get();
    }
    if (!pending) {
      lose(peer, "announced a chunk that this rank does not expect");
      return;
    }
    bool arrived = false;
    std::string problem;
    try {
      arrived = pending->wait(-1);
    } catch (const std::exception& error) {
      problem = first_line(error.what());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      receiver.current = nullptr;
    }
    if (closing_.load()) return;
    if (!arrived) {
      lose(peer, "broke off while it sent: " + problem);
      return;
    }
    stream->arrived[index].store(true, std::memory_order_release);
    flight->announce(stream->receives[index]);
    parts_.lines.at(peer)->send(
        message(ControlMessage::kArrived, stream->stream.index, flight->number(), index));
    arbiter().wake();  // it may have to travel on
  }
}

}  // namespace pyruntime
