#include "transport/device_sharing.h"

namespace pyruntime {

bool DeviceSharing::makes_room_for(int64_t rows, int64_t n) {
  std::string crowded = why_crowded(rows, n);
  if (crowded.empty()) return true;
  Crowding& counted = crowding_[{rows, n}];
  ++counted.ops;
  counted.why = std::move(crowded);
  return false;
}

DeviceSharing::Crowding DeviceSharing::crowding(int64_t rows, int64_t n) const {
  const auto found = crowding_.find({rows, n});
  return found == crowding_.end() ? Crowding{} : found->second;
}

}  // namespace pyruntime
