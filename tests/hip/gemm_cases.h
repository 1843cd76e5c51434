#pragma once

#include <vector>

#include "ranks.h"

namespace run {

void add_gemm_cases(std::vector<Case>& cases);

}  // namespace run
