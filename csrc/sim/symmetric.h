#pragma once

namespace sim {

// torch's symmetric memory for the devices: memory of each rank of a host, mapped by all of them.
void register_symmetric_memory();

}  // namespace sim
