// Sends this rank's chunks: a flight's chunks on one stream are a lane, which the arbiter empties. A chunk is
// announced to its receiver before it leaves; the acknowledgement frees the send and the window.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "core/arbiter.h"
#include "transport/ring/control.h"
#include "transport/ring/flight.h"
#include "transport/ring/ring.h"

namespace pyruntime {

// The tag under which a piece travels. Raises RuntimeError if a flight has more pieces than there are tags.
int tag_of(int instance, uint64_t flight, int stream, size_t index);

class Sender {
 public:
  Sender(const GroupContext& context, const RingParts& parts, Control& control, Health& health);

  // --- the op's thread
  void add(const std::shared_ptr<RingFlight>& flight);
  // Forgets the lanes of the flight in that slot: nothing is left to send.
  void forget(size_t slot) { lanes_[slot].clear(); }
  // Removes all lanes: the arbiter touches none of them afterwards.
  void stop();
  // Gives up chunks of the flight under way. Returns whether any are: the link may still use their memory.
  bool give_up(RingFlight& flight);

  // --- the arbiter's thread
  void acknowledge(const ControlMessage& message, FlightSlots& slots);

 private:
  class FlightLane;

  void send_head(RingFlight& flight, StreamState& stream);

  const GroupContext& context_;
  const RingParts& parts_;
  Control& control_;
  Health& health_;
  std::map<int, SendWindow*> windows_;                            // by neighbouring host; the arbiter's
  std::array<std::vector<std::shared_ptr<Lane>>, kSlots> lanes_;  // of the flights in the slots; the op's
};

}  // namespace pyruntime
