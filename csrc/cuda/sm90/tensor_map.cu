#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "cuda/portable/checks.h"
#include "tensor_map.h"
#include "units.h"

namespace pyruntime::sm90 {

namespace {

// The driver's function by way of the runtime, so that the library links without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    throw portable::DeviceError("the driver knows no tensor maps; it is older than CUDA 12.");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap result_map(int32_t dtype, void* start, int64_t rows, int64_t columns, int64_t pitch) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[] = {static_cast<cuuint64_t>(pitch) * 2};
  const cuuint32_t box[] = {64, kBlockRows}, steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, dtype == PYRUNTIME_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      start, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  portable::require(result == CUDA_SUCCESS, "the driver refuses (code ", static_cast<int>(result),
                    ") a tensor map of ", rows, " by ", columns, " elements, ", pitch, " apart, at ", start,
                    ".");
  return map;
}

}  // namespace pyruntime::sm90
