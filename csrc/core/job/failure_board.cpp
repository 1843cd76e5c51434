#include "core/job/failure_board.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <iterator>
#include <optional>
#include <sstream>
#include <thread>
#include <unistd.h>
#include <utility>

#include "core/deadline.h"
#include "core/host_process.h"
#include "core/job/job_ranks.h"
#include "core/job/peers.h"
#include "core/job/sealed.h"
#include "core/late_report.h"
#include "core/text.h"

namespace pyruntime {

namespace {

// Often enough for a failure to reach all ranks well within a second. A job of thousands of ranks looks less
// often, to spare the one process that serves the store.
std::chrono::milliseconds period_of(int world_size) {
  return std::chrono::milliseconds(std::clamp(world_size / 8, 100, 500));
}

// The period in which a wait for the store's answer checks for what may end it.
constexpr std::chrono::milliseconds kAnswerLook{20};

// After this long without an answer the store is not waited for any more.
constexpr std::chrono::milliseconds kStorePatience{500};

// After this long the process that serves the store counts as stopped: many times what a busy one needs.
constexpr double kServerSilent = 2.0;

constexpr char kSeparator = '\x1f';

std::string encode(const Failure& failure) {
  return seal(std::to_string(static_cast<int>(failure.kind)) + kSeparator + std::to_string(failure.rank) +
              kSeparator + failure.group + kSeparator + failure.message);
}

// Anybody who reaches the store can write there: bytes that no rank has written end the job too.
Failure decode(const std::string& text) {
  const std::optional<std::string> sealed = unseal(text);
  std::istringstream parts(sealed.value_or(""));
  Failure failure{};
  int kind = -1;
  char separator = 0;
  parts >> kind >> separator >> failure.rank >> separator;
  if (kind < 0 || kind > static_cast<int>(CommErrorKind::kDisagree) ||
      !std::getline(parts, failure.group, kSeparator)) {
    return {CommErrorKind::kBroken,
            "In the job's store, the record of a failure (" + std::to_string(text.size()) +
                " bytes) is not what a rank writes; another program writes there. Allow only the job's "
                "hosts to reach the store's port (MASTER_PORT), and start again.",
            "", -1};
  }
  failure.kind = static_cast<CommErrorKind>(kind);
  failure.message.assign(std::istreambuf_iterator<char>(parts), {});
  return failure;
}

}  // namespace

// The state that the threads of one job share. Only the watching thread asks the store: a store that does not
// answer blocks nobody else.
struct FailureBoard::Session {
  c10::intrusive_ptr<c10d::Store> store;  // for comparison; null: no job
  c10::intrusive_ptr<c10d::Store> own;    // the watching thread's own connection
  int rank = -1;
  int world_size = 1;
  int served_by = -1;

  std::mutex mutex;
  std::condition_variable changed;
  bool leaving = false;
  bool watched = false;     // the thread runs
  uint64_t generation = 0;  // how many failures were cleared
  std::atomic<bool> failed{false};
  Failure first;  // of this generation
  std::optional<Failure> to_post;
  bool look_now = false;
  uint64_t looks = 0;
  double asked_since = 0;  // since when an unanswered question waits; 0: none does
  std::deque<std::packaged_task<void(c10d::Store&)>> questions;

  int64_t number = 0;  // how often this rank has joined a job on this store; 0: it has not yet

  std::string key() const {
    return "pyruntime/failure/" + std::to_string(number) + "/" + std::to_string(generation);
  }
  std::string life_key(int of) const {
    return "pyruntime/life/" + std::to_string(number) + "/" + std::to_string(of);
  }

  std::string left_key(int of) const {
    return "pyruntime/left/" + std::to_string(number) + "/" + std::to_string(of);
  }

  bool is_watched() {
    const std::lock_guard<std::mutex> lock(mutex);
    return watched;
  }
  std::future<void> add(Question question);
  // Runs in the watching thread, because the store may not answer.
  void connect();
  void answer(std::unique_lock<std::mutex>& lock);
  bool look(std::unique_lock<std::mutex>& lock);
  // A sentence that names the rank that serves the store, if the store has not answered for seconds; else
  // empty.
  std::string words_of_silent_server();
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
                        const c10::intrusive_ptr<c10d::Store>& connection, int served_by) {
  if (has_joined(store)) return;
  leave();
  auto made = std::make_shared<Session>();
  made->store = store;
  made->own = connection;
  made->rank = rank;
  made->world_size = world_size;
  made->served_by = served_by;
  made->watched = true;
  JobRanks::instance().learn(rank, host_name(), getpid());
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
  if (left->watched && left->number > 0) {
    left->questions.emplace_back(
        [key = left->left_key(left->rank)](c10d::Store& asked) { asked.set(key, ""); });
  }
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

std::future<void> FailureBoard::Session::add(Question question) {
  std::packaged_task<void(c10d::Store&)> task(std::move(question));
  std::future<void> answered = task.get_future();
  const std::lock_guard<std::mutex> lock(mutex);
  questions.push_back(std::move(task));
  changed.notify_all();
  return answered;
}

void FailureBoard::Session::answer(std::unique_lock<std::mutex>& lock) {
  while (!questions.empty()) {
    auto next = std::move(questions.front());
    questions.pop_front();
    asked_since = monotonic_seconds();
    lock.unlock();
    next(*own);  // its exceptions go to its future
    lock.lock();
    asked_since = 0;
  }
}

// Returns false if the store's process is gone: the job is ending, and waits end by what they see themselves.
bool FailureBoard::Session::look(std::unique_lock<std::mutex>& lock) {
  look_now = false;
  const std::string board_key = key(), own_life = life_key(rank);
  const uint64_t looked_in = generation;
  const std::string sign =
      SignOfLife{host_identity(), getpid(), looks, LateReport::is_one_waited_for(), host_name()}.text();
  const std::optional<Failure> posting = std::exchange(to_post, std::nullopt);
  std::optional<Failure> found;
  bool reached = true;
  asked_since = monotonic_seconds();
  lock.unlock();
  try {
    if (posting) {
      found = decode(own->compareSet(board_key, std::string(), encode(*posting)));
    } else if (own->check({board_key})) {
      found = decode(own->get_to_str(board_key));
    }
    own->set(own_life, sign);
  } catch (const std::exception&) {
    reached = false;
  }
  lock.lock();
  asked_since = 0;
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
  auto next_look = std::chrono::steady_clock::now();  // at once: others look for this rank's sign of life
  while (reached && !session->leaving) {
    session->changed.wait_until(lock, next_look, [&] {
      return session->leaving || session->to_post.has_value() || session->look_now ||
             !session->questions.empty();
    });
    session->answer(lock);
    if (session->leaving) break;
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
  const double end = monotonic_seconds() + seconds;
  std::future<void> answered = session->add(std::move(question));
  while (answered.wait_for(kAnswerLook) != std::future_status::ready) {
    if (!session->is_watched()) return Asked::kStoreGone;
    if (monotonic_seconds() > end) return Asked::kTimeout;
    check_wait();
  }
  try {
    answered.get();
    return Asked::kAnswered;
  } catch (const std::exception&) {
    return Asked::kStoreGone;
  }
}

std::string FailureBoard::words_of_lost_store() {
  const int rank = session()->served_by;
  if (rank < 0) return "the job's store is gone, with the launcher that served it.";
  return JobRanks::instance().name(rank) + " has ended: it served the job's store, which is gone.";
}

std::string FailureBoard::Session::words_of_silent_server() {
  const double silence = asked_since > 0 ? monotonic_seconds() - asked_since : 0;
  if (served_by < 0 || served_by == rank || silence < kServerSilent) return "";
  return JobRanks::instance().name_and_place(served_by) +
         " is stopped, or its host is gone: the job's store, which it serves, has not answered for " +
         seconds_text(silence) + ".";
}

int FailureBoard::world_size() {
  return session()->world_size;
}

std::string FailureBoard::left_key(int rank) {
  const std::shared_ptr<Session> session = this->session();
  const std::lock_guard<std::mutex> lock(session->mutex);
  return session->left_key(rank);
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
    // Whichever rank is late or has ended, it was in the end waiting for the rank that serves the store.
    const bool ranks_agree = failure.kind != CommErrorKind::kDisagree;
    if (const std::string server = session->words_of_silent_server(); ranks_agree && !server.empty()) {
      failure.kind = CommErrorKind::kTimeout;
      failure.message = server + " It was noticed in: " + failure.message;
    }
    session->first = failure;
    session->failed.store(true, std::memory_order_release);
  }
  return session->first;
}

bool FailureBoard::has_failed() {
  return session()->failed.load(std::memory_order_acquire);
}

bool FailureBoard::has_left(int rank) {
  const std::shared_ptr<Session> session = this->session();
  const auto left = std::make_shared<std::atomic<bool>>(false);
  const std::future<void> answered =
      session->add([left, key = left_key(rank)](c10d::Store& store) { *left = store.check({key}); });
  answered.wait_for(kStorePatience);
  return *left;
}

void FailureBoard::raise_if_failed() {
  const std::shared_ptr<Session> session = this->session();
  if (!session->failed.load(std::memory_order_acquire)) return;
  Failure failure;
  {
    const std::lock_guard<std::mutex> lock(session->mutex);
    failure = session->first;
  }
  const std::string message = failure.rank == session->rank || failure.rank < 0
                                  ? failure.message
                                  : JobRanks::instance().name(failure.rank) + " reports: " + failure.message;
  raise_comm_error(failure.kind, message);
}

void FailureBoard::clear(const std::function<bool(const std::string&)>& is_over) {
  const std::shared_ptr<Session> session = this->session();
  std::unique_lock<std::mutex> lock(session->mutex);
  if (!session->failed.load() && session->watched) {
    // Another rank may have failed without this one having seen it yet.
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
