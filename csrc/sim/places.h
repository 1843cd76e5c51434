// Names the place of the host in the program: the product's op, or the node of a backward pass, that is under
// way.
#pragma once

#include <string>

namespace sim {

// Watches torch's operators and backward passes from now on, in every thread.
void watch_places();

// "PLACE: OP", with what this thread runs. In a backward pass PLACE is that of the node's forward pass.
std::string op_under_way(const std::string& place);

}  // namespace sim
