#include "core/job/peers.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "core/deadline.h"
#include "core/host_process.h"
#include "core/job/failure_board.h"
#include "core/job/job_ranks.h"
#include "core/job/sealed.h"
#include "core/text.h"

namespace pyruntime {

namespace {

constexpr char kSeparator = '\x1f';
constexpr double kLongestWork = 24 * 3600.0;
// After this silence a rank that may have broken a collective is named: many times the period of the signs.
constexpr double kSilent = 2.0;
constexpr double kLookEvery = 0.1;
// The wait for a better-informed rank's report.
constexpr double kHearsay = 0.5;

std::string get_text(c10d::Store& store, const std::string& key) {
  return store.check({key}) ? store.get_to_str(key) : "";
}

// The signs of life of one rank, as this process sees them.
class Life {
 public:
  explicit Life(int rank) : rank_(rank) {}

  // `text` is what the store holds; empty: nothing yet.
  void see(const std::string& text) {
    const double now = monotonic_seconds();
    // Time in which this process itself sleeps or is stopped is no silence of the peer.
    silence_ += std::min(now - last_look_, 0.5);
    last_look_ = now;
    if (text.empty() || text == last_) return;
    if (last_.empty()) {
      const SignOfLife sign = SignOfLife::of(text);
      JobRanks::instance().learn(rank_, sign.host_name, sign.pid);
      process_text_ = "process " + std::to_string(sign.pid) + " on " + sign.host_name;
      if (sign.host == host_identity()) process_ = WatchedProcess(sign.pid);
    }
    last_ = text;
    silence_ = 0;
  }

  bool was_seen() const { return !last_.empty(); }
  bool ended() const { return process_.pid() != 0 && process_.gone(); }
  // "process 4711 on node3", once it was seen.
  const std::string& process_text() const { return process_text_; }
  double silence() const { return silence_; }

 private:
  int rank_;
  std::string last_;
  std::string process_text_ = "process";
  WatchedProcess process_;
  double last_look_ = monotonic_seconds();
  double silence_ = 0;
};

[[noreturn]] void raise(CommErrorKind kind, const Waiting& waiting, const std::string& what) {
  raise_for_all({kind, waiting.for_what + what, waiting.group});
}

void ask(FailureBoard::Question question, const Waiting& waiting) {
  FailureBoard& board = FailureBoard::instance();
  const auto asked = board.ask(std::move(question), waiting.seconds);
  if (asked == FailureBoard::Asked::kAnswered) return;
  // The store's process may have gone because a rank failed, whose report comes another way.
  board.raise_if_failed();
  if (asked == FailureBoard::Asked::kStoreGone) {
    raise(CommErrorKind::kPeerLost, waiting, ": " + board.words_of_lost_store());
  }
  raise(CommErrorKind::kTimeout, waiting,
        ": the job's store, which the launcher or rank 0 serves, did not answer within " +
            seconds_text(waiting.seconds) + ".");
}

void check_in_time(const Life& life, double waited, const Waiting& waiting) {
  std::string why;
  if (waiting.while_it_lives) {
    if (life.silence() > waiting.seconds) {
      why = ": no sign of life for " + seconds_text(life.silence()) +
            (life.was_seen() ? "; its " + life.process_text() + " is stopped, or its host is gone."
                             : "; it has not started.");
    } else if (waited > kLongestWork) {
      why = ": it works on, but has not come within a day.";
    }
  } else if (waited > waiting.seconds) {
    why = ": not within the deadline of " + seconds_text(waiting.seconds);
    if (!life.was_seen()) {
      why += "; it has not started.";
    } else {
      why +=
          life.silence() > std::min(kSilent, waiting.seconds / 2)
              ? "; it shows no sign of life: its " + life.process_text() + " is stopped, or its host is gone."
              : "; its " + life.process_text() + " lives.";
    }
  }
  if (!why.empty()) raise(CommErrorKind::kTimeout, waiting, why);
}

}  // namespace

std::string SignOfLife::text() const {
  return host + kSeparator + std::to_string(pid) + kSeparator + std::to_string(count) + kSeparator +
         (waits ? "1" : "0") + kSeparator + host_name;
}

SignOfLife SignOfLife::of(const std::string& text) {
  std::istringstream parts(text);
  SignOfLife sign;
  char separator = 0;
  std::getline(parts, sign.host, kSeparator);
  parts >> sign.pid >> separator >> sign.count >> separator >> sign.waits >> separator;
  std::getline(parts, sign.host_name);
  return sign;
}

void tell(const std::string& key, const std::string& value, const Waiting& waiting) {
  ask([key, sealed = seal(value)](c10d::Store& store) { store.set(key, sealed); }, waiting);
}

int64_t count(const std::string& key, const Waiting& waiting) {
  const auto number = std::make_shared<int64_t>(0);
  ask([number, key](c10d::Store& store) { *number = store.add(key, 1); }, waiting);
  return *number;
}

std::string hear(const std::string& key, int rank, const Waiting& waiting) {
  struct Answer {
    bool there = false;
    std::string value, sign;
  };
  Life life(rank);
  const double start = monotonic_seconds();
  double looked_for_life = 0;
  bool last_look = false;
  // Each look is a round trip to the store: often at first, then every few milliseconds.
  for (auto pause = std::chrono::microseconds(200);;
       pause = std::min(2 * pause, std::chrono::microseconds(20000))) {
    const double now = monotonic_seconds();
    const bool for_life = now - looked_for_life > kLookEvery && now - start > kLookEvery;
    if (for_life) looked_for_life = now;
    const std::string life_key = for_life ? FailureBoard::instance().life_key(rank) : "";
    auto answer = std::make_shared<Answer>();
    ask(
        [answer, key, life_key](c10d::Store& store) {
          answer->there = store.check({key});
          if (answer->there) answer->value = get_text(store, key);
          if (!life_key.empty()) answer->sign = get_text(store, life_key);
        },
        waiting);
    if (answer->there) {
      if (std::optional<std::string> value = unseal(answer->value)) return *std::move(value);
      raise(CommErrorKind::kBroken, waiting,
            ": its value in the job's store (" + std::to_string(answer->value.size()) +
                " bytes) is not what a rank writes; another program writes there. Allow only the job's "
                "hosts to reach the store's port (MASTER_PORT), and start again.");
    }
    if (for_life) life.see(answer->sign);
    check_wait();
    // The peer may have written and then ended, between the look and now.
    if (last_look) {
      raise(CommErrorKind::kPeerLost, waiting, ": its " + life.process_text() + " has ended.");
    }
    last_look = life.ended();
    if (!last_look) {
      check_in_time(life, monotonic_seconds() - start, waiting);
      std::this_thread::sleep_for(pause);
    }
  }
}

void await_better_word(int rank) {
  FailureBoard& board = FailureBoard::instance();
  const auto look = [&, key = board.life_key(rank)] {
    const auto text = std::make_shared<std::string>();
    board.ask([text, key](c10d::Store& store) { *text = get_text(store, key); }, kHearsay);
    return SignOfLife::of(*text);
  };
  const auto listen = [](double seconds) {
    const double end = monotonic_seconds() + seconds;
    while (monotonic_seconds() < end) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kLookEvery / 4));
      check_wait();
    }
  };
  const SignOfLife before = look();
  if (!before.waits) return;
  listen(3 * kLookEvery);
  // A rank that has been stopped while it waited is the culprit.
  if (look().count != before.count) listen(kHearsay);
}

void raise_for_ended(const Waiting& waiting) {
  FailureBoard& board = FailureBoard::instance();
  board.raise_if_failed();
  struct Found {
    std::string sign;
    bool has_left = false;
  };
  const auto found = std::make_shared<std::vector<Found>>(board.world_size());
  std::vector<std::string> keys, left_keys;
  for (int rank = 0; rank < board.world_size(); ++rank) {
    keys.push_back(board.life_key(rank));
    left_keys.push_back(board.left_key(rank));
  }
  const auto asked = board.ask(
      [found, keys, left_keys](c10d::Store& store) {
        for (size_t rank = 0; rank < keys.size(); ++rank) {
          found->at(rank) = {get_text(store, keys[rank]), store.check({left_keys[rank]})};
        }
      },
      waiting.seconds);
  board.raise_if_failed();
  if (asked != FailureBoard::Asked::kAnswered) return;
  for (size_t rank = 0; rank < found->size(); ++rank) {
    const SignOfLife sign = SignOfLife::of(found->at(rank).sign);
    if (found->at(rank).has_left || sign.pid == 0 || sign.host != host_identity()) continue;
    if (!WatchedProcess(sign.pid).gone()) continue;
    JobRanks::instance().learn(static_cast<int>(rank), sign.host_name, sign.pid);
    raise(CommErrorKind::kPeerLost, waiting,
          ": " + JobRanks::instance().name_and_place(static_cast<int>(rank)) + " has ended.");
  }
}

void raise_for_missing(const std::vector<int>& ranks, const Waiting& waiting, const std::string& cause) {
  FailureBoard& board = FailureBoard::instance();
  std::vector<Life> lives(ranks.begin(), ranks.end());
  const double start = monotonic_seconds();
  // A rank that broke the collective by its own error may take a moment to end. On a busy machine signs come
  // late: a rank that is neither silent for long nor heard of just now is waited for.
  const auto undecided = [&] {
    const double waited = monotonic_seconds() - start;
    return waited < kSilent + 3 * kLookEvery ||
           (waited < 3 * kSilent &&
            std::any_of(
                lives.begin(), lives.end(),
                [](const Life& life) { return life.silence() > kSilent / 4 && life.silence() <= kSilent; }));
  };
  while (undecided()) {
    check_wait();
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(board.life_key(rank));
    auto signs = std::make_shared<std::vector<std::string>>();
    const auto asked = board.ask(
        [signs, keys](c10d::Store& store) {
          for (const std::string& key : keys) signs->push_back(get_text(store, key));
        },
        kSilent);
    if (asked == FailureBoard::Asked::kStoreGone) {
      board.raise_if_failed();
      raise(CommErrorKind::kPeerLost, waiting, ": " + board.words_of_lost_store());
    }
    if (asked != FailureBoard::Asked::kAnswered) break;
    for (size_t at = 0; at < ranks.size(); ++at) {
      lives[at].see(signs->at(at));
      if (!lives[at].ended()) continue;
      raise(CommErrorKind::kPeerLost, waiting,
            ": " + JobRanks::instance().name_and_place(ranks[at]) + " has ended.");
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(kLookEvery));
  }
  check_wait();
  for (size_t at = 0; at < ranks.size(); ++at) {
    if (lives[at].silence() <= kSilent) continue;
    raise(CommErrorKind::kTimeout, waiting,
          ": " + JobRanks::instance().name_and_place(ranks[at]) +
              " shows no sign of life: its process is stopped, or its host is gone (" + cause + ").");
  }
  // All of these live, so they wait for another rank themselves; its peer will name it.
  const double decided = monotonic_seconds();
  while (monotonic_seconds() - decided < kHearsay) {
    std::this_thread::sleep_for(std::chrono::duration<double>(kLookEvery));
    check_wait();
  }
  const bool late = cause.find("imed out") != std::string::npos;
  raise(late ? CommErrorKind::kTimeout : CommErrorKind::kPeerLost, waiting, ": " + cause);
}

}  // namespace pyruntime
