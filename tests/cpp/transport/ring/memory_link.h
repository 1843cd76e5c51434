// A PointToPoint within one process: what one rank sends is copied into the memory that another receives
// into, at once, after a random while, or when the test says so. It keeps the promises of a network and no
// others: memory is read and written until a transfer is done or its PendingTransfer is gone, and what was
// sent under different tags arrives in any order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/ring/point_to_point.h"

namespace ring_test {

// One direction between two ranks. Each has a lock of its own, so that the lock orders no more than a
// network does: the thread sanitizer would not see a race that a common lock hides.
class Channel {
 public:
  using Clock = std::chrono::steady_clock;

  Channel(double most_delay_seconds, unsigned seed) : most_delay_(most_delay_seconds), random_(seed) {
    courier_ = std::thread([this] { carry(); });
  }
  ~Channel() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    courier_.join();
  }

  pyruntime::PendingTransfer add(bool sends, char* memory, int64_t bytes, int tag) {
    const auto transfer = std::make_shared<Transfer>(Transfer{memory, bytes});
    const std::lock_guard<std::mutex> lock(mutex_);
    if (severed_ && sends) throw std::runtime_error("the link is cut");
    auto& own = (sends ? sends_ : receives_)[tag];
    auto& other = (sends ? receives_ : sends_)[tag];
    if (other.empty()) {
      own.push_back(transfer);
    } else {
      Match match{transfer, other.front()};
      if (!sends) std::swap(match.send, match.receive);
      other.pop_front();
      if (most_delay_ == 0 && !held_) {
        deliver(match);
      } else {
        std::uniform_real_distribution<double> seconds(0, most_delay_);
        const std::chrono::duration<double> delay(seconds(random_));
        due_.emplace(Clock::now() + std::chrono::duration_cast<Clock::duration>(delay), match);
        changed_.notify_all();
      }
    }
    return c10::make_intrusive<Pending>(*this, transfer);
  }

  // While it is held nothing arrives.
  void hold(bool held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

  // From now on sends throw and so does who waits.
  void sever() {
    const std::lock_guard<std::mutex> lock(mutex_);
    severed_ = true;
    changed_.notify_all();
  }

  // Sends that have not arrived.
  int on_the_way() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    int count = static_cast<int>(due_.size());
    for (const auto& [tag, waiting] : sends_) count += static_cast<int>(waiting.size());
    return count;
  }

 private:
  struct Transfer {
    char* memory;
    int64_t bytes;
    bool done = false;
    bool aborted = false;
    bool gone = false;  // nobody may touch the memory any more
  };
  struct Match {
    std::shared_ptr<Transfer> send;
    std::shared_ptr<Transfer> receive;
  };

  class Pending : public c10d::Work {
   public:
    Pending(Channel& channel, std::shared_ptr<Transfer> transfer)
        : channel_(channel), transfer_(std::move(transfer)) {}
    ~Pending() override {
      const std::lock_guard<std::mutex> lock(channel_.mutex_);
      transfer_->gone = true;
    }
    bool wait(std::chrono::milliseconds timeout) override {
      std::unique_lock<std::mutex> lock(channel_.mutex_);
      const auto over = [&] { return transfer_->done || transfer_->aborted || channel_.severed_; };
      if (!channel_.changed_.wait_for(lock, timeout, over)) throw std::runtime_error("nothing came");
      if (!transfer_->done && !transfer_->aborted) throw std::runtime_error("the link is cut");
      return transfer_->done;
    }
    // As a network's: it ends the wait, not the transfer.
    void abort() override {
      const std::lock_guard<std::mutex> lock(channel_.mutex_);
      transfer_->aborted = true;
      channel_.changed_.notify_all();
    }

   private:
    Channel& channel_;
    std::shared_ptr<Transfer> transfer_;
  };

  // Under the lock.
  void deliver(const Match& match) {
    if (match.send->gone || match.receive->gone) return;
    EXPECT_EQ(match.send->bytes, match.receive->bytes);
    std::memcpy(match.receive->memory, match.send->memory, static_cast<size_t>(match.send->bytes));
    match.send->done = match.receive->done = true;
    changed_.notify_all();
  }

  void carry() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closing_) {
      if (held_ || due_.empty()) {
        changed_.wait(lock);
      } else if (due_.begin()->first > Clock::now()) {
        changed_.wait_until(lock, due_.begin()->first);
      } else {
        const Match match = due_.begin()->second;
        due_.erase(due_.begin());
        deliver(match);
      }
    }
  }

  double most_delay_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::map<int, std::deque<std::shared_ptr<Transfer>>> sends_;  // unmatched, by tag
  std::map<int, std::deque<std::shared_ptr<Transfer>>> receives_;
  std::multimap<Clock::time_point, Match> due_;
  bool held_ = false;
  bool severed_ = false;
  bool closing_ = false;
  std::thread courier_;
};

// The channels between all ranks.
class Network {
 public:
  Network(int ranks, double most_delay_seconds) : ranks_(ranks) {
    for (int i = 0; i < ranks * ranks; ++i) {
      channels_.push_back(std::make_unique<Channel>(most_delay_seconds, static_cast<unsigned>(i)));
    }
  }
  Channel& between(int from, int to) { return *channels_[from * ranks_ + to]; }
  void hold_all(bool held) {
    for (const auto& channel : channels_) channel->hold(held);
  }
  int on_the_way_from(int rank) {
    int count = 0;
    for (int peer = 0; peer < ranks_; ++peer) count += between(rank, peer).on_the_way();
    return count;
  }

 private:
  int ranks_;
  std::vector<std::unique_ptr<Channel>> channels_;
};

// The network as one rank sees it.
class MemoryLink : public pyruntime::PointToPoint {
 public:
  MemoryLink(Network& network, int rank) : network_(network), rank_(rank) {}

  pyruntime::PendingTransfer send(const void* data, int64_t bytes, int peer, int tag) override {
    return network_.between(rank_, peer).add(true, static_cast<char*>(const_cast<void*>(data)), bytes, tag);
  }
  pyruntime::PendingTransfer receive(void* data, int64_t bytes, int peer, int tag) override {
    return network_.between(peer, rank_).add(false, static_cast<char*>(data), bytes, tag);
  }
  std::string name() const override { return "memory"; }

 private:
  Network& network_;
  int rank_;
};

}  // namespace ring_test
