#include "core/late_report.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "core/deadline.h"
#include "core/text.h"

namespace pyruntime {

namespace {

constexpr double kLongSeconds = 10.0;
constexpr double kLongShare = 0.25;  // of the deadline

std::function<void(const std::string&)> report = [](const std::string&) {};
std::atomic<int> waits{0};

}  // namespace

void set_reporter(std::function<void(const std::string&)> reporter) {
  report = std::move(reporter);
}

LateReport::LateReport(double deadline_seconds, std::function<std::string()> site)
    : deadline_(deadline_seconds), site_(std::move(site)), start_(monotonic_seconds()) {
  waits.fetch_add(1, std::memory_order_relaxed);
}

bool LateReport::is_one_waited_for() {
  return waits.load(std::memory_order_relaxed) > 0;
}

void LateReport::look() {
  if (!reported_.empty()) return;
  const double waited = monotonic_seconds() - start_;
  if (waited < std::min(kLongSeconds, kLongShare * deadline_)) return;
  reported_ = site_();
  report(reported_ + ": late by " + seconds_text(waited) + " so far; the deadline is " +
         seconds_text(deadline_) + ".");
}

LateReport::~LateReport() {
  waits.fetch_sub(1, std::memory_order_relaxed);
  if (reported_.empty() || std::uncaught_exceptions() > 0) return;
  const double waited = monotonic_seconds() - start_;
  if (waited >= deadline_) return;
  try {
    report(reported_ + ": it came, " + seconds_text(waited) + " late.");
  } catch (...) {
    // A user's logging handler may raise; the wait has succeeded all the same.
  }
}

}  // namespace pyruntime
