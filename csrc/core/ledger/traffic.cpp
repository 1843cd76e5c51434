#include "core/ledger/traffic.h"

#include "core/text.h"

namespace pyruntime {

namespace {
constexpr const char* kNames[kTrafficClasses] = {"tp", "cp", "pp", "dp", "checkpoint", "offload"};
}

const char* name_of(TrafficClass traffic_class) {
  return kNames[static_cast<int>(traffic_class)];
}

TrafficClass traffic_class_named(const std::string& name) {
  return named<TrafficClass>(
      kNames, name,
      "traffic_class='" + name + "' is no class of traffic; use 'tp', 'cp', 'pp', 'dp' or 'checkpoint'.");
}

}  // namespace pyruntime
