// Counts what ops move, in the figures of a group and the ledger's entries.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "core/deadline.h"
#include "core/ledger/ledger.h"
#include "core/ledger/stream_clock.h"
#include "transport/group_context.h"

namespace pyruntime {

// A scope in which this rank's thread, or the current stream of a device by what it is told there, waits for
// `peer`, copies or sums for an op of the group. The thread's time is counted and entered in the ledger,
// except for the time in which its filler worked. A stream's waits are counted while StreamClock is on, and
// all of it is entered in a ledger of its device.
class Spending {
 public:
  // kind: kWait, kCopy or kSum. `op`: the op's name, a literal.
  Spending(GroupContext& context, Entered kind, const char* op, int peer = -1, c10::Device device = c10::kCPU)
      : context_(context), kind_(kind), op_(op), peer_(peer), begin_(begin_of(kind, device)) {}
  ~Spending();
  Spending(const Spending&) = delete;
  Spending& operator=(const Spending&) = delete;

 private:
  static double begin_of(Entered kind, c10::Device device);
  void count(double begin, double end);
  void count_on_stream();

  GroupContext& context_;
  Entered kind_;
  const char* op_;
  int peer_;
  double begin_;  // below 0: a point of a stream; 0: it is not counted
};

// The journey of bytes from another host: the rank of the group that sent them, when they left it (seconds of
// its host's clock), when they were here. No rank: another rank received them, or nothing travelled.
struct Travelled {
  int from = -1;
  double left = 0, arrived = 0;
};

// When an op begins on that device, for the ledger: see moment(); 0 while it is off.
inline double begin_of_op(c10::Device device) {
  return device.is_cpu() || Ledger::is_on() ? moment(device) : 0;
}

// Bytes of a peer that an op of the group reads, needed from now on. `begin`: when the op began.
class Reading {
 public:
  Reading(GroupContext& context, Op op, int peer, double begin, c10::Device device = c10::kCPU)
      : context_(context),
        op_(op),
        peer_(peer),
        begin_(begin),
        wanted_(Ledger::is_on() ? moment(device) : 0) {}
  // Counts the bytes, which are there now, and enters them in the ledger.
  void came(int64_t bytes, const Travelled& travelled = {});

 private:
  GroupContext& context_;
  Op op_;
  int peer_;
  double begin_, wanted_;
};

// Enters bytes of a chunk that were sent to a peer on another host or received from it.
void enter_transfer(Entered kind, const GroupContext& context, Op op, int peer, int64_t bytes, double begin,
                    double end);

// Counts an op that the process group itself did while this rank's thread waited, from `begin` until now, and
// that brought `bytes` of other ranks; enters it in the ledger.
void count_collective(GroupContext& context, Op op, int64_t bytes, double begin);

}  // namespace pyruntime
