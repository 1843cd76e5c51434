#include "transport/multicast.h"

#include <c10/util/Exception.h>

namespace pyruntime {

Multicast multicast_named(const std::string& name) {
  for (const Multicast known : {Multicast::kOff, Multicast::kGather, Multicast::kGatherAndReduce}) {
    if (name == name_of(known)) return known;
  }
  TORCH_CHECK_VALUE(false, "multicast='", name, "' is none; use 'off', 'gather' or 'gather_and_reduce'.");
}

const char* name_of(Multicast multicast) {
  if (multicast == Multicast::kGather) return "gather";
  return multicast == Multicast::kGatherAndReduce ? "gather_and_reduce" : "off";
}

}  // namespace pyruntime
