#include "transport/ring/control.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/deadline.h"
#include "core/job/peers.h"
#include "core/late_report.h"
#include "core/text.h"

namespace pyruntime {

namespace {

// The time that a neighbour has, after a deadline, to show that it runs.
constexpr double kAnswerSeconds = 0.2;
// After a deadline: how long to wait for a better-informed rank's report. With the neighbours' time to answer
// it stays below the second that a rank may take beyond its deadline.
constexpr double kHearsaySeconds = 0.4;

}  // namespace

Control::Control(GroupContext& context, const HostLayout& layout, ControlLines lines, FlightSlots& slots,
                 Health& health)
    : context_(context), layout_(layout), lines_(std::move(lines)), slots_(slots), health_(health) {
  for (const auto& [peer, line] : lines_) neighbours_[peer];
}

void Control::tell_all(const ControlMessage& message) {
  for (const auto& [peer, line] : lines_) line->send(message);
}

void Control::introduce(RingFlight& flight) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [peer, neighbour] : neighbours_) {
      const auto early = neighbour.early.find(flight.number());
      if (early == neighbour.early.end()) continue;
      compare(peer, flight, early->second);
      neighbour.early.erase(early);
    }
  }
  tell_all({ControlMessage::kBegin, 0, flight.number(), 0, flight.announced()});
}

void Control::take(int peer, const ControlMessage& message) {
  if (message.kind == ControlMessage::kProbe) return tell(peer, {ControlMessage::kAnswer, 0, message.flight});
  const std::lock_guard<std::mutex> lock(mutex_);
  Neighbour& neighbour = neighbours_.at(peer);
  switch (message.kind) {
    case ControlMessage::kBegin:
      neighbour.last_begun = std::max(neighbour.last_begun, message.flight);
      // Under the lock: the flight is in its slot already, or introduce() comes later and finds the message.
      if (const std::shared_ptr<RingFlight> flight = slots_.find(message.flight)) {
        compare(peer, *flight, message.descriptor);
      } else {
        neighbour.early[message.flight] = message.descriptor;
      }
      return;
    case ControlMessage::kAnswer:
      neighbour.answered = message.flight;
      return;
    case ControlMessage::kBye:
      neighbour.said_bye = true;
      return;
    default:
      return health_.lose(peer, "sent a message that is no message of this version");
  }
}

// A neighbour that has begun the same flight as this rank has room for what this rank sends.
void Control::compare(int peer, RingFlight& flight, const FlightDescriptor& theirs) {
  if (flight.announced().agrees_with(theirs)) return flight.give_credit(peer);
  health_.fail(failure_of(context_, CommErrorKind::kDisagree,
                          disagreement_text(context_, flight.number(), flight.announced(), peer, theirs)));
}

void Control::closed_by(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Neighbour& neighbour = neighbours_.at(peer);
  neighbour.closed = true;
  if (!neighbour.said_bye) health_.lose(peer, "has ended: its connection closed");
}

void Control::await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
                    const std::function<std::string()>& what) {
  if (arrived()) return;
  const Spending waiting(context_, Entered::kWait, name_of(flight.announced().op), peer);
  const auto site = [&] {
    return waiting_text(context_, flight.announced().op, flight.number(), peer, what());
  };
  LateReport report(context_.deadline_seconds, site);
  // Chunks that arrive through another rank of this host do not depend on this rank's neighbours.
  const bool by_own_rail = layout_.local_rank_of(peer) == layout_.local_rank();
  const auto possible = [&] {
    health_.raise_if_failed(&flight);
    if (by_own_rail) raise_if_deserted(flight);
    report.look();
  };
  if (wait_until(arrived, context_.deadline_seconds, possible)) return;
  const std::string culprit = silent_neighbour(flight.number());
  if (culprit.empty()) {
    // The stuck rank is no neighbour of this rank; one of its own neighbours will report it better.
    if (wait_until(arrived, kHearsaySeconds, possible)) return;
  }
  const Failure failure = failure_of(
      context_, CommErrorKind::kTimeout,
      site() + ": not within the deadline of " + seconds_text(context_.deadline_seconds) + " (expected op " +
          std::to_string(flight.number()) + ", seen: " + neighbours_text() + ")" + culprit + ".");
  health_.fail(failure);
  raise_for_all(failure);
}

// Raises if nobody is left who could send what an op waits for.
void Control::raise_if_deserted(const RingFlight& flight) {
  const std::string who = deserters();
  if (who.empty()) return;
  health_.fail(failure_of(context_, CommErrorKind::kPeerLost,
                          who + " closed the group, or ended, before this op: ranks must call the same ops"));
  health_.raise_if_failed(&flight);
}

std::string Control::silent_neighbour(uint64_t number) {
  uint64_t round;
  std::optional<int> behind;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [peer, neighbour] : neighbours_) {
      if (!behind && neighbour.last_begun < number) behind = peer;
    }
    round = ++probe_round_;
  }
  if (behind) {
    await_better_word(context_.job_rank(*behind));
    return "; " + context_.name_of(*behind) + " has not begun it";
  }
  tell_all({ControlMessage::kProbe, 0, round});
  int silent = -1;
  const auto all_answered = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    silent = -1;
    for (const auto& [peer, neighbour] : neighbours_) {
      if (neighbour.answered < round) silent = peer;
    }
    return silent < 0;
  };
  if (wait_until(all_answered, kAnswerSeconds, [] {})) return "";
  return "; " + context_.name_of(silent) + " does not answer: it is stopped, or cut off";
}

std::string Control::neighbours_text() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [peer, neighbour] : neighbours_) {
    text += (text.empty() ? "" : ", ") + context_.name_of(peer) + " last began op " +
            std::to_string(neighbour.last_begun);
  }
  return text;
}

std::string Control::deserters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string who;
  for (const auto& [peer, neighbour] : neighbours_) {
    if (!neighbour.closed) return "";
    who += (who.empty() ? "" : " and ") + context_.name_of(peer);
  }
  return who;
}

}  // namespace pyruntime
