// The argument of launch(): a checked GEMM, its tiles and its group. Without CUTLASS, which compiles slowly.
#pragma once

#include "cuda/portable/workspace.cuh"
#include "units.h"

namespace pyruntime::sm90 {

using portable::Group;

enum class Work : int32_t { kGather, kScatter };

struct Problem {
  Work work;
  Group group;
  TileSchedule units;
  PyruntimeMatmul matmul;
  int64_t rows_of_a;                  // rows at matmul.a
  int64_t part_elements, part_pitch;  // kScatter: elements of one rank's part in a slot, and of its rows
};

// Launches a kernel's instance; compiled by instances.cu.
template <class Config, class T, int kLayout>
void launch(const Problem& problem, void* stream);

}  // namespace pyruntime::sm90
