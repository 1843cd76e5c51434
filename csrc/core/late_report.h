// Says that a peer is late before the deadline ends the wait for it, so that a slow rank is known by name.
#pragma once

#include <functional>
#include <string>

namespace pyruntime {

// Where reports go; the bindings hand them to Python's logging. Nowhere before the first call.
void set_reporter(std::function<void(const std::string&)> reporter);

// One wait. `site` makes the sentence up to "waiting for rank 1 to ...".
class LateReport {
 public:
  LateReport(double deadline_seconds, std::function<std::string()> site);
  // Says how long the wait has taken, if it was said that it is long.
  ~LateReport();
  LateReport(const LateReport&) = delete;
  LateReport& operator=(const LateReport&) = delete;

  // Now and then, while waiting. Reports once, after 10 s or a quarter of the deadline.
  void look();

  // Whether a thread of this process waits for a peer just now.
  static bool is_one_waited_for();

 private:
  double deadline_;
  std::function<std::string()> site_;
  double start_;
  std::string reported_;
};

}  // namespace pyruntime
