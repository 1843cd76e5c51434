// A ring whose ranks are threads of this process, each with an Arbiter of its own.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/job/failure_board.h"
#include "transport/ring/memory_link.h"
#include "transport/ring/ring.h"

namespace ring_test {

using pyruntime::CommErrorKind;

inline constexpr const char* kGroup = "ring";

// What the ranks of one host share, when they are threads: memory and flags of every slot.
class SharedHost {
 public:
  static constexpr int64_t kSlotBytes = 1 << 20;

  SharedHost(int ranks, int flags) : ranks_(ranks) {
    for (auto& slot : slots_) {
      for (int rank = 0; rank < ranks; ++rank) slot.emplace_back(flags);
    }
  }

 private:
  friend class SharedWorkspace;
  friend class SharedFlight;
  struct Part {  // one rank's of a slot
    explicit Part(int flags) : ready(flags), memory(kSlotBytes) {}
    std::vector<std::atomic<uint64_t>> ready;
    std::vector<char> memory;
    std::atomic<uint64_t> begun{0};
    std::atomic<uint64_t> finished{0};
  };
  int ranks_;
  std::array<std::deque<Part>, pyruntime::kSlots> slots_;
};

class SharedFlight : public pyruntime::HostFlight {
 public:
  SharedFlight(SharedHost& host, int rank, uint64_t number, const pyruntime::FlightDescriptor& descriptor)
      : slot_(host.slots_[number % pyruntime::kSlots]),
        rank_(rank),
        number_(number),
        descriptor_(descriptor) {}
  uint64_t number() const override { return number_; }
  char* memory(int peer) override { return slot_[peer].memory.data(); }
  void publish(int flag) override { slot_[rank_].ready[flag].store(number_, std::memory_order_release); }
  bool ready(int peer, int flag) const override {
    return slot_[peer].ready[flag].load(std::memory_order_acquire) >= number_;
  }
  const pyruntime::FlightDescriptor& rendezvous(int peer) override {
    const auto begun = [&] { return slot_[peer].begun.load() >= number_; };
    await(begun, "begin");
    return descriptor_;
  }
  void wait(int /*peer*/, int /*flag*/) override {}
  void finish() override { slot_[rank_].finished.store(number_, std::memory_order_release); }

  static void await(const std::function<bool()>& condition, const char* what) {
    if (pyruntime::wait_until(condition, 30.0, [] {})) return;
    throw std::runtime_error(std::string("a rank of this host did not ") + what + " a flight");
  }

 private:
  std::deque<SharedHost::Part>& slot_;
  int rank_;
  uint64_t number_;
  pyruntime::FlightDescriptor descriptor_;
};

class SharedWorkspace : public pyruntime::HostWorkspace {
 public:
  SharedWorkspace(std::shared_ptr<SharedHost> host, int rank) : host_(std::move(host)), rank_(rank) {}
  std::unique_ptr<pyruntime::HostFlight> begin(const pyruntime::FlightDescriptor& descriptor,
                                               int64_t bytes) override {
    EXPECT(bytes <= SharedHost::kSlotBytes);
    const uint64_t number = ++last_number_;
    auto& slot = host_->slots_[number % pyruntime::kSlots];
    const auto free = [&] {
      for (const auto& part : slot) {
        if (part.finished.load(std::memory_order_acquire) + pyruntime::kSlots < number) return false;
      }
      return true;
    };
    if (number > pyruntime::kSlots) SharedFlight::await(free, "finish");
    slot[rank_].begun.store(number);
    return std::make_unique<SharedFlight>(*host_, rank_, number, descriptor);
  }
  int64_t bytes() const override { return pyruntime::kSlots * SharedHost::kSlotBytes; }

 private:
  std::shared_ptr<SharedHost> host_;
  int rank_;
  uint64_t last_number_ = 0;
};

// Gives the largest of the ranks' values to all of them.
class Agreement {
 public:
  explicit Agreement(int ranks) : ranks_(ranks) {}
  std::vector<double> agree(const std::vector<double>& own) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (come_ == 0) coming_ = own;
    for (size_t i = 0; i < own.size(); ++i) coming_[i] = std::max(coming_[i], own[i]);
    if (++come_ == ranks_) {
      agreed_ = coming_;
      come_ = 0;
      ++round_;
      changed_.notify_all();
      return agreed_;
    }
    const int before = round_;
    changed_.wait(lock, [&] { return round_ > before; });
    return agreed_;  // the next round ends only when this rank has come to it
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int come_ = 0;
  int round_ = 0;
  std::vector<double> coming_;
  std::vector<double> agreed_;
};

struct Setup {
  int ranks = 2;
  int ranks_per_host = 1;
  pyruntime::RingOptions options{256, c10::ScalarType::Undefined};
  double deadline_seconds = 30.0;
  double most_delay_seconds = 0.0;  // of the network
};

// What one thread is given to be a rank.
class Member {
 public:
  Member(const Setup& setup, int rank, int opening, Network& network, pyruntime::Arbiter& arbiter,
         std::map<int, std::shared_ptr<pyruntime::ControlLine>> lines, std::shared_ptr<SharedHost> host,
         Agreement& agreement)
      : context{kGroup, rank, setup.ranks, setup.deadline_seconds, pyruntime::TrafficClass::kTp, {}},
        setup_(setup),
        opening_(opening),
        network_(network),
        arbiter_(arbiter),
        lines_(std::move(lines)),
        host_(std::move(host)),
        agreement_(agreement) {
    context.process_group = kGroup;
    for (const auto& [peer, line] : lines_) line_fds_.push_back(line->fd());
  }

  static pyruntime::HostLayout layout_of(const Setup& setup, int rank) {
    std::vector<std::string> names;
    for (int peer = 0; peer < setup.ranks; ++peer) {
      names.push_back("host" + std::to_string(peer / setup.ranks_per_host));
    }
    return pyruntime::HostLayout(names, rank);
  }

  int rank() const { return context.rank; }
  int ranks() const { return context.world_size; }
  int ranks_per_host() const { return setup_.ranks_per_host; }
  Network& network() { return network_; }
  pyruntime::Arbiter& arbiter() { return arbiter_; }

  // Made with the first use.
  pyruntime::Transport& transport() {
    if (!transport_) open();
    return *transport_;
  }

  void close() {
    if (transport_) transport_->flush();
    transport_.reset();
  }

  // As when this rank's process ends: its connections close, and it has not said goodbye.
  void vanish() {
    for (const int fd : line_fds_) shutdown(fd, SHUT_RDWR);
  }

  pyruntime::GroupContext context;

 private:
  void open() {
    const pyruntime::HostLayout layout = layout_of(setup_, rank());
    std::vector<std::string> names;
    for (int host = 0; host < layout.hosts(); ++host) names.push_back("host" + std::to_string(host));
    const int flags = pyruntime::ring_flags(ranks(), layout.hosts());
    std::unique_ptr<pyruntime::HostWorkspace> workspace;
    if (host_) {
      workspace = std::make_unique<SharedWorkspace>(host_, layout.local_rank());
    } else {
      workspace = pyruntime::make_private_workspace(context, flags);
    }
    transport_ = make_ring_transport(
        context,
        {layout, names, std::move(workspace), std::make_shared<MemoryLink>(network_, rank()),
         std::move(lines_), &arbiter_, opening_},
        setup_.options, [this](const std::vector<double>& own) { return agreement_.agree(own); });
  }

  const Setup& setup_;
  int opening_;
  Network& network_;
  pyruntime::Arbiter& arbiter_;
  std::map<int, std::shared_ptr<pyruntime::ControlLine>> lines_;
  std::vector<int> line_fds_;
  std::shared_ptr<SharedHost> host_;
  Agreement& agreement_;
  std::unique_ptr<pyruntime::Transport> transport_;
};

// The network and the ranks' arbiters, which outlive a group that is closed and opened again.
class RingOfThreads {
 public:
  explicit RingOfThreads(const Setup& setup)
      : setup_(setup), network_(setup.ranks, setup.most_delay_seconds), agreement_(setup.ranks) {
    for (int rank = 0; rank < setup.ranks; ++rank) {
      arbiters_.push_back(std::make_unique<pyruntime::Arbiter>());
    }
  }

  // Opens the group, runs body(member) in a thread for each rank and closes the group.
  void run(const std::function<void(Member&)>& body) {
    const auto layout = [&](int rank) { return Member::layout_of(setup_, rank); };
    std::vector<std::map<int, std::shared_ptr<pyruntime::ControlLine>>> lines(setup_.ranks);
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      for (const int peer : pyruntime::ring_neighbours(layout(rank))) {
        if (peer < rank) continue;
        int ends[2] = {-1, -1};
        EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
        using pyruntime::ControlLine;
        lines[rank][peer] = std::make_shared<ControlLine>(pyruntime::UniqueFd(ends[0]));
        lines[peer][rank] = std::make_shared<ControlLine>(pyruntime::UniqueFd(ends[1]));
      }
    }
    std::map<int, std::shared_ptr<SharedHost>> hosts;
    if (setup_.ranks_per_host > 1) {
      for (int host = 0; host < layout(0).hosts(); ++host) {
        hosts[host] = std::make_shared<SharedHost>(setup_.ranks_per_host,
                                                   pyruntime::ring_flags(setup_.ranks, layout(0).hosts()));
      }
    }
    ++openings_;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          Member member(setup_, rank, openings_, network_, *arbiters_[rank], std::move(lines[rank]),
                        setup_.ranks_per_host > 1 ? hosts.at(layout(rank).host()) : nullptr, agreement_);
          body(member);
          member.close();
        } catch (const std::exception& error) {
          check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + " ended with: " + error.what());
        }
      });
    }
    for (auto& thread : threads) thread.join();
    pyruntime::FailureBoard::instance().clear([](const std::string& group) { return group == kGroup; });
  }

  Network& network() { return network_; }
  void set_deadline_seconds(double seconds) { setup_.deadline_seconds = seconds; }

 private:
  Setup setup_;
  Network network_;
  Agreement agreement_;
  std::vector<std::unique_ptr<pyruntime::Arbiter>> arbiters_;
  int openings_ = 0;
};

// The failure that `work` met; nullopt where it met none.
inline std::optional<pyruntime::CommError> failure_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const pyruntime::CommError& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace ring_test
