// Bounded waiting. Every wait on a peer goes through wait_until(), so none can hang.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

namespace pyruntime {

inline constexpr double kDefaultDeadlineSeconds = 120.0;

// Seconds on a monotonic clock.
inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

// Sets a check that every wait calls now and then, outside any lock. It may throw to end the wait; the
// bindings look for Ctrl-C here.
void set_interrupt_check(std::function<void()> check);

// Sets a second check; the FailureBoard ends waits here when another rank of the job has failed.
void set_failure_check(std::function<void()> check);

// Within its scope, every wait of this thread also calls `check`, which throws when waiting has become
// pointless. For waits inside torch's interfaces, which know nothing of the peers' processes.
class ScopedWaitCheck {
 public:
  explicit ScopedWaitCheck(std::function<void()> check);
  ~ScopedWaitCheck();
  ScopedWaitCheck(const ScopedWaitCheck&) = delete;
  ScopedWaitCheck& operator=(const ScopedWaitCheck&) = delete;

 private:
  std::function<void()> outer_;
};

// Calls all three checks; for waits that do not go through wait_until().
void check_wait();

// Work that a thread may do instead of waiting.
class Filler {
 public:
  virtual ~Filler() = default;
  // Does one piece of work, without waiting for anybody; returns false if there is none. A chunk that arrives
  // meanwhile waits for its end, so it must be short.
  virtual bool work() = 0;
};

// Sets this thread's filler; nullptr: none.
void set_filler(Filler* filler);

struct Span {
  double begin, end;  // monotonic_seconds()
};

// The times in which this thread worked inside its waits since the last call, in order.
std::vector<Span> take_filled();

// Waits until arrived() is true or `seconds` have passed, and returns which. arrived() may consume what it
// finds (a signal, say): after it has returned true it is not called again. `still_possible` is called every
// few milliseconds and throws when the wait has become pointless (the peer's process is gone).
// The thread first spins, because a chunk usually arrives within microseconds. Then it does its filler's
// work. With no work it yields its core (ranks may outnumber cores), then naps (a late peer should not cost a
// core).
bool wait_until(const std::function<bool()>& arrived, double seconds,
                const std::function<void()>& still_possible);

}  // namespace pyruntime
