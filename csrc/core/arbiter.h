// Decides which chunk leaves this process next. Every group offers its chunks to the process's one Arbiter,
// which sends the most urgent class first. An urgent chunk therefore waits for at most the few that are
// already on their way, never for a whole bucket.
//
//     lane     chunks of one flight to one neighbour, in order; its head may leave when it is `ready`
//     window   sent to one destination host and not yet acknowledged: at most `kWindowChunks` chunks
//     class    tp before cp before pp before dp before checkpoint; within a class the lower `within`,
//              then first come first served
//     ageing   a head that has waited long moves up one class at a time, so nothing starves
//
// The Arbiter's thread waits for nothing but its own work. A lane offers a chunk only after the receiver has
// said that its memory is ready, so only the network decides when a send ends. This rules out deadlock;
// docs/explanation/transport.md has the argument.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/ledger/traffic.h"

namespace pyruntime {

// Chunks on their way to one destination. Only the Arbiter's thread touches it.
struct SendWindow {
  int chunks = 0;
  int64_t bytes = 0;
  double chunk_seconds = 0;  // running mean of the time from leaving to being acknowledged
};

// The cost of sending between neighbours: latency_s + bytes * seconds_per_byte, in seconds.
struct LinkCost {
  double latency_s = 100e-6;
  double seconds_per_byte = 1e-9;
};

class Lane {
 public:
  virtual ~Lane() = default;
  // The Arbiter's thread calls all of these.
  virtual TrafficClass traffic_class() const = 0;
  // The lane's place within its class: lower leaves first.
  virtual int within() const { return 0; }
  virtual SendWindow& window() = 0;
  // Whether the next chunk may leave now.
  virtual bool ready() = 0;
  virtual int64_t bytes() const = 0;
  // Starts sending the next chunk. Must not block.
  virtual void send() = 0;
  // Whether nothing is left to send, or never will be.
  virtual bool done() = 0;
  // Whether `ready` reads memory that another process writes without announcing it to this one.
  virtual bool needs_polling() { return false; }
};

// The figures of one class since the start.
struct TrafficFigures {
  int64_t chunks = 0;   // chunks that left
  int64_t arrived = 0;  // chunks that left and were acknowledged
  int64_t bytes = 0;
  double queued_s = 0;                 // from being ready to leaving, summed over chunks
  double transfer_s = 0;               // from leaving to being acknowledged, summed over chunks
  std::deque<double> recent_queued_s;  // of the last kRecentChunks chunks
  std::deque<double> recent_transfer_s;
};

class Arbiter {
 public:
  enum class Policy {
    kPriority,  // as above
    kFifo,      // in the order in which lanes were added, whatever their class: for comparison
  };

  Arbiter();
  ~Arbiter();
  Arbiter(const Arbiter&) = delete;
  Arbiter& operator=(const Arbiter&) = delete;

  // This process's Arbiter; its thread starts with the first use.
  static Arbiter& instance();

  void add(std::shared_ptr<Lane> lane);
  // After this returns, the lane is not touched any more. Not for the Arbiter's own thread.
  void remove(const std::shared_ptr<Lane>& lane);

  // Something that a lane's `ready` reads has changed. Any thread; cheap.
  void wake();

  // Calls `on_readable` from the Arbiter's thread whenever `fd` can be read, until it returns false or
  // forget() has returned.
  void listen(int fd, std::function<bool()> on_readable);
  void forget(int fd);

  // A chunk that left `seconds` ago has arrived. Arbiter's thread only.
  void acknowledge(TrafficClass traffic_class, SendWindow& window, int64_t bytes, double seconds);

  // A chunk that left will not be acknowledged: its group is closed. Not for the Arbiter's own thread.
  void give_up(SendWindow& window, int64_t bytes);

  // The window of a destination; lives as long as the Arbiter.
  SendWindow& window_to(const std::string& host);

  // Allows that many bytes on their way to one destination, also in more than kWindowChunks chunks; never
  // lowered.
  void ensure_window_bytes(int64_t bytes);
  void set_policy(Policy policy);

  // The measured cost between hosts: links belong to the process, groups share them.
  std::optional<LinkCost> known_cost(const std::string& hosts);
  void remember_cost(const std::string& hosts, const LinkCost& cost);

  std::map<TrafficClass, TrafficFigures> figures();
  void reset_figures();

  static constexpr int kWindowChunks = 2;
  static constexpr size_t kRecentChunks = 4096;

 private:
  struct Entry {
    std::shared_ptr<Lane> lane;
    uint64_t sequence;
    double ready_since = 0;  // 0: the head is not ready
  };

  void run();
  // Sends what may leave now; returns whether some lane must be looked at again soon.
  bool dispatch();
  Entry* next_to_leave(double now);
  // Lower leaves first.
  std::pair<int64_t, int> rank_of(const Entry& entry, double now) const;
  bool fits(const Entry& entry) const;
  void sleep(bool poll_soon);

  // The thread holds it through a round, callbacks and lanes included, but not while it sleeps. A caller that
  // holds a lock which a lane takes must therefore not call in here.
  std::mutex mutex_;
  std::deque<Entry> entries_;
  uint64_t last_sequence_ = 0;
  std::map<int, std::function<bool()>> listeners_;
  std::map<std::string, std::unique_ptr<SendWindow>> windows_;
  std::map<std::string, LinkCost> costs_;
  int64_t window_bytes_ = 0;
  Policy policy_ = Policy::kPriority;
  std::map<TrafficClass, TrafficFigures> figures_;
  bool stopping_ = false;
  int wake_fd_;
  std::atomic<bool> woken_{false};
  std::thread thread_;
};

}  // namespace pyruntime
