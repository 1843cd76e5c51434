// Takes in what one neighbour upstream sends, in the order in which it says that it sends, and acknowledges
// it: a thread of its own.
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
  // `arbiter` is woken when a chunk has come: it may have to travel on.
  Receiver(int peer, FlightSlots& slots, Control& control, Health& health, Arbiter& arbiter);
  // Where a ring could not be opened nobody has stopped it.
  ~Receiver();

  // The op's thread, before the neighbours are told of the flight.
  static void post(RingFlight& flight, const RingParts& parts);
  // The arbiter's thread: the neighbour says that a chunk leaves.
  void notice(const ControlMessage& message);
  // The op's thread: ends the thread. Whether a transfer was cut off: its memory remains the link's.
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
