// Traffic classes and the figures of a group.
#pragma once

#include <cstdint>
#include <string>

namespace pyruntime {

// The purpose of a group's chunks, the most urgent first: computation waits for a TP chunk at once, for a
// checkpoint never. Of kOffload are no group's chunks: optimizer states that a rank keeps in a file or on the
// host.
enum class TrafficClass : int { kTp = 0, kCp, kPp, kDp, kCheckpoint, kOffload };

inline constexpr int kTrafficClasses = 6;

const char* name_of(TrafficClass traffic_class);
// Raises ValueError for a name that is no class.
TrafficClass traffic_class_named(const std::string& name);

// Cumulative figures of one group on this rank. Exposed communication is waiting_s + moving_s: time in which
// this rank's thread only waited for a peer, or copied and summed instead of multiplying.
struct CommStats {
  int64_t ops = 0;
  int64_t bytes = 0;  // read from peers
  double waiting_s = 0;
  double moving_s = 0;
};

}  // namespace pyruntime
