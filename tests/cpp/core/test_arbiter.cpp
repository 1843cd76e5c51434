#include <atomic>
#include <barrier>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "check.h"
#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/host_process.h"
#include "core/ledger/traffic.h"

namespace {

using pyruntime::Arbiter;
using pyruntime::Lane;
using pyruntime::monotonic_seconds;
using pyruntime::SendWindow;
using pyruntime::TrafficClass;
using pyruntime::TrafficFigures;

constexpr double kDeadlineSeconds = 20.0;
constexpr int kMany = 1 << 20;

template <typename Condition>
bool eventually(const Condition& condition) {
  return pyruntime::wait_until(condition, kDeadlineSeconds, [] {});
}

void nap(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// An eventfd that counts down one at a time.
class Bell {
 public:
  Bell() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE)) {}
  int fd() const { return fd_.get(); }
  void ring() {
    const uint64_t one = 1;
    EXPECT_EQ(write(fd(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
  void quiet() {
    uint64_t count;
    EXPECT_EQ(read(fd(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  }

 private:
  pyruntime::UniqueFd fd_;
};

// An Arbiter, and a way to do things in its thread.
class Office {
 public:
  Office() {
    arbiter.listen(bell_.fd(), [this] {
      bell_.quiet();
      std::function<void()> work;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        work = std::exchange(work_, nullptr);
      }
      work();
      const std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      changed_.notify_all();
      return true;
    });
  }
  ~Office() { arbiter.forget(bell_.fd()); }

  // Does `work` in the Arbiter's thread; returns when the thread has done it and has looked at all lanes
  // since.
  void in_its_thread(std::function<void()> work) {
    post(std::move(work));
    post([] {});  // its thread comes to this one after the round of the first
  }

  Arbiter arbiter;

 private:
  void post(std::function<void()> work) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = std::move(work);
    const int before = done_;
    bell_.ring();
    EXPECT(changed_.wait_for(lock, std::chrono::duration<double>(kDeadlineSeconds),
                             [&] { return done_ > before; }));
  }

  Bell bell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;
  int done_ = 0;
};

// Names of the lanes in the order in which chunks left.
class Log {
 public:
  void add(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ += (text_.empty() ? "" : " ") + name;
  }
  std::string text() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

class FakeLane : public Lane {
 public:
  FakeLane(std::string name, TrafficClass traffic_class, SendWindow& window, Log& log, int64_t bytes = 1000)
      : name_(std::move(name)), traffic_class_(traffic_class), window_(window), log_(log), bytes_(bytes) {}

  TrafficClass traffic_class() const override { return traffic_class_; }
  SendWindow& window() override { return window_; }
  bool ready() override {
    ++looks;
    return sent.load() < may_leave.load();
  }
  int64_t bytes() const override { return bytes_; }
  void send() override {
    log_.add(name_);
    ++sent;
  }
  bool done() override { return sent.load() >= chunks.load(); }
  bool needs_polling() override { return polled.load(); }
  int within() const override { return place.load(); }

  std::atomic<int> place{0};
  std::atomic<int> chunks{kMany};
  std::atomic<int> may_leave{0};
  std::atomic<int> sent{0};
  std::atomic<int> looks{0};
  std::atomic<bool> polled{false};

 private:
  std::string name_;
  TrafficClass traffic_class_;
  SendWindow& window_;
  Log& log_;
  int64_t bytes_;
};

// Makes lanes for an office; any number of small chunks may be on its way.
class Lanes {
 public:
  explicit Lanes(Office& office, int64_t window_bytes = kMany) : office_(office) {
    office.arbiter.ensure_window_bytes(window_bytes);
  }
  ~Lanes() {
    for (const auto& lane : lanes_) office_.arbiter.remove(lane);
  }
  std::shared_ptr<FakeLane> add(const std::string& name, TrafficClass traffic_class,
                                const std::string& host = "there", int64_t bytes = 1000) {
    lanes_.push_back(
        std::make_shared<FakeLane>(name, traffic_class, office_.arbiter.window_to(host), log, bytes));
    office_.arbiter.add(lanes_.back());
    return lanes_.back();
  }

  Log log;

 private:
  Office& office_;
  std::vector<std::shared_ptr<FakeLane>> lanes_;
};

// --- who leaves first

TEST(the_most_urgent_class_leaves_first) {
  Office office;
  Lanes lanes(office);
  const std::vector all{lanes.add("checkpoint", TrafficClass::kCheckpoint),
                        lanes.add("pp", TrafficClass::kPp), lanes.add("dp", TrafficClass::kDp),
                        lanes.add("cp", TrafficClass::kCp), lanes.add("tp", TrafficClass::kTp)};
  office.in_its_thread([&] {
    for (const auto& lane : all) lane->may_leave = 2;
  });
  EXPECT_EQ(lanes.log.text(), "tp tp cp cp pp pp dp dp checkpoint checkpoint");
}

TEST(within_a_class_lanes_leave_in_the_order_in_which_they_came) {
  Office office;
  Lanes lanes(office);
  const std::vector all{lanes.add("first", TrafficClass::kDp), lanes.add("second", TrafficClass::kDp),
                        lanes.add("third", TrafficClass::kDp)};
  office.in_its_thread([&] {
    for (const auto& lane : all) lane->may_leave = 2;
  });
  EXPECT_EQ(lanes.log.text(), "first first second second third third");
}

TEST(a_lane_has_a_place_within_its_class_and_never_beside_another) {
  Office office;
  Lanes lanes(office);
  const std::vector all{lanes.add("last", TrafficClass::kDp), lanes.add("middle", TrafficClass::kDp),
                        lanes.add("first", TrafficClass::kDp), lanes.add("pp", TrafficClass::kPp),
                        lanes.add("checkpoint", TrafficClass::kCheckpoint)};
  const std::vector places{1, 0, -1, 9, -9};
  for (size_t i = 0; i < all.size(); ++i) all[i]->place = places[i];
  office.in_its_thread([&] {
    for (const auto& lane : all) lane->may_leave = 2;
  });
  EXPECT_EQ(lanes.log.text(), "pp pp first first middle middle last last checkpoint checkpoint");
}

TEST(a_lane_that_is_not_ready_holds_nothing_up) {
  Office office;
  Lanes lanes(office);
  const auto urgent = lanes.add("urgent", TrafficClass::kTp);
  const auto other = lanes.add("other", TrafficClass::kCheckpoint);
  office.in_its_thread([&] { other->may_leave = 2; });
  EXPECT_EQ(lanes.log.text(), "other other");
}

TEST(the_fifo_policy_knows_no_classes) {
  Office office;
  Lanes lanes(office);
  office.arbiter.set_policy(Arbiter::Policy::kFifo);
  const std::vector all{lanes.add("checkpoint", TrafficClass::kCheckpoint),
                        lanes.add("dp", TrafficClass::kDp), lanes.add("tp", TrafficClass::kTp),
                        lanes.add("pp", TrafficClass::kPp)};
  office.in_its_thread([&] {
    for (const auto& lane : all) lane->may_leave = 1;
  });
  EXPECT_EQ(lanes.log.text(), "checkpoint dp tp pp");
}

// --- the window

TEST(only_so_many_chunks_leave_before_one_is_acknowledged) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  SendWindow& window = office.arbiter.window_to("there");
  const auto lane = lanes.add("a", TrafficClass::kTp);
  office.in_its_thread([&] { lane->may_leave = 6; });
  EXPECT_EQ(lane->sent.load(), Arbiter::kWindowChunks);
  for (int acknowledged = 1; acknowledged <= 3; ++acknowledged) {
    office.in_its_thread([&] { office.arbiter.acknowledge(TrafficClass::kTp, window, 1000, 1e-3); });
    EXPECT_EQ(lane->sent.load(), Arbiter::kWindowChunks + acknowledged);
  }
  EXPECT_EQ(window.chunks, Arbiter::kWindowChunks);
  EXPECT_EQ(window.bytes, 1000 * Arbiter::kWindowChunks);
}

TEST(small_chunks_fill_the_window_up_to_its_bytes) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/1000);
  const auto small = lanes.add("small", TrafficClass::kTp, "one", 100);
  const auto large = lanes.add("large", TrafficClass::kTp, "another", 600);
  office.in_its_thread([&] { small->may_leave = large->may_leave = 20; });
  EXPECT_EQ(small->sent.load(), 10);
  EXPECT_EQ(large->sent.load(), Arbiter::kWindowChunks);
  office.arbiter.ensure_window_bytes(500);
  office.in_its_thread([] {});
  EXPECT_EQ(small->sent.load(), 10);  // never lowered
  office.arbiter.ensure_window_bytes(1200);
  office.in_its_thread([] {});
  EXPECT_EQ(small->sent.load(), 12);
}

TEST(lanes_to_one_host_share_its_window) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  EXPECT_EQ(&office.arbiter.window_to("one"), &office.arbiter.window_to("one"));
  EXPECT(&office.arbiter.window_to("one") != &office.arbiter.window_to("another"));
  const std::vector all{lanes.add("a", TrafficClass::kTp, "one"), lanes.add("b", TrafficClass::kTp, "one"),
                        lanes.add("c", TrafficClass::kTp, "another")};
  office.in_its_thread([&] {
    for (const auto& lane : all) lane->may_leave = 5;
  });
  // The full window of the first does not keep the third, of the same class, from its own.
  EXPECT_EQ(lanes.log.text(), "a a c c");
}

TEST(an_urgent_chunk_waits_only_for_those_under_way) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  const auto bucket = lanes.add("dp", TrafficClass::kDp);
  office.in_its_thread([&] { bucket->may_leave = 100; });
  const auto urgent = lanes.add("tp", TrafficClass::kTp);
  office.in_its_thread([&] { urgent->may_leave = 1; });
  EXPECT_EQ(lanes.log.text(), "dp dp");
  office.in_its_thread([&] { office.arbiter.acknowledge(TrafficClass::kDp, bucket->window(), 1000, 1e-3); });
  EXPECT_EQ(lanes.log.text(), "dp dp tp");
}

TEST(an_urgent_chunk_that_waits_for_its_window_holds_back_less_urgent_ones_to_other_hosts) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  const auto urgent = lanes.add("tp", TrafficClass::kTp, "one");
  const auto other = lanes.add("dp", TrafficClass::kDp, "another");
  office.in_its_thread([&] { urgent->may_leave = 3, other->may_leave = 1; });
  EXPECT_EQ(lanes.log.text(), "tp tp");
  office.in_its_thread([&] { office.arbiter.acknowledge(TrafficClass::kTp, urgent->window(), 1000, 1e-3); });
  EXPECT_EQ(lanes.log.text(), "tp tp tp dp");
}

// --- nothing starves

// Chunks that arrive a while after they left, for as long as there are any.
class Traffic {
 public:
  Traffic(Office& office, double seconds_each) : office_(office), seconds_each_(seconds_each) {
    thread_ = std::thread([this] {
      SendWindow& window = office_.arbiter.window_to("there");
      while (!stopping_.load()) {
        nap(seconds_each_);
        office_.in_its_thread([&] {
          if (window.chunks > 0) office_.arbiter.acknowledge(TrafficClass::kTp, window, 1000, seconds_each_);
        });
      }
    });
  }
  ~Traffic() {
    stopping_ = true;
    thread_.join();
  }

 private:
  Office& office_;
  double seconds_each_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

TEST(the_least_urgent_class_gets_through_under_constant_urgent_load) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  const auto urgent = lanes.add("tp", TrafficClass::kTp);
  const auto patient = lanes.add("checkpoint", TrafficClass::kCheckpoint);
  office.in_its_thread([&] { urgent->may_leave = kMany, patient->may_leave = 3; });
  const double start = monotonic_seconds();
  const Traffic traffic(office, 1e-3);
  EXPECT(eventually([&] { return patient->sent.load() >= 1; }));
  // It had to wait its turn: four classes of at least 20 ms each.
  EXPECT(monotonic_seconds() - start >= 4 * 20e-3);
  EXPECT(urgent->sent.load() > 10);
  EXPECT(eventually([&] { return patient->sent.load() == 3; }));
  const auto figures = office.arbiter.figures();
  EXPECT(figures.at(TrafficClass::kCheckpoint).queued_s >= 3 * 4 * 20e-3);
}

TEST(what_has_aged_is_ranked_by_how_long_it_has_waited) {
  Office office;
  Lanes lanes(office, /*window_bytes=*/0);
  const auto full = lanes.add("full", TrafficClass::kTp);
  office.in_its_thread([&] { full->may_leave = 2; });
  const auto old = lanes.add("old", TrafficClass::kDp);
  office.in_its_thread([&] { old->may_leave = 1; });
  nap(0.3);  // more than the three classes up to tp, at 20 ms each
  const auto fresh = lanes.add("fresh", TrafficClass::kTp);
  office.in_its_thread([&] { fresh->may_leave = 1; });
  office.in_its_thread([&] { office.arbiter.acknowledge(TrafficClass::kTp, full->window(), 1000, 1e-3); });
  EXPECT_EQ(lanes.log.text(), "full full old");
}

// --- lanes come and go

// Fails when it is called after its owner was promised that it is not.
class StrictLane : public FakeLane {
 public:
  using FakeLane::FakeLane;
  bool ready() override {
    look();
    return FakeLane::ready();
  }
  bool done() override {
    look();
    return FakeLane::done();
  }
  bool needs_polling() override {
    look();
    return true;
  }
  std::atomic<bool> removed{false};
  std::atomic<int> late_looks{0};

 private:
  void look() {
    if (removed.load()) ++late_looks;
  }
};

TEST(a_removed_lane_is_not_touched_again) {
  Office office;
  Log log;
  std::atomic<bool> stopping{false};
  std::thread waker([&] {
    while (!stopping.load()) office.arbiter.wake();
  });
  for (int round = 0; round < 200; ++round) {
    const auto lane =
        std::make_shared<StrictLane>("a", TrafficClass::kTp, office.arbiter.window_to("there"), log);
    office.arbiter.add(lane);
    if (round % 2 == 0) EXPECT(eventually([&] { return lane->looks.load() > 0; }));
    office.arbiter.remove(lane);
    lane->removed = true;
    std::this_thread::yield();
    EXPECT_EQ(lane->late_looks.load(), 0);
    EXPECT_EQ(lane.use_count(), 1);
  }
  stopping = true;
  waker.join();
}

TEST(a_lane_that_is_done_is_let_go_of) {
  Office office;
  Log log;
  auto lane = std::make_shared<FakeLane>("a", TrafficClass::kTp, office.arbiter.window_to("there"), log);
  lane->chunks = 2;
  lane->may_leave = 2;
  office.arbiter.add(lane);
  const std::weak_ptr<FakeLane> seen = lane;
  lane.reset();
  EXPECT(eventually([&] {
    office.arbiter.wake();
    return seen.expired();
  }));
  EXPECT_EQ(log.text(), "a a");
}

TEST(an_arbiter_ends_with_lanes_and_listeners_still_there) {
  Log log;
  const Bell bell;
  auto arbiter = std::make_unique<Arbiter>();
  const auto lane = std::make_shared<FakeLane>("a", TrafficClass::kTp, arbiter->window_to("there"), log);
  lane->polled = true;
  arbiter->add(lane);
  arbiter->listen(bell.fd(), [] { return true; });
  EXPECT(eventually([&] { return lane->looks.load() > 3; }));
  arbiter.reset();
  EXPECT_EQ(lane.use_count(), 1);
}

// --- when lanes are looked at

TEST(a_lane_that_another_process_makes_ready_is_found_without_a_word) {
  Office office;
  Lanes lanes(office);
  const auto lane = lanes.add("a", TrafficClass::kTp);
  lane->polled = true;
  office.in_its_thread([] {});
  for (int round = 1; round <= 20; ++round) {
    lane->may_leave = round;
    EXPECT(eventually([&] { return lane->sent.load() == round; }));
  }
}

TEST(a_lane_that_announces_itself_costs_nothing_while_it_waits) {
  Office office;
  Lanes lanes(office);
  const auto lane = lanes.add("a", TrafficClass::kTp);
  office.in_its_thread([] {});
  nap(0.05);  // for the round that is still under way
  const int before = lane->looks.load();
  nap(0.05);
  EXPECT_EQ(lane->looks.load(), before);
  lane->may_leave = 1;
  office.arbiter.wake();
  EXPECT(eventually([&] { return lane->sent.load() == 1; }));
}

// Arrives as soon as it leaves.
class InstantLane : public FakeLane {
 public:
  InstantLane(Arbiter& arbiter, Log& log)
      : FakeLane("a", TrafficClass::kTp, arbiter.window_to("there"), log), arbiter_(arbiter) {}
  void send() override {
    ++sent;
    arbiter_.acknowledge(traffic_class(), window(), bytes(), 1e-6);
  }

 private:
  Arbiter& arbiter_;
};

// In each round all threads publish and wake at the same time and nobody wakes again until all have been
// served, so a wake-up that is lost is lost for good.
void no_wake_is_lost(int threads, int rounds, bool with_listener) {
  Office office;
  Log log;
  std::vector<std::shared_ptr<InstantLane>> lanes;
  for (int i = 0; i < threads; ++i) {
    lanes.push_back(std::make_shared<InstantLane>(office.arbiter, log));
    office.arbiter.add(lanes.back());
  }
  // Wakes the thread by another way between the rounds' wakes.
  Bell bell;
  if (with_listener) {
    office.arbiter.listen(bell.fd(), [&] {
      bell.quiet();
      return true;
    });
  }
  std::atomic<bool> lost{false};
  std::barrier together(threads);
  std::vector<std::thread> publishers;
  for (int i = 0; i < threads; ++i) {
    publishers.emplace_back([&, i] {
      for (int round = 1; round <= rounds; ++round) {
        together.arrive_and_wait();
        if (lost.load()) continue;
        if (with_listener && i == 0) bell.ring();
        for (int pause = 0; pause < (round * (i + 1)) % 64; ++pause)
          std::atomic_signal_fence(std::memory_order_seq_cst);
        lanes[i]->may_leave.store(round, std::memory_order_release);
        office.arbiter.wake();
        const bool served = eventually([&] { return lanes[i]->sent.load() == round || lost.load(); });
        if (!served) lost = true;
        together.arrive_and_wait();
      }
    });
  }
  for (auto& publisher : publishers) publisher.join();
  EXPECT(!lost.load());
  for (const auto& lane : lanes) office.arbiter.remove(lane);
  if (with_listener) office.arbiter.forget(bell.fd());
}

TEST(no_wake_of_one_thread_is_lost) {
  no_wake_is_lost(1, 3000, false);
}

TEST(no_wake_of_many_threads_is_lost) {
  no_wake_is_lost(4, 2000, false);
}

TEST(no_wake_is_lost_while_listeners_wake_the_thread_too) {
  no_wake_is_lost(3, 2000, true);
}

// --- listening

TEST(a_listener_is_called_until_it_is_forgotten) {
  Arbiter arbiter;
  Bell bell;
  std::atomic<int> calls{0};
  const auto count = [&] {
    bell.quiet();
    ++calls;
    return true;
  };
  arbiter.listen(bell.fd(), count);
  bell.ring();
  bell.ring();
  EXPECT(eventually([&] { return calls.load() == 2; }));
  arbiter.forget(bell.fd());
  bell.ring();
  nap(0.02);
  EXPECT_EQ(calls.load(), 2);
  arbiter.listen(bell.fd(), count);
  EXPECT(eventually([&] { return calls.load() == 3; }));
  arbiter.forget(bell.fd());
}

TEST(a_listener_that_returns_false_is_forgotten) {
  Arbiter arbiter;
  Bell bell;
  std::atomic<int> calls{0};
  arbiter.listen(bell.fd(), [&] {
    ++calls;
    return false;  // and what could be read stays there
  });
  bell.ring();
  EXPECT(eventually([&] { return calls.load() == 1; }));
  nap(0.02);
  EXPECT_EQ(calls.load(), 1);
}

// --- figures

TEST(figures_count_every_chunk_of_every_class) {
  Office office;
  Lanes lanes(office);
  SendWindow& window = office.arbiter.window_to("there");
  const auto tp = lanes.add("tp", TrafficClass::kTp, "there", 100);
  const auto dp = lanes.add("dp", TrafficClass::kDp, "there", 700);
  office.in_its_thread([&] { tp->may_leave = 5, dp->may_leave = 3; });
  office.in_its_thread([&] {
    EXPECT_EQ(window.chunks, 8);
    EXPECT_EQ(window.bytes, 5 * 100 + 3 * 700);
    for (int i = 0; i < 5; ++i) office.arbiter.acknowledge(TrafficClass::kTp, window, 100, 0.25);
    for (int i = 0; i < 3; ++i) office.arbiter.acknowledge(TrafficClass::kDp, window, 700, 0.5);
    EXPECT_EQ(window.chunks, 0);
    EXPECT_EQ(window.bytes, 0);
  });
  auto figures = office.arbiter.figures();
  EXPECT_EQ(figures.size(), 2u);
  EXPECT_EQ(figures[TrafficClass::kTp].chunks, 5);
  EXPECT_EQ(figures[TrafficClass::kTp].bytes, 500);
  EXPECT_EQ(figures[TrafficClass::kTp].transfer_s, 1.25);
  EXPECT_EQ(figures[TrafficClass::kDp].chunks, 3);
  EXPECT_EQ(figures[TrafficClass::kDp].bytes, 2100);
  EXPECT_EQ(figures[TrafficClass::kDp].transfer_s, 1.5);
  for (const auto& [traffic_class, of] : figures) {
    EXPECT(of.queued_s >= 0 && of.queued_s < kDeadlineSeconds);
    double queued = 0;
    for (const double seconds : of.recent_queued_s) queued += seconds;
    EXPECT(std::abs(queued - of.queued_s) < 1e-9);
    EXPECT_EQ(of.recent_queued_s.size(), static_cast<size_t>(of.chunks));
    EXPECT_EQ(of.recent_transfer_s.size(), static_cast<size_t>(of.chunks));
  }
  office.arbiter.reset_figures();
  EXPECT(office.arbiter.figures().empty());
}

TEST(the_recent_figures_are_those_of_the_latest_chunks) {
  Office office;
  Lanes lanes(office);
  SendWindow& window = office.arbiter.window_to("there");
  const auto lane = lanes.add("tp", TrafficClass::kTp, "there", 1);
  constexpr int kRecent = Arbiter::kRecentChunks;
  // All leave before the first arrives, so each kind of figure must keep count for itself.
  office.in_its_thread([&] { lane->may_leave = 2 * kRecent; });
  office.in_its_thread([&] {
    for (int i = 0; i < 2 * kRecent; ++i) {
      office.arbiter.acknowledge(TrafficClass::kTp, window, 1, i < kRecent ? 100.0 : 1.0);
    }
  });
  const TrafficFigures figures = office.arbiter.figures()[TrafficClass::kTp];
  EXPECT_EQ(figures.chunks, 2 * kRecent);
  EXPECT_EQ(figures.recent_queued_s.size(), static_cast<size_t>(kRecent));
  EXPECT_EQ(figures.recent_transfer_s.size(), static_cast<size_t>(kRecent));
  int old = 0;
  for (const double seconds : figures.recent_transfer_s) old += seconds == 100.0;
  EXPECT_EQ(old, 0);
}

TEST(classes_of_traffic_are_known_by_name) {
  for (int i = 0; i < pyruntime::kTrafficClasses; ++i) {
    const auto traffic_class = static_cast<TrafficClass>(i);
    EXPECT(pyruntime::traffic_class_named(pyruntime::name_of(traffic_class)) == traffic_class);
  }
  EXPECT_THROWS(pyruntime::traffic_class_named("ep"), "'ep' is no class of traffic; use 'tp'");
}

}  // namespace
