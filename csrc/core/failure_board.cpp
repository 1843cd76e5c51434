#include "core/failure_board.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <optional>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/peers.h"
#include "cpu/host_process.h"

namespace pyruntime {

namespace {

// Often enough for a failure to reach all ranks well within a second; a job of thousands looks less often, to
// spare the one process that serves the store.
std::chrono::milliseconds period_of(int world_size) {
  return std::chrono::milliseconds(std::clamp(world_size / 8, 100, 500));
}

// How often a wait for an answer of the store looks for what may end it.
constexpr std::chrono::milliseconds kAnswerLook{20};

// A store that has not answered after this long is left alone.
constexpr std::chrono::milliseconds kStorePatience{500};

constexpr char kSeparator = '\x1f';

std::vector<uint8_t> encode(const Failure& failure) {
  const std::string text = std::to_string(static_cast<int>(failure.kind)) + kSeparator +
                           std::to_string(failure.rank) + kSeparator + failure.group + kSeparator +
                           failure.message;
  return {text.begin(), text.end()};
}

std::optional<Failure> decode(const std::vector<uint8_t>& bytes) {
  const std::string text(bytes.begin(), bytes.end());
  const size_t first = text.find(kSeparator);
  const size_t second = first == std::string::npos ? first : text.find(kSeparator, first + 1);
  const size_t third = second == std::string::npos ? second : text.find(kSeparator, second + 1);
  if (third == std::string::npos) return std::nullopt;
  return Failure{static_cast<CommErrorKind>(std::stoi(text.substr(0, first))), text.substr(third + 1),
                 text.substr(second + 1, third - second - 1),
                 std::stoi(text.substr(first + 1, second - first - 1))};
}

}  // namespace

struct FailureBoard::Asking {
  Question question;
  bool answered = false;
  bool failed = false;
};

// What the threads of one job share. The store is asked by the watching thread alone: a store that does not
// answer holds up nobody else.
struct FailureBoard::Session {
  c10::intrusive_ptr<c10d::Store> store;  // for comparison; null: no job
  c10::intrusive_ptr<c10d::Store> own;    // the watching thread's own connection
  int rank = -1;
  int world_size = 1;

  std::mutex mutex;
  std::condition_variable changed;
  bool leaving = false;
  bool watched = false;     // the thread runs
  uint64_t generation = 0;  // of failures: how many were cleared
  std::atomic<bool> failed{false};
  Failure first;  // of this generation
  std::optional<Failure> to_post;
  bool look_now = false;
  uint64_t looks = 0;
  std::deque<std::shared_ptr<Asking>> questions;

  int64_t number = 0;  // how often this rank has joined a job on this store; 0: it has not yet

  std::string key() const {
    return "pyruntime/failure/" + std::to_string(number) + "/" + std::to_string(generation);
  }
  std::string life_key(int of) const {
    return "pyruntime/life/" + std::to_string(number) + "/" + std::to_string(of);
  }

  // The thread's first work: the store may not answer.
  void connect();
  void answer(std::unique_lock<std::mutex>& lock);
  bool look(std::unique_lock<std::mutex>& lock);
};

FailureBoard& FailureBoard::instance() {
  static auto* board = [] {
    auto* made = new FailureBoard();  // never destroyed: threads may outlive static destructors
    made->session_ = std::make_shared<Session>();
    return made;
  }();
  return *board;
}

std::shared_ptr<FailureBoard::Session> FailureBoard::session() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return session_;
}

bool FailureBoard::has_joined(const c10::intrusive_ptr<c10d::Store>& store) {
  return session()->store == store;
}

void FailureBoard::join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                        const c10::intrusive_ptr<c10d::Store>& connection) {
  if (has_joined(store)) return;
  leave();
  auto made = std::make_shared<Session>();
  made->store = store;
  made->own = connection;
  made->rank = rank;
  made->world_size = world_size;
  made->watched = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    session_ = made;
  }
  std::thread([made] { watch(made); }).detach();
}

void FailureBoard::leave() {
  std::shared_ptr<Session> left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left = std::exchange(session_, std::make_shared<Session>());
  }
  std::unique_lock<std::mutex> lock(left->mutex);
  left->leaving = true;
  left->changed.notify_all();
  left->changed.wait_for(lock, kStorePatience, [&] { return !left->watched; });
}

void FailureBoard::Session::connect() {
  auto connection = own ? own : store->clone();
  const int64_t joined = connection->add("pyruntime/joined/" + std::to_string(rank), 1);
  const std::lock_guard<std::mutex> lock(mutex);
  own = std::move(connection);
  number = joined;
}

void FailureBoard::Session::answer(std::unique_lock<std::mutex>& lock) {
  while (!questions.empty()) {
    const std::shared_ptr<Asking> next = questions.front();
    questions.pop_front();
    bool failed_to_answer = false;
    lock.unlock();
    try {
      next->question(*own);
    } catch (const std::exception&) {
      failed_to_answer = true;
    }
    lock.lock();
    next->failed = failed_to_answer;
    next->answered = true;
    changed.notify_all();
  }
}

// False where the store's process is gone: the job is ending, and waits end by what they see themselves.
bool FailureBoard::Session::look(std::unique_lock<std::mutex>& lock) {
  look_now = false;
  const std::string board_key = key(), own_life = life_key(rank);
  const uint64_t looked_in = generation;
  const std::string sign = SignOfLife{cpu::host_identity(), getpid(), looks}.text();
  const std::optional<Failure> posting = std::exchange(to_post, std::nullopt);
  std::optional<Failure> found;
  bool reached = true;
  lock.unlock();
  try {
    if (posting) {
      found = decode(own->compareSet(board_key, {}, encode(*posting)));
    } else if (own->check({board_key})) {
      found = decode(own->get(board_key));
    }
    own->set(own_life, std::vector<uint8_t>(sign.begin(), sign.end()));
  } catch (const std::exception&) {
    reached = false;
  }
  lock.lock();
  ++looks;
  if (found && looked_in == generation && !failed.load()) {
    first = *found;
    failed.store(true, std::memory_order_release);
  }
  changed.notify_all();
  return reached;
}

void FailureBoard::watch(const std::shared_ptr<Session>& session) {
  pthread_setname_np(pthread_self(), "pyr-failures");
  const auto period = period_of(session->world_size);
  bool reached = true;
  try {
    session->connect();
  } catch (const std::exception&) {
    reached = false;
  }
  std::unique_lock<std::mutex> lock(session->mutex);
  auto next_look = std::chrono::steady_clock::now();  // at once: others look for a sign of this rank
  while (reached && !session->leaving) {
    session->changed.wait_until(lock, next_look, [&] {
      return session->leaving || session->to_post.has_value() || session->look_now ||
             !session->questions.empty();
    });
    if (session->leaving) break;
    session->answer(lock);
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look && !session->to_post && !session->look_now) continue;
    next_look = now + period;
    reached = session->look(lock);
  }
  session->watched = false;
  session->own.reset();
  session->changed.notify_all();
}

FailureBoard::Asked FailureBoard::ask(Question question, double seconds) {
  const std::shared_ptr<Session> session = this->session();
  const auto asking = std::make_shared<Asking>();
  asking->question = std::move(question);
  const double end = monotonic_seconds() + seconds;
  std::unique_lock<std::mutex> lock(session->mutex);
  session->questions.push_back(asking);
  session->changed.notify_all();
  while (!asking->answered) {
    if (!session->watched) return Asked::kStoreGone;
    if (monotonic_seconds() > end) return Asked::kTimeout;
    session->changed.wait_for(lock, kAnswerLook, [&] { return asking->answered || !session->watched; });
    lock.unlock();
    check_wait();
    lock.lock();
  }
  return asking->failed ? Asked::kStoreGone : Asked::kAnswered;
}

void FailureBoard::ask_later(Question question) {
  const std::shared_ptr<Session> session = this->session();
  const auto asking = std::make_shared<Asking>();
  asking->question = std::move(question);
  const std::lock_guard<std::mutex> lock(session->mutex);
  session->questions.push_back(asking);
  session->changed.notify_all();
}

std::string FailureBoard::life_key(int rank) {
  const std::shared_ptr<Session> session = this->session();
  const std::lock_guard<std::mutex> lock(session->mutex);
  return session->life_key(rank);
}

Failure FailureBoard::post(Failure failure) {
  const std::shared_ptr<Session> session = this->session();
  std::unique_lock<std::mutex> lock(session->mutex);
  failure.rank = session->rank;
  if (!session->failed.load() && session->watched) {
    session->to_post = failure;
    session->changed.notify_all();
    session->changed.wait_for(lock, kStorePatience,
                              [&] { return session->failed.load() || !session->watched; });
  }
  if (!session->failed.load()) {
    session->first = failure;
    session->failed.store(true, std::memory_order_release);
  }
  return session->first;
}

void FailureBoard::raise_if_failed() {
  const std::shared_ptr<Session> session = this->session();
  if (!session->failed.load(std::memory_order_acquire)) return;
  Failure failure;
  {
    const std::lock_guard<std::mutex> lock(session->mutex);
    failure = session->first;
  }
  const std::string message = failure.rank == session->rank
                                  ? failure.message
                                  : "rank " + std::to_string(failure.rank) + " reports: " + failure.message;
  raise_comm_error(failure.kind, message);
}

void FailureBoard::clear(const std::function<bool(const std::string&)>& is_over) {
  const std::shared_ptr<Session> session = this->session();
  std::unique_lock<std::mutex> lock(session->mutex);
  if (!session->failed.load() && session->watched) {
    // Another rank may have failed, and this one not seen it yet.
    const uint64_t before = session->looks;
    session->look_now = true;
    session->changed.notify_all();
    session->changed.wait_for(lock, kStorePatience,
                              [&] { return session->looks > before || !session->watched; });
  }
  if (!session->failed.load() || !is_over(session->first.group)) return;
  ++session->generation;
  session->failed.store(false);
}

void raise_for_all(const Failure& failure) {
  FailureBoard::instance().post(failure);
  FailureBoard::instance().raise_if_failed();
  raise_comm_error(failure.kind, failure.message);  // cleared in between
}

}  // namespace pyruntime
