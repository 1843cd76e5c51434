// Reports that a peer is late before the deadline ends the wait, so that a slow rank is known by name.
#pragma once

#include <functional>
#include <string>

namespace pyruntime {

// Sets where reports go; the bindings pass them to Python's logging. Before the first call they go nowhere.
void set_reporter(std::function<void(const std::string&)> reporter);

// One wait. `site` makes its sentence up to "waiting for rank 1 to ...".
class LateReport {
 public:
  LateReport(double deadline_seconds, std::function<std::string()> site);
  // Reports how long the wait has taken, if look() has reported it.
  ~LateReport();
  LateReport(const LateReport&) = delete;
  LateReport& operator=(const LateReport&) = delete;

  // Called now and then while waiting. Reports once, after 10 s or a quarter of the deadline.
  void look();

  // Whether a thread of this process is waiting for a peer.
  static bool is_one_waited_for();

 private:
  double deadline_;
  std::function<std::string()> site_;
  double start_;
  std::string reported_;
};

}  // namespace pyruntime
