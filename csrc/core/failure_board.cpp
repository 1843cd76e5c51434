#include "core/failure_board.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace pyruntime {

namespace {

// Often enough for a failure to reach all ranks well within a second; a job of thousands looks less often, to
// spare the one process that serves the store.
std::chrono::milliseconds period_of(int world_size) {
  return std::chrono::milliseconds(std::clamp(world_size / 8, 100, 500));
}

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

  int64_t number = 0;  // how often this rank has joined a job on this store

  std::string key() const {
    return "pyruntime/failure/" + std::to_string(number) + "/" + std::to_string(generation);
  }
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

void FailureBoard::join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size) {
  if (session()->store == store) return;
  leave();
  auto made = std::make_shared<Session>();
  made->store = store;
  made->own = store->clone();
  made->number = store->add("pyruntime/joined/" + std::to_string(rank), 1);
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

void FailureBoard::watch(const std::shared_ptr<Session>& session) {
  pthread_setname_np(pthread_self(), "pyr-failures");
  const auto period = period_of(session->world_size);
  std::unique_lock<std::mutex> lock(session->mutex);
  while (!session->leaving) {
    session->changed.wait_for(
        lock, period, [&] { return session->leaving || session->to_post.has_value() || session->look_now; });
    if (session->leaving) break;
    session->look_now = false;
    const std::string key = session->key();
    const uint64_t generation = session->generation;
    const std::optional<Failure> posting = std::exchange(session->to_post, std::nullopt);
    std::optional<Failure> found;
    bool reached = true;
    lock.unlock();
    try {
      if (posting) {
        found = decode(session->own->compareSet(key, {}, encode(*posting)));
      } else if (session->own->check({key})) {
        found = decode(session->own->get(key));
      }
    } catch (const std::exception&) {
      // The store's process is gone: the job is ending, and waits end by what they see themselves.
      reached = false;
    }
    lock.lock();
    ++session->looks;
    if (found && generation == session->generation && !session->failed.load()) {
      session->first = *found;
      session->failed.store(true, std::memory_order_release);
    }
    session->changed.notify_all();
    if (!reached) break;
  }
  session->watched = false;
  session->changed.notify_all();
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
