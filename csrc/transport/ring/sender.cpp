#include "transport/ring/sender.h"

#include <c10/util/Exception.h>

#include <utility>

#include "core/deadline.h"
#include "core/ledger/peer_figures.h"
#include "core/text.h"

namespace pyruntime {

// 9 bits of instance, 6 of flight, 1 of stream, 14 of piece.
int tag_of(int instance, uint64_t flight, int stream, size_t index) {
  TORCH_CHECK(index < size_t{1} << 14, "A flight sends ", index,
              " pieces on one stream, and tags tell 16384 ",
              "apart; set larger chunk_bytes (pyruntime.comm.configure), or use fewer ranks in one ring.");
  return kTagBase | (instance % 512) << 21 | static_cast<int>(flight % 64) << 15 | stream << 14 |
         static_cast<int>(index);
}

// The chunks that one flight sends on one stream.
class Sender::FlightLane : public Lane {
 public:
  FlightLane(Sender& sender, std::shared_ptr<RingFlight> flight, StreamState& stream)
      : sender_(sender), flight_(std::move(flight)), stream_(stream) {}

  TrafficClass traffic_class() const override { return sender_.context_.traffic_class; }
  int within() const override { return sender_.context_.within_class; }
  SendWindow& window() override { return *sender_.windows_.at(stream_.stream.downstream); }
  bool ready() override {
    return stream_.credit.load(std::memory_order_acquire) && flight_->part_is_ready(stream_, head());
  }
  int64_t bytes() const override { return head().bytes; }
  void send() override { sender_.send_head(*flight_, stream_); }
  bool done() override { return stream_.next_send == stream_.sends.size() || sender_.health_.has_failed(); }
  bool needs_polling() override {
    return sender_.parts_.layout.ranks_per_host() > 1 && head().phase == RingPhase::kScatter &&
           (head().after < 0 || stream_.arrived[head().after].load(std::memory_order_acquire));
  }

 private:
  const Hop& head() const { return stream_.sends[stream_.next_send]; }

  Sender& sender_;
  std::shared_ptr<RingFlight> flight_;
  StreamState& stream_;
};

Sender::Sender(const GroupContext& context, const RingParts& parts, Control& control, Health& health)
    : context_(context), parts_(parts), control_(control), health_(health) {
  for (const RingStream& stream : ring_streams(parts.layout.hosts(), parts.layout.host(), 2)) {
    windows_[stream.downstream] = &parts.arbiter->window_to(parts.host_names[stream.downstream]);
  }
}

void Sender::add(const std::shared_ptr<RingFlight>& flight) {
  for (auto& stream : flight->streams()) {
    if (stream->sends.empty()) continue;
    auto lane = std::make_shared<FlightLane>(*this, flight, *stream);
    lanes_[flight->number() % kSlots].push_back(lane);
    parts_.arbiter->add(lane);
  }
}

void Sender::stop() {
  for (const auto& lanes : lanes_) {
    for (const auto& lane : lanes) parts_.arbiter->remove(lane);
  }
}

bool Sender::give_up(RingFlight& flight) {
  bool any = false;
  for (auto& stream : flight.streams()) {
    for (const StreamState::Sent& sent : stream->under_way) {
      parts_.arbiter->give_up(*windows_.at(stream->stream.downstream), sent.bytes);
      any = true;
    }
  }
  return any;
}

void Sender::send_head(RingFlight& flight, StreamState& stream) {
  const size_t index = stream.next_send++;
  const Hop& hop = stream.sends[index];
  const int peer = parts_.layout.on_rail(stream.stream.downstream);
  stream.under_way.push_back({nullptr, hop.bytes, monotonic_seconds()});
  try {
    const void* data = flight.prepare(stream, hop);
    if (hop.phase == RingPhase::kScatter) flight.count_prepared();
    control_.tell(peer, {ControlMessage::kNotice, stream.stream.index, flight.number(), index,
                         /*descriptor=*/{}, stream.under_way.back().at});
    stream.under_way.back().transfer = parts_.link->send(
        data, hop.bytes, peer, tag_of(parts_.instance, flight.number(), stream.stream.index, index));
  } catch (const std::exception& error) {
    health_.lose(peer, std::string("cannot be sent to: ") + first_line(error.what()));
  }
}

void Sender::acknowledge(const ControlMessage& message, FlightSlots& slots) {
  std::shared_ptr<RingFlight> flight = slots.find(message.flight);
  if (!flight || message.stream >= static_cast<int>(flight->streams().size())) return;
  StreamState& stream = *flight->streams()[message.stream];
  if (stream.under_way.empty()) return;
  StreamState::Sent sent = std::move(stream.under_way.front());
  stream.under_way.pop_front();
  try {
    // It has arrived, so this returns at once; the call frees the send.
    sent.transfer->wait(milliseconds(context_.deadline_seconds));
  } catch (const std::exception& error) {
    health_.lose(parts_.layout.on_rail(stream.stream.downstream), first_line(error.what()));
  }
  const double now = monotonic_seconds();
  parts_.arbiter->acknowledge(context_.traffic_class, *windows_.at(stream.stream.downstream), sent.bytes,
                              now - sent.at);
  const int peer = parts_.layout.on_rail(stream.stream.downstream);
  PeerTable::instance().sent(
      {context_.process_group, context_.traffic_class, context_.process_group_rank(peer)}, sent.bytes,
      now - sent.at);
  enter_transfer(Entered::kSent, context_, flight->announced().op, peer, sent.bytes, sent.at, now);
  stream.acknowledged.fetch_add(1);
}

}  // namespace pyruntime
