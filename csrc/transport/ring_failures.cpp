// Waits for peers and how they end: what comes in time, a peer that is lost, a deadline, ranks that disagree.
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "core/error.h"
#include "core/failure_board.h"
#include "core/late_report.h"
#include "transport/ring_transport.h"

namespace pyruntime {

namespace {

// After a deadline: how long a neighbour may take to show that it runs, and how long to wait for the word of
// one who knows more. Together they stay below the second that a rank may take beyond its deadline.
constexpr double kAnswerSeconds = 0.2;
constexpr double kHearsaySeconds = 0.4;

}  // namespace

void RingTransport::await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
                          const std::function<std::string()>& what) {
  if (arrived()) return;
  const ScopedSeconds waiting(context_.stats.waiting_s);
  const auto site = [&] {
    std::ostringstream text;
    text << name_of(flight.descriptor().op) << " (op " << flight.host().number() << " of group '"
         << context_.name << "'), rank " << context_.own_rank() << " waiting for rank " << context_.told(peer)
         << " to " << what();
    return text.str();
  };
  LateReport report(context_.deadline_seconds, site);
  // What comes by way of another rank of this host does not depend on this rank's neighbours.
  const bool by_own_rail = layout().local_rank_of(peer) == layout().local_rank();
  const auto possible = [&] {
    raise_if_failed(&flight);
    if (by_own_rail) raise_if_deserted(flight);
    report.look();
  };
  if (wait_until(arrived, context_.deadline_seconds, possible)) return;
  const std::string culprit = silent_neighbour(flight.number());
  if (culprit.empty()) {
    // Whoever is stuck is no neighbour of this rank; one that is will say so, and its word is better.
    if (wait_until(arrived, kHearsaySeconds, possible)) return;
  }
  fail_timeout(site() + ": not within the deadline of " + seconds_text() + " s (expected op " +
               std::to_string(flight.number()) + ", seen: " + neighbours_text() + ")" + culprit + ".");
}

// Says who of the neighbours holds the ring up, as far as this rank can tell; empty if it is none of them.
std::string RingTransport::silent_neighbour(uint64_t number) {
  uint64_t round;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [peer, line] : parts_.lines) {
      if (begun_[peer].last < number)
        return "; rank " + std::to_string(context_.told(peer)) + " has not begun it";
    }
    round = ++probe_round_;
  }
  for (const auto& [peer, line] : parts_.lines) line->send(message(ControlMessage::kProbe, 0, round, 0));
  int silent = -1;
  const auto all_answered = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    silent = -1;
    for (const auto& [peer, line] : parts_.lines) {
      if (answered_[peer] < round) silent = peer;
    }
    return silent < 0;
  };
  if (wait_until(all_answered, kAnswerSeconds, [] {})) return "";
  return "; rank " + std::to_string(context_.told(silent)) + " does not answer: it is stopped, or cut off";
}

std::string RingTransport::neighbours_text() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::ostringstream text;
  for (const auto& [peer, line] : parts_.lines) {
    const auto found = begun_.find(peer);
    text << (text.tellp() > 0 ? ", " : "") << "rank " << context_.told(peer) << " last began op "
         << (found == begun_.end() ? 0 : found->second.last);
  }
  return text.str();
}

std::string RingTransport::seconds_text() const {
  std::ostringstream text;
  text << context_.deadline_seconds;
  return text.str();
}

// Under the lock. The first one counts.
void RingTransport::set_failure(Failure failure) {
  if (failed_.load()) return;
  failure_ = std::move(failure);
  failed_.store(true);
}

void RingTransport::lose(int peer, const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string host = layout().ranks_per_host() > 1 || layout().hosts() < world_size()
                         ? " on host " + std::to_string(layout().host_of(peer))
                         : "";
  set_failure({CommErrorKind::kPeerLost, "rank " + std::to_string(context_.told(peer)) + host + " " + what,
               context_.name});
}

void RingTransport::poison(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (poisoned_.empty()) poisoned_ = failure_.message.empty() ? why : failure_.message;
}

// Before an op. A peer that was lost between two ops is told of as such, once.
void RingTransport::raise_if_broken() {
  std::string why;
  bool first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.load() && poisoned_.empty()) return;
    first = poisoned_.empty();
    if (first) poisoned_ = failure_.message;
    why = poisoned_;
  }
  if (first) raise_if_failed(flight_of(last_number_).get());
  raise_comm_error(CommErrorKind::kBroken,
                   "Group '" + context_.name +
                       "' cannot go on: its ranks are out of step since an earlier error (" + why +
                       "); close it on all ranks and start anew.");
}

// In the thread of an op that waits: of `flight`, where it has one.
void RingTransport::raise_if_failed(const RingFlight* flight) {
  if (!failed_.load()) return;
  Failure failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure = failure_;
  }
  if (failure.kind == CommErrorKind::kPeerLost) {
    const std::string op = flight != nullptr
                               ? std::string(name_of(flight->descriptor().op)) + " (op " +
                                     std::to_string(flight->number()) + " of group '" + context_.name + "')"
                               : "group '" + context_.name + "'";
    failure.message = op + ", rank " + std::to_string(context_.own_rank()) + ": " + failure.message + ".";
  }
  raise_for_all(failure);
}

// Nobody is left who could send what an op waits for.
void RingTransport::raise_if_deserted(const RingFlight& flight) {
  std::string who;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [peer, line] : parts_.lines) {
      if (closed_.count(peer) == 0) return;
      who += (who.empty() ? "rank " : " and rank ") + std::to_string(context_.told(peer));
    }
    set_failure({CommErrorKind::kPeerLost,
                 who + " closed the group, or ended, before this op: ranks must call the same ops",
                 context_.name});
  }
  raise_if_failed(&flight);
}

void RingTransport::fail_timeout(const std::string& text) {
  const Failure failure{CommErrorKind::kTimeout, text, context_.name};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_failure(failure);
  }
  raise_for_all(failure);
}

}  // namespace pyruntime
