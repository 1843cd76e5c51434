// What launchers hand to launch(): a GEMM, its tiles and its group, checked. Nothing of CUTLASS, which
// takes long to read.
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
  int64_t rows_of_a;                  // that lie at matmul.a
  int64_t part_elements, part_pitch;  // kScatter: of one rank's part in a slot, and from row to row of it
};

// A kernel's instance; compiled by instances.cu.
template <class Config, class T, int kLayout>
void launch(const Problem& problem, void* stream);

}  // namespace pyruntime::sm90
