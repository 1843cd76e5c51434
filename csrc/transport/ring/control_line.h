// A connection of its own between two ranks, for the few bytes that say what is about to travel and what has
// arrived. Data goes another way (point_to_point.h): behind a chunk of data, an acknowledgement would come
// too late to keep the link busy. When the peer's process ends its connection closes, so a lost peer is
// noticed at once, on any host.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/host_process.h"
#include "transport/group_context.h"

namespace pyruntime {

struct ControlMessage {
  enum Kind : uint32_t {
    kBegin = 1,  // this rank has begun `flight`, whose descriptor follows, and has room for what it receives
    kNotice,     // chunk `index` of `stream` leaves now
    kArrived,    // chunk `index` of `stream` has come
    kProbe,      // are you there? `flight` numbers the question
    kAnswer,     // yes; the same number
    kBye,        // this rank has closed the group; nothing more will come
  };
  uint32_t kind = 0;
  int32_t stream = 0;
  uint64_t flight = 0;
  uint64_t index = 0;
  FlightDescriptor descriptor = {};
  double left = 0;  // a notice: when the chunk left, seconds of the sender's clock
};

class ControlLine {
 public:
  explicit ControlLine(UniqueFd connection);

  // Any thread; does not block: only so many messages are ever under way that they fit the socket's buffer.
  // False where the connection is broken.
  bool send(const ControlMessage& message);
  // Calls `handle` for each message that is there; one thread. False when the peer has closed the connection.
  bool receive(const std::function<void(const ControlMessage&)>& handle);
  int fd() const { return connection_.get(); }

 private:
  UniqueFd connection_;
  std::mutex sending_;
  std::vector<char> received_;  // the beginning of a message
};

using ControlLines = std::map<int, std::shared_ptr<ControlLine>>;  // by the peer's rank

// Connections to `peers`; both ends call it. Addresses travel through the store, under `prefix`.
// Raises CommTimeout when a peer does not come within `context.deadline_seconds`.
ControlLines connect_control_lines(c10d::Store& store, const std::string& prefix, const GroupContext& context,
                                   const std::vector<int>& peers);

}  // namespace pyruntime
