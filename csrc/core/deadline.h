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

// Called now and then by every wait, outside any lock; it may throw to end the wait (the bindings look for
// Ctrl-C here).
void set_interrupt_check(std::function<void()> check);

// Likewise; the FailureBoard ends waits here when another rank of the job has failed.
void set_failure_check(std::function<void()> check);

// Within its scope, every wait of this thread also calls `check`, which throws when waiting has become
// pointless: for waits deep inside torch's interfaces, which know nothing of the peers' processes.
class ScopedWaitCheck {
 public:
  explicit ScopedWaitCheck(std::function<void()> check);
  ~ScopedWaitCheck();
  ScopedWaitCheck(const ScopedWaitCheck&) = delete;
  ScopedWaitCheck& operator=(const ScopedWaitCheck&) = delete;

 private:
  std::function<void()> outer_;
};

// Calls all of them; for waits that do not go through wait_until().
void check_wait();

// Work that a thread may do instead of waiting.
class Filler {
 public:
  virtual ~Filler() = default;
  // Does a piece of it, short enough that what has come meanwhile may wait for its end, and without waiting
  // for anybody; false where there is none.
  virtual bool work() = 0;
};

// This thread's, from now on; nullptr: none.
void set_filler(Filler* filler);

struct Span {
  double begin, end;  // monotonic_seconds()
};

// When this thread worked inside its waits since it asked last, in order.
std::vector<Span> take_filled();

// Waits until arrived() is true or `seconds` have passed, and says which. arrived() may take what it finds (a
// signal, say): it is not called again after it has been true. `still_possible` is called every few
// milliseconds and throws when the wait has become pointless (the peer's process is gone). The waiting thread
// first spins (a chunk usually arrives within microseconds), then does what its filler has; with nothing to
// do it yields its core (ranks may outnumber cores), then naps (a late peer should not cost a core).
bool wait_until(const std::function<bool()>& arrived, double seconds,
                const std::function<void()>& still_possible);

}  // namespace pyruntime
