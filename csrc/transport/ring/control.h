// Messages between neighbours beside the data: a flight has begun, a chunk leaves or has arrived, a rank is
// there or goes. They end an op's wait for a peer: its chunk arrives, the peer is lost, the deadline passes,
// or ranks disagree.
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

  // Any thread. The thread that listens to a line notices when it is broken.
  void tell(int peer, const ControlMessage& message) { lines_.at(peer)->send(message); }
  void tell_all(const ControlMessage& message);

  // The op's thread: tells the neighbours that this rank has begun the flight; checks whether they have.
  void introduce(RingFlight& flight);
  // Waits for an action of a peer; `what` names it in messages.
  void await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
             const std::function<std::string()>& what);

  // The arbiter's thread: takes any message except notices and acknowledgements of chunks.
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
  // Names the neighbour that holds flight `number` up, as far as this rank can tell; empty if none does.
  // Gives neighbours time to answer.
  std::string silent_neighbour(uint64_t number);
  // The op that each neighbour has begun last.
  std::string neighbours_text();
  // The neighbours' names if all have closed the group; else empty.
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
