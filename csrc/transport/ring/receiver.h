// Receives and acknowledges the chunks of one upstream neighbour, in the order of its notices, in its own
// thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "transport/ring/control.h"
#include "transport/ring/flight.h"
#include "transport/ring/ring.h"

namespace pyruntime {

class Receiver {
 public:
  // `arbiter` is woken when a chunk has arrived: it may have to travel on.
  Receiver(int peer, FlightSlots& slots, Control& control, Health& health, Arbiter& arbiter);
  // Stops the thread if nobody has, because the ring could not be opened.
  ~Receiver();

  // The op's thread, before the neighbours learn of the flight.
  static void post(RingFlight& flight, const RingParts& parts);
  // The arbiter's thread: the neighbour announces that a chunk leaves.
  void notice(const ControlMessage& message);
  // The op's thread: ends the thread. True if a transfer was cut off: the link may still use its memory.
  bool stop();

 private:
  void run();
  bool receive(const ControlMessage& notice);

  const int peer_;
  FlightSlots& slots_;
  Control& control_;
  Health& health_;
  Arbiter& arbiter_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable noticed_;
  std::deque<ControlMessage> notices_;
  PendingTransfer current_;
  bool stopping_ = false;
  bool was_cut_off_ = false;
  std::thread thread_;
};

}  // namespace pyruntime
