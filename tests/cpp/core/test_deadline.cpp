#include <stdexcept>

#include "check.h"
#include "core/deadline.h"
#include "core/error.h"

namespace {

using pyruntime::monotonic_seconds;
using pyruntime::wait_until;

const auto never = [] { return false; };
const auto fine = [] {};

TEST(a_wait_ends_at_once_when_the_thing_is_there) {
  const double start = monotonic_seconds();
  EXPECT(wait_until([] { return true; }, 10.0, [] { throw std::runtime_error("not to be asked"); }));
  EXPECT(monotonic_seconds() - start < 1.0);
}

TEST(a_wait_sees_what_comes_while_it_naps) {
  const double start = monotonic_seconds();
  EXPECT(wait_until([&] { return monotonic_seconds() - start > 0.05; }, 10.0, fine));
  EXPECT(monotonic_seconds() - start < 5.0);
}

TEST(a_wait_ends_at_its_deadline) {
  const double start = monotonic_seconds();
  EXPECT(!wait_until(never, 0.1, fine));
  const double waited = monotonic_seconds() - start;
  EXPECT(waited >= 0.1);
  EXPECT(waited < 5.0);
}

TEST(a_wait_that_has_become_pointless_throws) {
  const double start = monotonic_seconds();
  EXPECT_THROWS(wait_until(never, 30.0, [] { throw std::runtime_error("the peer is gone"); }),
                "the peer is gone");
  EXPECT(monotonic_seconds() - start < 10.0);
}

TEST(a_peer_that_sent_and_then_ended_is_not_lost) {
  // It arrives between the look of the loop and the look at the peer's process.
  bool gone = false;
  int looks_after = 0;
  const double start = monotonic_seconds();
  const auto arrived = [&] {
    if (monotonic_seconds() - start < 0.02) return false;
    gone = true;
    return ++looks_after > 1;
  };
  EXPECT(wait_until(arrived, 10.0, [&] {
    if (gone) throw std::runtime_error("lost");
  }));
}

// Work in pieces of a millisecond, so many of them.
struct Pieces : pyruntime::Filler {
  explicit Pieces(int count) : left(count) { pyruntime::set_filler(this); }
  ~Pieces() override { pyruntime::set_filler(nullptr); }
  bool work() override {
    if (left == 0) return false;
    --left;
    const double begin = monotonic_seconds();
    while (monotonic_seconds() - begin < 1e-3) continue;
    return true;
  }
  int left;
};

TEST(a_wait_is_filled_and_ends_when_the_thing_comes) {
  pyruntime::take_filled();
  Pieces pieces(1 << 20);
  const double start = monotonic_seconds();
  EXPECT(wait_until([&] { return monotonic_seconds() - start > 0.05; }, 10.0, fine));
  const double waited = monotonic_seconds() - start;
  EXPECT(pieces.left < (1 << 20));
  double worked = 0;
  for (const pyruntime::Span& span : pyruntime::take_filled()) worked += span.end - span.begin;
  EXPECT(worked > 0.5 * waited);
  EXPECT(worked <= waited);
  EXPECT(pyruntime::take_filled().empty());
}

TEST(what_is_there_already_is_not_kept_waiting_by_work) {
  Pieces pieces(5);
  EXPECT(wait_until([] { return true; }, 10.0, fine));
  EXPECT(pieces.left == 5);
}

TEST(a_wait_goes_on_when_the_work_is_done) {
  Pieces pieces(3);
  const double start = monotonic_seconds();
  EXPECT(wait_until([&] { return monotonic_seconds() - start > 0.05; }, 10.0, fine));
  EXPECT(pieces.left == 0);
}

TEST(a_filled_wait_ends_at_its_deadline) {
  Pieces pieces(1 << 20);
  const double start = monotonic_seconds();
  EXPECT(!wait_until(never, 0.1, fine));
  EXPECT(monotonic_seconds() - start < 5.0);
}

TEST(a_filled_wait_that_has_become_pointless_throws) {
  Pieces pieces(1 << 20);
  const double start = monotonic_seconds();
  EXPECT_THROWS(wait_until(never, 30.0, [] { throw std::runtime_error("the peer is gone"); }),
                "the peer is gone");
  EXPECT(monotonic_seconds() - start < 10.0);
}

TEST(an_interrupt_ends_a_wait) {
  pyruntime::set_interrupt_check([] { throw std::runtime_error("interrupted"); });
  EXPECT_THROWS(wait_until(never, 30.0, fine), "interrupted");
  pyruntime::set_interrupt_check(nullptr);
}

void throw_other(pyruntime::CommErrorKind, const std::string& message) {
  throw std::invalid_argument("instead: " + message);
}

TEST(errors_carry_their_kind_and_go_through_the_installed_thrower) {
  try {
    pyruntime::raise_comm_error(pyruntime::CommErrorKind::kPeerLost, "rank 1 has ended");
  } catch (const pyruntime::CommError& error) {
    EXPECT(error.kind() == pyruntime::CommErrorKind::kPeerLost);
    EXPECT_EQ(std::string(error.what()), "rank 1 has ended");
  }
  pyruntime::set_comm_error_thrower(throw_other);
  EXPECT_THROWS(pyruntime::raise_comm_error(pyruntime::CommErrorKind::kTimeout, "late"), "instead: late");
  pyruntime::set_comm_error_thrower(nullptr);
}

}  // namespace
