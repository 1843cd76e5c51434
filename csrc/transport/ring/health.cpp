#include "transport/ring/health.h"

#include <utility>

#include "transport/ring/flight.h"

namespace pyruntime {

bool Health::is_good() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !failed_.load() && poisoned_.empty();
}

void Health::fail(Failure failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load()) return;
  failure_ = std::move(failure);
  failed_.store(true);
}

void Health::lose(int peer, const std::string& what) {
  const bool hosts_differ = layout_.ranks_per_host() > 1 || layout_.hosts() < context_.world_size;
  const std::string host = hosts_differ ? " on host " + std::to_string(layout_.host_of(peer)) : "";
  fail(failure_of(context_, CommErrorKind::kPeerLost, context_.name_of(peer) + host + " " + what));
}

void Health::poison(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (poisoned_.empty()) poisoned_ = failure_.message.empty() ? why : failure_.message;
}

void Health::raise_if_failed(const RingFlight* flight) const {
  if (!failed_.load()) return;
  Failure failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure = failure_;
  }
  if (failure.kind == CommErrorKind::kPeerLost) {
    const std::string op = flight != nullptr ? flight_text(context_, flight->announced().op, flight->number())
                                             : "group '" + context_.name + "'";
    failure.message = op + ", " + context_.own_name() + ": " + failure.message + ".";
  }
  raise_for_all(failure);
}

void Health::raise_if_broken(const RingFlight* last) {
  std::string why;
  bool first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.load() && poisoned_.empty()) return;
    first = poisoned_.empty();
    if (first) poisoned_ = failure_.message;
    why = poisoned_;
  }
  if (first) raise_if_failed(last);
  raise_out_of_step(context_, why);
}

}  // namespace pyruntime
