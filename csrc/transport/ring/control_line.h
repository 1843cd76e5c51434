// A TCP connection between two ranks for the few bytes that announce and acknowledge chunks. Data goes
// another way (point_to_point.h): behind it, an acknowledgement would come too late to keep the link busy. It
// closes when the peer's process ends, so a lost peer is noticed at once, on any host.
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
    kBegin = 1,  // this rank has begun `flight`, whose descriptor follows, and has room for its chunks
    kNotice,     // chunk `index` of `stream` leaves now
    kArrived,    // chunk `index` of `stream` has arrived
    kProbe,      // are you there? `flight` numbers the question
    kAnswer,     // yes; the same number
    kBye,        // this rank has closed the group; nothing more will come
  };
  uint32_t kind = 0;
  int32_t stream = 0;
  uint64_t flight = 0;
  uint64_t index = 0;
  FlightDescriptor descriptor = {};
  double left = 0;  // of a notice: when the chunk left, in seconds of the sender's clock
};

class ControlLine {
 public:
  explicit ControlLine(UniqueFd connection);

  // Any thread; does not block, as the few messages under way fit the socket's buffer. False: it is broken.
  bool send(const ControlMessage& message);
  // Calls `handle` for each message that has come; one thread. False: the peer has closed the connection.
  bool receive(const std::function<void(const ControlMessage&)>& handle);
  int fd() const { return connection_.get(); }

 private:
  UniqueFd connection_;
  std::mutex sending_;
  std::vector<char> received_;  // the beginning of a message
};

using ControlLines = std::map<int, std::shared_ptr<ControlLine>>;  // by the peer's rank

// Connects to `peers`; both ends call it. Addresses travel through the store, under `prefix`. Raises
// CommTimeout if a peer does not come within `context.deadline_seconds`.
ControlLines connect_control_lines(c10d::Store& store, const std::string& prefix, const GroupContext& context,
                                   const std::vector<int>& peers);

}  // namespace pyruntime
