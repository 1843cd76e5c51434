#pragma once

#include <vector>

#include "ranks.h"

namespace run {

void add_layer_cases(std::vector<Case>& cases);
void add_route_cases(std::vector<Case>& cases);

}  // namespace run
