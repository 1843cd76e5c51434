// When a device came to points of its stream's work, and how long the stream had waited for peers until then.
//
// The host marks a point by an event and goes on. The point's time is known once the device has come there;
// it is read when later points are marked, so that the host does not wait for it. Until then a point stands
// for its time in ledger entries: as minus its number, which begins at 1.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/ledger/peer_figures.h"

namespace pyruntime {

class StreamClock {
 public:
  static StreamClock& instance();

  static bool is_on() { return on_.load(std::memory_order_relaxed); }

  // Watches the device's current stream from now on; waits, on the host, until it is idle. To be stopped as
  // often as it was started. Raises RuntimeError while another stream is watched.
  void start(c10::Device device);
  // Also waits, on the host, for the points marked so far.
  void stop();

  // Marks the point that the stream's work has reached, and returns it; kNone if nothing is watched, another
  // stream is the current one, or a graph is captured, whose work runs later.
  int64_t mark();
  static constexpr int64_t kNone = 0;

  // Marks the point until which the stream waits since `begin`, in an op of that group: for `peer`, unless
  // its rank is -1.
  int64_t mark_end_of_wait(int64_t begin, const std::string& group, const PeerKey& peer);

  // Whether the device has come to that point.
  bool has_passed(int64_t point);
  struct Reading {
    double at = 0;      // monotonic_seconds() of this host
    double waited = 0;  // seconds that the stream had waited for peers since the clock was started
  };
  // Waits, on the host, until the device has come to these points. NaN: one of too long ago, or of none.
  std::vector<Reading> read(const std::vector<int64_t>& points);

  // The seconds that the stream has waited in ops of a group, and of all groups by class, as far as the
  // device has come.
  double waited_in(const std::string& group);
  std::map<TrafficClass, double> waited_by_class();
  // Forgets what it has waited in ops of a group.
  void forget(const std::string& group);

 private:
  struct Wait {
    int64_t begin, end;
    std::string group;
    PeerKey peer;
  };

  int64_t record();
  // Reads the points that the device has come to; those up to `until` it waits for.
  void settle(int64_t until);
  const Reading* known(int64_t point) const;

  inline static std::atomic<bool> on_{false};
  std::mutex mutex_;
  int starts_ = 0;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Stream> stream_;
  std::deque<c10::Event> pending_;  // of the last points, in order
  std::vector<c10::Event> unused_;
  std::optional<c10::Event> base_;  // seconds count from here: those of long ago would not be exact
  double base_at_ = 0;
  int64_t last_ = kNone;           // the last point
  std::vector<Reading> readings_;  // by point, modulo their number
  std::deque<Wait> waits_;         // not read yet
  double waited_ = 0;
  std::map<std::pair<std::string, TrafficClass>, double> by_group_;
};

// The time now: monotonic_seconds(), for work on a device the point of its stream, and 0 if nobody watches.
double moment(c10::Device device);

}  // namespace pyruntime
