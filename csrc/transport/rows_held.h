// The rows that every rank holds, for transports that have no other way to tell than a gather.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/transport.h"

namespace pyruntime {

// A gather of one number from each rank, for which the host waits.
std::vector<int64_t> rows_held_by_gather(Transport& transport, const FlightDescriptor& descriptor);

}  // namespace pyruntime
