// Tensor maps: how TMA is told of a matrix.
#pragma once

#include <cstdint>
#include <cuda.h>

namespace pyruntime::sm90 {

// Of a row-major matrix of bf16 or fp16 into which staged results are stored, in boxes of 64 columns by 64
// rows. Its start and its pitch are multiples of 16 bytes. Throws where the driver refuses.
CUtensorMap result_map(int32_t dtype, void* start, int64_t rows, int64_t columns, int64_t pitch);

}  // namespace pyruntime::sm90
