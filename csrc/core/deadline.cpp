#include "core/deadline.h"

#include <sched.h>
#include <thread>
#include <utility>

namespace pyruntime {

namespace {

std::function<void()> interrupt_check;
std::function<void()> failure_check;
thread_local std::function<void()> scoped_check;
thread_local Filler* filler = nullptr;
thread_local std::vector<Span> filled;

constexpr int kSpins = 4000;  // about 50 us
// After this the thread naps. Not later: where ranks outnumber cores, a yielding thread keeps running between
// those that compute. Linux 6.18 puts it a whole turn behind them each time, also when its chunk has arrived.
constexpr double kYieldSeconds = 1e-4;
constexpr double kLivenessEverySeconds = 5e-3;  // how often the peer's process is looked at
constexpr double kSameSpanSeconds = 2e-5;       // between pieces that follow each other

void relax_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns whether there was something to do.
bool fill() {
  if (filler == nullptr) return false;
  const double begin = monotonic_seconds();
  if (!filler->work()) return false;
  const double end = monotonic_seconds();
  if (!filled.empty() && begin - filled.back().end < kSameSpanSeconds) {
    filled.back().end = end;
  } else {
    filled.push_back({begin, end});
  }
  return true;
}

}  // namespace

void set_filler(Filler* own) {
  filler = own;
}

std::vector<Span> take_filled() {
  return std::exchange(filled, {});
}

void set_interrupt_check(std::function<void()> check) {
  interrupt_check = std::move(check);
}

void set_failure_check(std::function<void()> check) {
  failure_check = std::move(check);
}

ScopedWaitCheck::ScopedWaitCheck(std::function<void()> check)
    : outer_(std::exchange(scoped_check, std::move(check))) {}

ScopedWaitCheck::~ScopedWaitCheck() {
  scoped_check = std::move(outer_);
}

void check_wait() {
  if (interrupt_check) interrupt_check();
  if (failure_check) failure_check();
  if (scoped_check) scoped_check();
}

bool wait_until(const std::function<bool()>& arrived, double seconds,
                const std::function<void()>& still_possible) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (arrived()) return true;
    relax_core();
  }
  const double start = monotonic_seconds();
  double next_look = start + kLivenessEverySeconds;
  while (!arrived()) {
    const bool worked = fill();
    const double now = monotonic_seconds();
    if (worked) {
      if (arrived()) return true;
    } else if (now - start < kYieldSeconds) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (now - start > seconds) return arrived();
    if (now >= next_look) {
      next_look = now + kLivenessEverySeconds;
      check_wait();
      // The peer may have sent and then ended; only a peer that is gone without having sent is lost.
      if (arrived()) return true;
      still_possible();
    }
  }
  return true;
}

}  // namespace pyruntime
