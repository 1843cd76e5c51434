// What ranks of a ring say when something goes wrong, and what is left of it afterwards.
#include <algorithm>
#include <chrono>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "check.h"
#include "core/deadline.h"
#include "core/job/failure_board.h"
#include "core/late_report.h"
#include "transport/ring/receiver.h"
#include "transport/ring/ring_of_threads.h"
#include "transport/ring/ring_ops.h"

namespace {

using namespace ring_test;
using pyruntime::monotonic_seconds;

const Shape kShape{24, 1, 1, 4};
constexpr double kSoon = 5.0;  // much less than the deadline of a Setup

Setup setup_of(int ranks) {
  Setup setup;
  setup.ranks = ranks;
  return setup;
}

void nap(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// `work` fails with an error of that kind that says `words`; returns how long it took.
double expect_failure(CommErrorKind kind, const std::string& words, const std::function<void()>& work) {
  const double start = monotonic_seconds();
  const auto failure = failure_of(work);
  if (!failure) {
    check::fail(__FILE__, __LINE__, "nothing failed, expected \"" + words + "\"");
  } else {
    const std::string said = failure->what();
    if (said.find(words) == std::string::npos) {
      check::fail(__FILE__, __LINE__, "\"" + said + "\" does not say \"" + words + "\"");
    }
    if (failure->kind() != kind) check::fail(__FILE__, __LINE__, "\"" + said + "\" is of another kind");
  }
  return monotonic_seconds() - start;
}

void expect_broken(Member& member) {
  expect_failure(CommErrorKind::kBroken, "Group 'ring' cannot go on: its ranks are out of step",
                 [&] { begin(member, Kind::kGather, kShape, 1); });
}

// --- ranks that do not do the same

TEST(ranks_that_call_the_op_with_other_shapes_are_all_told) {
  const auto differ = [](auto change) {
    for (const int ranks : {2, 3}) {
      for (const Kind kind : kAllKinds) {
        RingOfThreads(setup_of(ranks)).run([&](Member& member) {
          Shape shape = kShape;
          if (member.rank() == 1) change(shape);
          const double took =
              expect_failure(CommErrorKind::kDisagree, "Ranks disagree on op 1 of group 'ring'",
                             [&] { run_op(member, kind, shape, 1); });
          EXPECT(took < kSoon);
          expect_broken(member);
        });
      }
    }
  };
  differ([](Shape& shape) { shape.width = 5; });
  differ([](Shape& shape) { shape.rows = 25; });
  differ([](Shape& shape) { shape.blocks = 2; });
  differ([](Shape& shape) { shape.dtype = c10::ScalarType::BFloat16; });
}

TEST(ranks_that_call_other_ops_are_all_told) {
  for (const int ranks : {2, 3}) {
    RingOfThreads(setup_of(ranks)).run([](Member& member) {
      const Kind kind = member.rank() == 0 ? Kind::kScatter : Kind::kGather;
      expect_failure(CommErrorKind::kDisagree, member.ranks() == 2 ? "reduce_scatter with 24 rows" : "",
                     [&] { run_op(member, kind, kShape, 1); });
    });
  }
}

TEST(a_rank_that_meets_no_failure_itself_hears_of_it) {
  pyruntime::set_failure_check([] { pyruntime::FailureBoard::instance().raise_if_failed(); });
  RingOfThreads(setup_of(4)).run([](Member& member) {
    Shape shape = kShape;
    if (member.rank() == 1) shape.width = 5;
    // Rank 3 is no neighbour of rank 1, and would wait until its deadline.
    const double took = expect_failure(CommErrorKind::kDisagree, "Ranks disagree on op 1",
                                       [&] { run_op(member, Kind::kGather, shape, 1); });
    EXPECT(took < kSoon);
  });
  pyruntime::set_failure_check(nullptr);
}

TEST(a_rank_that_leaves_an_op_unfinished_may_not_begin_another) {
  for (const Kind kind : kAllKinds) {
    RingOfThreads(setup_of(2)).run([&](Member& member) {
      begin(member, kind, kShape, 1);  // and what it returns goes away
      expect_failure(CommErrorKind::kBroken, "ended before it was finished",
                     [&] { begin(member, Kind::kGather, kShape, 2); });
    });
  }
}

// As where a ring cannot be opened to its end.
TEST(a_receiver_that_nobody_stopped_ends_its_thread) {
  pyruntime::GroupContext context{kGroup, 0, 2, kSoon, pyruntime::TrafficClass::kTp, {}};
  const pyruntime::HostLayout layout = Member::layout_of(setup_of(2), 0);
  pyruntime::Health health(context, layout);
  pyruntime::FlightSlots slots;
  pyruntime::Control control(context, layout, {}, slots, health);
  pyruntime::Arbiter arbiter;
  {
    const pyruntime::Receiver receiver(1, slots, control, health, arbiter);
  }
  EXPECT(health.is_good());
}

// --- ranks that are late

// Takes in what is reported of late ranks.
class Reports {
 public:
  Reports() {
    pyruntime::set_reporter([this](const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex_);
      texts_.push_back(text);
    });
  }
  ~Reports() {
    pyruntime::set_reporter([](const std::string&) {});
  }
  bool say(const std::string& words, const std::string& and_also) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(texts_.begin(), texts_.end(), [&](const std::string& text) {
      return text.find(words) != std::string::npos && text.find(and_also) != std::string::npos;
    });
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
};

TEST(a_rank_that_never_comes_is_named_before_and_at_the_deadline) {
  for (const Kind kind : kAllKinds) {
    const Reports reports;
    Setup setup = setup_of(3);
    setup.deadline_seconds = 0.4;
    std::latch others(2);
    RingOfThreads(setup).run([&](Member& member) {
      member.transport();
      if (member.rank() == 2) return others.wait();
      const double took = expect_failure(CommErrorKind::kTimeout, "; rank 2 has not begun it",
                                         [&] { run_op(member, kind, kShape, 1); });
      EXPECT(took >= 0.4);
      EXPECT(took < kSoon);
      others.count_down();
    });
    EXPECT(reports.say("waiting for rank 2 to", "late by"));
    EXPECT(reports.say("waiting for rank 2 to", "the deadline is 0.4 s"));
  }
}

TEST(a_late_rank_is_waited_for_and_its_coming_is_reported) {
  for (const Kind kind : kAllKinds) {
    const Reports reports;
    Setup setup = setup_of(3);
    setup.deadline_seconds = 4.0;
    RingOfThreads(setup).run([&](Member& member) {
      if (member.rank() == 1) nap(1.2);  // more than a quarter of the deadline
      run_op(member, kind, kShape, 1);
    });
    EXPECT(reports.say("waiting for rank 1 to", "late by 1"));
    EXPECT(reports.say("waiting for rank 1 to", "it came, 1"));
  }
}

// Keeps an arbiter from doing anything else, as if its process were stopped.
class Stopped {
 public:
  explicit Stopped(pyruntime::Arbiter& arbiter) : arbiter_(arbiter), bell_(eventfd(1, EFD_CLOEXEC)) {
    arbiter_.listen(bell_.get(), [this] {
      stopped_.count_down();
      go_on_.wait();
      return false;
    });
    stopped_.wait();
  }
  ~Stopped() {
    go_on_.count_down();
    arbiter_.forget(bell_.get());
  }

 private:
  pyruntime::Arbiter& arbiter_;
  pyruntime::UniqueFd bell_;
  std::latch stopped_{1};
  std::latch go_on_{1};
};

TEST(a_rank_that_is_stopped_in_the_middle_of_an_op_is_named) {
  const Reports reports;
  Setup setup = setup_of(3);
  setup.deadline_seconds = 0.4;
  std::latch others(2);
  RingOfThreads(setup).run([&](Member& member) {
    const auto op = begin(member, Kind::kGather, kShape, 1);
    if (member.rank() == 2) {
      nap(0.1);  // the others have heard that it began
      const Stopped stopped(member.arbiter());
      return others.wait();
    }
    op->publish();
    expect_failure(CommErrorKind::kTimeout, "rank 2 does not answer: it is stopped, or cut off",
                   [&] { op->complete(); });
    others.count_down();
  });
}

// --- ranks that are lost

TEST(a_rank_that_ends_without_a_word_is_reported_at_once) {
  for (const Kind kind : kAllKinds) {
    RingOfThreads(setup_of(3)).run([&](Member& member) {
      if (member.rank() == 2) {
        nap(0.05);
        return member.vanish();
      }
      const double took = expect_failure(CommErrorKind::kPeerLost, "rank 2 has ended: its connection closed.",
                                         [&] { run_op(member, kind, kShape, 1); });
      EXPECT(took < kSoon);
      expect_broken(member);
    });
  }
}

TEST(a_rank_that_ends_in_the_middle_of_an_op_is_reported_at_once) {
  for (const Kind kind : kAllKinds) {
    RingOfThreads(setup_of(2)).run([&](Member& member) {
      const auto op = begin(member, kind, kShape, 1);
      if (member.rank() == 1) {
        nap(0.05);
        return member.vanish();
      }
      op->publish();
      const double took =
          expect_failure(CommErrorKind::kPeerLost, "rank 1 has ended: its connection closed.", [&] {
            op->sum();
            op->complete();
          });
      EXPECT(took < kSoon);
    });
  }
}

TEST(a_rank_that_is_lost_between_two_ops_is_told_of_once) {
  std::latch gone(1);
  RingOfThreads(setup_of(2)).run([&](Member& member) {
    run_op(member, Kind::kGather, kShape, 1);
    member.transport().flush();
    if (member.rank() == 1) {
      member.vanish();
      return gone.count_down();
    }
    gone.wait();
    nap(0.1);
    expect_failure(CommErrorKind::kPeerLost, "rank 1 has ended",
                   [&] { run_op(member, Kind::kGather, kShape, 2); });
    expect_broken(member);
  });
}

TEST(a_rank_that_closes_the_group_too_early_is_reported_at_once) {
  RingOfThreads(setup_of(2)).run([](Member& member) {
    run_op(member, Kind::kGather, kShape, 1);
    if (member.rank() == 1) return;
    const double took =
        expect_failure(CommErrorKind::kPeerLost, "rank 1 closed the group, or ended, before this op",
                       [&] { run_op(member, Kind::kGather, kShape, 2); });
    EXPECT(took < kSoon);
  });
}

TEST(a_neighbour_that_closes_the_group_is_not_missed_by_who_waits_for_its_own_host) {
  Setup setup = setup_of(4);
  setup.ranks_per_host = 2;
  RingOfThreads ring(setup);
  // Rank 1 is done when rank 3 still waits for rank 0's rows, which rank 2, of its own host, takes in.
  ring.network().between(0, 2).hold(true);
  ring.run([&](Member& member) {
    run_op(member, Kind::kGather, kShape, 1);
    if (member.rank() != 1) return;
    member.close();
    nap(0.1);
    ring.network().between(0, 2).hold(false);
  });
}

TEST(a_link_that_breaks_is_reported_by_both_ends) {
  RingOfThreads ring(setup_of(2));
  ring.network().between(1, 0).sever();
  ring.run([](Member& member) {
    const double took = expect_failure(CommErrorKind::kPeerLost, "the link is cut", [&] {
      run_op(member, Kind::kGather, kShape, 1);
      // Rank 1 has what it wants when its own rows cannot leave, and learns it in the next op.
      EXPECT_EQ(member.rank(), 1);
      run_op(member, Kind::kGather, kShape, 2);
    });
    EXPECT(took < kSoon);
  });
}

// --- afterwards

// An op that fails while its chunks are on their way.
void fail_with_chunks_under_way(RingOfThreads& ring, Kind kind) {
  const Reports reports;
  ring.network().hold_all(true);
  ring.set_deadline_seconds(0.2);
  ring.run([&](Member& member) {
    expect_failure(CommErrorKind::kTimeout, "not within the deadline",
                   [&] { run_op(member, kind, kShape, 1); });
  });
  ring.set_deadline_seconds(30.0);
}

TEST(a_group_that_failed_holds_up_no_other_group_between_the_same_hosts) {
  for (const Kind kind : kAllKinds) {
    RingOfThreads ring(setup_of(3));
    fail_with_chunks_under_way(ring, kind);
    ring.network().hold_all(false);
    // More chunks than a window holds, through the arbiters of the group that failed.
    ring.run([](Member& member) {
      for (int op = 1; op <= 6; ++op) run_op(member, kAllKinds[op % 3], {60, 1, 1, 30}, op);
    });
  }
}

TEST(what_was_under_way_touches_no_memory_of_a_group_that_was_closed) {
  for (const Kind kind : kAllKinds) {
    RingOfThreads ring(setup_of(3));
    fail_with_chunks_under_way(ring, kind);
    // Now they are free to arrive; the address sanitizer sees it if they do.
    ring.network().hold_all(false);
    nap(0.02);
  }
}

TEST(a_group_that_failed_is_closed_without_waiting_for_the_deadline) {
  RingOfThreads(setup_of(2)).run([](Member& member) {
    Shape shape = kShape;
    if (member.rank() == 1) shape.width = 5;
    expect_failure(CommErrorKind::kDisagree, "Ranks disagree",
                   [&] { run_op(member, Kind::kScatter, shape, 1); });
    const double start = monotonic_seconds();
    member.close();
    EXPECT(monotonic_seconds() - start < kSoon);
  });
}

}  // namespace
