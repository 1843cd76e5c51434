// The state of a ring: its first failure, and why no op may begin any more. Any thread.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "transport/flights.h"
#include "transport/ring/schedule.h"

namespace pyruntime {

class RingFlight;

class Health {
 public:
  Health(const GroupContext& context, const HostLayout& layout) : context_(context), layout_(layout) {}

  bool has_failed() const { return failed_.load(); }
  // Whether nothing has failed and no op was left by an exception.
  bool is_good() const;

  // Records a failure; the first one counts.
  void fail(Failure failure);
  // Records that a neighbour cannot do its part; `what` follows its name.
  void lose(int peer, const std::string& what);
  // Records that an op was left by an exception: the peers may wait for chunks that never come.
  void poison(const std::string& why);

  // Raises the failure, on all ranks; the message names `flight` if an op waits in it.
  void raise_if_failed(const RingFlight* flight) const;
  // Called before an op. Reports a peer that was lost since `last` as such, once.
  void raise_if_broken(const RingFlight* last);

 private:
  const GroupContext& context_;
  const HostLayout& layout_;
  mutable std::mutex mutex_;  // guards what follows
  Failure failure_;
  std::string poisoned_;             // why no op may begin any more; empty while they may
  std::atomic<bool> failed_{false};  // set under the lock
};

}  // namespace pyruntime
