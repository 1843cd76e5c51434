#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "cuda/portable/checks.h"
#include "tensor_map.h"
#include "units.h"

namespace {

// Finds the driver's function through the runtime, so that the library links without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    throw pyruntime::portable::DeviceError("the driver knows no tensor maps; it is older than CUDA 12.");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

// Formats { 64, 128 } as [128, 64]: TMA counts the innermost dimension first.
template <class Number>
std::string sizes_of(const Number* sizes, uint32_t count) {
  std::ostringstream text;
  for (uint32_t i = count; i-- > 0;) text << (i + 1 == count ? "[" : ", ") << sizes[i];
  text << "]";
  return text.str();
}

}  // namespace

// Makes all tensor maps. CUTLASS's driver calls come here too, through CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL
// (tools/build_sm90.py): CUTLASS alone would print the driver's error and launch with a map of zeros. Hidden,
// so that no other library takes it for the driver's.
extern "C" __attribute__((visibility("hidden"))) CUresult
cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* start,
                       const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box,
                       const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  const CUresult result =
      encode(map, type, rank, start, sizes, pitches, box, steps, interleave, swizzle, promotion, fill);
  if (result == CUDA_SUCCESS) return result;
  // The driver and the runtime have the same codes.
  std::ostringstream sentence;
  sentence << "the driver refuses a tensor map with " << cudaGetErrorName(static_cast<cudaError_t>(result))
           << " (" << result << "): " << sizes_of(sizes, rank) << " elements at " << start << ", "
           << sizes_of(pitches, rank - 1) << " bytes apart, in boxes of " << sizes_of(box, rank)
           << "; nothing was launched.";
  throw pyruntime::portable::DeviceError(sentence.str());
}

namespace pyruntime::sm90 {

CUtensorMap result_map(int32_t dtype, void* start, int64_t rows, int64_t columns, int64_t pitch) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitches[] = {static_cast<cuuint64_t>(pitch) * 2};
  const cuuint32_t box[] = {64, kHalfRows}, steps[] = {1, 1};
  CUtensorMap map;
  cuTensorMapEncodeTiled(
      &map, dtype == PYRUNTIME_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      start, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace pyruntime::sm90
