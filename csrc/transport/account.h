// The account of what ops move: the figures of a group, and the ledger's entries.
#pragma once

#include <cstdint>

#include "core/deadline.h"
#include "core/ledger/ledger.h"
#include "transport/group_context.h"

namespace pyruntime {

// A scope in which this rank's thread waits for `peer`, copies or sums for an op of the group: its time is
// counted, and entered in the ledger. What the thread's filler did meanwhile is no waiting.
class Spending {
 public:
  // kind: kWait, kCopy or kSum. `op`: its name, a literal.
  Spending(GroupContext& context, Entered kind, const char* op, int peer = -1)
      : context_(context), kind_(kind), op_(op), peer_(peer), begin_(monotonic_seconds()) {
    take_filled();  // that of waits which nobody counts
  }
  ~Spending();
  Spending(const Spending&) = delete;
  Spending& operator=(const Spending&) = delete;

 private:
  void count(double begin, double end);

  GroupContext& context_;
  Entered kind_;
  const char* op_;
  int peer_;
  double begin_;
};

// How bytes came to this rank from another host: from which rank of the group, when they left it (seconds of
// its host's clock) and when they were here. No rank: another rank received them, or nothing travelled.
struct Travelled {
  int from = -1;
  double left = 0, arrived = 0;
};

// Bytes of a peer that an op of the group reads, from now on wanted. `begin`: when the op began.
class Reading {
 public:
  Reading(GroupContext& context, Op op, int peer, double begin)
      : context_(context),
        op_(op),
        peer_(peer),
        begin_(begin),
        wanted_(Ledger::is_on() ? monotonic_seconds() : 0) {}
  // They are there: they are counted, and entered in the ledger.
  void came(int64_t bytes, const Travelled& travelled = {});

 private:
  GroupContext& context_;
  Op op_;
  int peer_;
  double begin_, wanted_;
};

// Enters bytes of a chunk that went to a peer on another host or came from it.
void enter_transfer(Entered kind, const GroupContext& context, Op op, int peer, int64_t bytes, double begin,
                    double end);

// Counts an op that the process group itself did while this rank's thread waited, from `begin` until now, and
// that brought `bytes` of others; enters it in the ledger.
void count_collective(GroupContext& context, Op op, int64_t bytes, double begin);

}  // namespace pyruntime
