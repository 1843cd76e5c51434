// What goes through one address for all ranks' memory, where their devices have one (NVLink multicast).
#pragma once

#include <string>

namespace pyruntime {

enum class Multicast {
  kOff,              // each peer gets a copy of its own
  kGather,           // rows and sums that go to all are stored once; the same bits
  kGatherAndReduce,  // and sums are taken in the switch, in its order: not the same bits
};

// "off", "gather" or "gather_and_reduce". Raises ValueError for another name.
Multicast multicast_named(const std::string& name);
const char* name_of(Multicast multicast);

}  // namespace pyruntime
