// What neighbours tell each other beside the data: that they have begun a flight, that a chunk leaves or has
// come, that they are there, that they go.
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "core/error.h"
#include "transport/control_line.h"
#include "transport/ring_transport.h"

namespace pyruntime {

ControlMessage RingTransport::message(ControlMessage::Kind kind, int stream, uint64_t flight,
                                      uint64_t index) {
  ControlMessage result{};
  result.kind = kind;
  result.stream = stream;
  result.flight = flight;
  result.index = index;
  return result;
}

// Tells the neighbours that this rank has begun the flight and has room, and looks whether they have.
void RingTransport::introduce(RingFlight& flight, const FlightDescriptor& announced) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [peer, begun] : begun_) {
      const auto early = begun.early.find(flight.number());
      if (early == begun.early.end()) continue;
      meet(peer, flight, early->second);
      begun.early.erase(early);
    }
  }
  for (auto& [peer, line] : parts_.lines) {
    ControlMessage hello = message(ControlMessage::kBegin, 0, flight.number(), 0);
    hello.descriptor = announced;
    line->send(hello);  // a broken line is noticed by the thread that listens to it
  }
}

// --- the arbiter's thread

void RingTransport::handle(int peer, const ControlMessage& message) {
  switch (message.kind) {
    case ControlMessage::kBegin: {
      const std::lock_guard<std::mutex> lock(mutex_);
      Begun& begun = begun_[peer];
      begun.last = std::max(begun.last, message.flight);
      const SlotState& slot = slots_[message.flight % kSlots];
      if (slot.flight && slot.flight->number() == message.flight) {
        meet(peer, *slot.flight, message.descriptor);
      } else {
        begun.early[message.flight] = message.descriptor;
      }
      return;
    }
    case ControlMessage::kNotice: {
      const std::lock_guard<std::mutex> lock(mutex_);
      Receiver& receiver = receivers_[peer];
      receiver.notices.push_back({message.flight, {message.stream, message.index}});
      receiver.noticed.notify_one();
      return;
    }
    case ControlMessage::kArrived:
      return acknowledge(message);
    case ControlMessage::kProbe:
      parts_.lines.at(peer)->send(this->message(ControlMessage::kAnswer, 0, message.flight, 0));
      return;
    case ControlMessage::kAnswer: {
      const std::lock_guard<std::mutex> lock(mutex_);
      answered_[peer] = message.flight;
      return;
    }
    case ControlMessage::kBye: {
      const std::lock_guard<std::mutex> lock(mutex_);
      said_bye_[peer] = true;
      return;
    }
    default:
      return lose(peer, "sent a message that is no message of this version");
  }
}

// Under the lock.
void RingTransport::meet(int peer, RingFlight& flight, const FlightDescriptor& theirs) {
  const FlightDescriptor& ours = announced_[flight.number() % kSlots];
  if (!ours.agrees_with(theirs)) {
    std::ostringstream text;
    text << "Ranks disagree on op " << flight.number() << " of group '" << context_.name << "': rank "
         << context_.own_rank() << " called " << ours.text() << " and rank " << context_.told(peer)
         << " called " << theirs.text()
         << "; all ranks must call the same ops with the same shapes and dtypes, in the same order.";
    set_failure({CommErrorKind::kDisagree, text.str(), context_.name});
    return;
  }
  for (auto& stream : flight.streams()) {
    if (rank_of_host(stream->stream.downstream) == peer)
      stream->credit.store(true, std::memory_order_release);
  }
}

bool RingTransport::closed_by(int peer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_[peer] = true;
    const auto bye = said_bye_.find(peer);
    if (bye != said_bye_.end() && bye->second) return false;
  }
  lose(peer, "has ended: its connection closed");
  return false;
}

}  // namespace pyruntime
