// What neighbours tell each other beside the data: that they have begun a flight, that a chunk leaves or has
// come, that they are there, that they go. An op's wait for a peer ends by it: what it waits for comes, the
// peer is lost, the deadline passes, ranks disagree.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "transport/ring/control_line.h"
#include "transport/ring/flight.h"
#include "transport/ring/health.h"

namespace pyruntime {

class Control {
 public:
  Control(GroupContext& context, const HostLayout& layout, ControlLines lines, FlightSlots& slots,
          Health& health);

  GroupContext& context() const { return context_; }
  const HostLayout& layout() const { return layout_; }
  Health& health() const { return health_; }
  const ControlLines& lines() const { return lines_; }

  // Any thread. A line that is broken is noticed by the thread that listens to it.
  void tell(int peer, const ControlMessage& message) { lines_.at(peer)->send(message); }
  void tell_all(const ControlMessage& message);

  // The op's thread: tells the neighbours that this rank has begun the flight and has room, and looks whether
  // they have.
  void introduce(RingFlight& flight);
  // Waits for something that a peer does; `what` says what it is, for messages.
  void await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
             const std::function<std::string()>& what);

  // The arbiter's thread: takes a message that is neither of a chunk that leaves nor of one that has come.
  void take(int peer, const ControlMessage& message);
  void closed_by(int peer);

 private:
  struct Neighbour {
    uint64_t last_begun = 0;
    std::map<uint64_t, FlightDescriptor> early;  // flights that this rank has not begun yet
    uint64_t answered = 0;                       // the latest probe
    bool said_bye = false;
    bool closed = false;
  };

  void compare(int peer, RingFlight& flight, const FlightDescriptor& theirs);
  // Who of the neighbours holds flight `number` up, as far as this rank can tell; empty if it is none of
  // them. Gives them time to answer.
  std::string silent_neighbour(uint64_t number);
  // What each has begun last.
  std::string neighbours_text();
  // Their names, where all have closed the group; else empty.
  std::string deserters();
  void raise_if_deserted(const RingFlight& flight);

  GroupContext& context_;
  const HostLayout& layout_;
  const ControlLines lines_;
  FlightSlots& slots_;
  Health& health_;
  std::mutex mutex_;  // guards what follows; never held while calling the arbiter
  std::map<int, Neighbour> neighbours_;
  uint64_t probe_round_ = 0;
};

}  // namespace pyruntime
