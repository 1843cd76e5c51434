#include "core/arbiter.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "core/deadline.h"
#include "core/host_process.h"

namespace pyruntime {

namespace {

// A waiting head moves up one class after this many chunk times, but not before kAgeSeconds.
constexpr double kAgeChunks = 16;
constexpr double kAgeSeconds = 20e-3;
constexpr double kLatestWeight = 0.2;  // of the latest chunk, in the running mean of chunk times
constexpr long kPollNanoseconds = 100'000;

void keep_recent(std::deque<double>& recent, double seconds) {
  recent.push_back(seconds);
  if (recent.size() > Arbiter::kRecentChunks) recent.pop_front();
}

}  // namespace

Arbiter& Arbiter::instance() {
  static auto* arbiter = new Arbiter();  // never destroyed: its thread may outlive static destructors
  return *arbiter;
}

Arbiter::Arbiter() : wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  TORCH_CHECK(wake_fd_ >= 0, "The arbiter cannot open an eventfd (errno ", errno,
              "); raise the limit of open files (ulimit -n).");
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "pyr-arbiter");
}

Arbiter::~Arbiter() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
  close(wake_fd_);
}

void Arbiter::add(std::shared_ptr<Lane> lane) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back({std::move(lane), ++last_sequence_});
  }
  wake();
}

void Arbiter::remove(const std::shared_ptr<Lane>& lane) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(entries_, [&](const Entry& entry) { return entry.lane == lane; });
}

void Arbiter::wake() {
  if (woken_.exchange(true)) return;
  const uint64_t one = 1;
  // It fails only when the counter is full, and then the thread is awake anyway.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void Arbiter::listen(int fd, std::function<bool()> on_readable) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    listeners_[fd] = std::move(on_readable);
  }
  wake();
}

void Arbiter::forget(int fd) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    listeners_.erase(fd);
  }
  wake();
}

void Arbiter::acknowledge(TrafficClass traffic_class, SendWindow& window, int64_t bytes, double seconds) {
  --window.chunks;
  window.bytes -= bytes;
  window.chunk_seconds = window.chunk_seconds == 0
                             ? seconds
                             : (1 - kLatestWeight) * window.chunk_seconds + kLatestWeight * seconds;
  TrafficFigures& figures = figures_[traffic_class];
  figures.transfer_s += seconds;
  ++figures.arrived;
  keep_recent(figures.recent_transfer_s, seconds);
}

void Arbiter::give_up(SendWindow& window, int64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --window.chunks;
    window.bytes -= bytes;
  }
  wake();
}

SendWindow& Arbiter::window_to(const std::string& host) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& window = windows_[host];
  if (!window) window = std::make_unique<SendWindow>();
  return *window;
}

void Arbiter::ensure_window_bytes(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  window_bytes_ = std::max(window_bytes_, bytes);
}

std::optional<LinkCost> Arbiter::known_cost(const std::string& hosts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = costs_.find(hosts);
  return found == costs_.end() ? std::nullopt : std::optional(found->second);
}

void Arbiter::remember_cost(const std::string& hosts, const LinkCost& cost) {
  const std::lock_guard<std::mutex> lock(mutex_);
  costs_[hosts] = cost;
}

void Arbiter::set_policy(Policy policy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  policy_ = policy;
}

std::map<TrafficClass, TrafficFigures> Arbiter::figures() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return figures_;
}

void Arbiter::reset_figures() {
  const std::lock_guard<std::mutex> lock(mutex_);
  figures_.clear();
}

void Arbiter::run() {
  make_this_thread_prompt();
  bool poll_soon = false;
  while (true) {
    sleep(poll_soon);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    std::vector<pollfd> fds;
    for (const auto& [fd, callback] : listeners_) fds.push_back({fd, POLLIN, 0});
    if (!fds.empty() && poll(fds.data(), fds.size(), 0) > 0) {
      for (const pollfd& fd : fds) {
        if (fd.revents == 0) continue;
        if (!listeners_[fd.fd]()) listeners_.erase(fd.fd);
      }
    }
    poll_soon = dispatch();
  }
}

void Arbiter::sleep(bool poll_soon) {
  std::vector<pollfd> fds{{wake_fd_, POLLIN, 0}};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [fd, callback] : listeners_) fds.push_back({fd, POLLIN, 0});
  }
  const timespec soon{0, kPollNanoseconds};
  ppoll(fds.data(), fds.size(), poll_soon ? &soon : nullptr, nullptr);
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof(count));
  // After the counter was emptied and before anything is looked at: a change from here on wakes the thread
  // once more. An exchange, because a store might be performed after the looks that follow it.
  woken_.exchange(false);
}

bool Arbiter::dispatch() {
  std::erase_if(entries_, [](const Entry& entry) { return entry.lane->done(); });
  while (true) {
    const double now = monotonic_seconds();
    Entry* entry = next_to_leave(now);
    if (entry == nullptr) break;
    Lane& lane = *entry->lane;
    const int64_t bytes = lane.bytes();
    SendWindow& window = lane.window();
    TrafficFigures& figures = figures_[lane.traffic_class()];
    ++figures.chunks;
    figures.bytes += bytes;
    const double queued = now - entry->ready_since;
    figures.queued_s += queued;
    keep_recent(figures.recent_queued_s, queued);
    ++window.chunks;
    window.bytes += bytes;
    entry->ready_since = 0;
    lane.send();
  }
  return std::ranges::any_of(entries_, [](const Entry& entry) {
    return entry.ready_since == 0 && !entry.lane->done() && entry.lane->needs_polling();
  });
}

// A head whose window is full also holds back less urgent ones for other destinations: they share this host's
// link.
Arbiter::Entry* Arbiter::next_to_leave(double now) {
  Entry* first = nullptr;
  for (Entry& entry : entries_) {
    if (entry.ready_since == 0) {
      if (entry.lane->done() || !entry.lane->ready()) continue;
      entry.ready_since = now;
    }
    if (first == nullptr || rank_of(entry, now) < rank_of(*first, now)) first = &entry;
  }
  if (first == nullptr || fits(*first)) return first;
  // Another destination of the same class may have an open window.
  for (Entry& entry : entries_) {
    if (entry.ready_since != 0 && fits(entry) && rank_of(entry, now) == rank_of(*first, now)) return &entry;
  }
  return nullptr;
}

std::pair<int64_t, int> Arbiter::rank_of(const Entry& entry, double now) const {
  if (policy_ == Policy::kFifo) return {static_cast<int64_t>(entry.sequence), 0};
  const double step = std::max(kAgeSeconds, kAgeChunks * entry.lane->window().chunk_seconds);
  const auto classes_up = static_cast<int64_t>((now - entry.ready_since) / step);
  return {static_cast<int64_t>(entry.lane->traffic_class()) - classes_up, entry.lane->within()};
}

bool Arbiter::fits(const Entry& entry) const {
  const SendWindow& window = entry.lane->window();
  return window.chunks < kWindowChunks || window.bytes + entry.lane->bytes() <= window_bytes_;
}

}  // namespace pyruntime
