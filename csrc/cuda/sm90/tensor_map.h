// Tensor maps, which describe a matrix to TMA.
#pragma once

#include <cstdint>
#include <cuda.h>

namespace pyruntime::sm90 {

// Returns the map of a row-major matrix of bf16 or fp16, into which staged results are stored in boxes of 64
// columns by 64 rows. Its start and pitch are multiples of 16 bytes. Throws if the driver refuses.
CUtensorMap result_map(int32_t dtype, void* start, int64_t rows, int64_t columns, int64_t pitch);

}  // namespace pyruntime::sm90
