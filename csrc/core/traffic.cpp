#include "core/traffic.h"

#include <c10/util/Exception.h>

#include "core/deadline.h"

namespace pyruntime {

namespace {
constexpr const char* kNames[kTrafficClasses] = {"tp", "cp", "pp", "dp", "checkpoint"};
}

const char* name_of(TrafficClass traffic_class) {
  return kNames[static_cast<int>(traffic_class)];
}

TrafficClass traffic_class_named(const std::string& name) {
  for (int i = 0; i < kTrafficClasses; ++i) {
    if (name == kNames[i]) return static_cast<TrafficClass>(i);
  }
  TORCH_CHECK_VALUE(false, "traffic_class='", name,
                    "' is no class of traffic; use 'tp', 'cp', 'pp', 'dp' or 'checkpoint'.");
}

ScopedSeconds::ScopedSeconds(double& counter) : counter_(counter), start_(monotonic_seconds()) {}

ScopedSeconds::~ScopedSeconds() {
  counter_ += monotonic_seconds() - start_;
}

}  // namespace pyruntime
