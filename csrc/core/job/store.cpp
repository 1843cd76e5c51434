#include "core/job/store.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/deadline.h"

namespace pyruntime {

bool await_key(c10d::Store& store, const std::string& key, double seconds) {
  const double start = monotonic_seconds();
  // Each look is a round trip to the store: often at first, then every few milliseconds.
  for (auto pause = std::chrono::microseconds(200); !store.check({key});
       pause = std::min(2 * pause, std::chrono::microseconds(5000))) {
    if (monotonic_seconds() - start > seconds) return false;
    check_wait();
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace pyruntime
