// Replaces the CUDA runtime when the library's objects are linked without it: one Hopper device, on which
// nothing runs. It records launches and tensor maps, and refuses the map that it is told to.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

constexpr int kMultiprocessors = 132;

// Streams other than the default one belong to a green context with a quarter of the device.
int multiprocessors_of(cudaStream_t stream) {
  return stream == nullptr ? kMultiprocessors : kMultiprocessors / 4;
}

struct Launch {
  unsigned grid, threads, cluster;
  size_t shared_bytes;
};

Launch last_launch;
int launches, encodings, questions, refused_from_now;
unsigned last_boxes[16][5];

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void*, const cuuint64_t*,
                const cuuint64_t*, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (encodings < 16) {
    std::fill_n(last_boxes[encodings], 5, 1);
    std::copy_n(box, rank, last_boxes[encodings]);
  }
  ++encodings;
  std::memset(map, 0, sizeof(*map));
  return refused_from_now > 0 && --refused_from_now == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

}  // namespace

#define PYRUNTIME_API __attribute__((visibility("default")))

extern "C" {

// Forgets the records. The map number `refused` from now on, counted from 1, will be refused; 0: none.
PYRUNTIME_API void fake_begin(int refused) {
  launches = encodings = 0;
  refused_from_now = refused;
}
PYRUNTIME_API int fake_launches() {
  return launches;
}
// Writes the last launch's blocks, threads, blocks of a cluster, and bytes of shared memory.
PYRUNTIME_API void fake_last_launch(long long* out) {
  out[0] = last_launch.grid, out[1] = last_launch.threads, out[2] = last_launch.cluster;
  out[3] = static_cast<long long>(last_launch.shared_bytes);
}
// Returns how often the driver was asked for resident clusters since the process began.
PYRUNTIME_API int fake_questions() {
  return questions;
}
PYRUNTIME_API int fake_encodings() {
  return encodings;
}
// Writes the elements of a box in a map's first two dimensions.
PYRUNTIME_API void fake_box(int encoding, unsigned* out) {
  out[0] = last_boxes[encoding][0], out[1] = last_boxes[encoding][1];
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor         ? 9
           : which == cudaDevAttrMultiProcessorCount          ? kMultiprocessors
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024
                                                              : 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "a fake error";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "another error";
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  ++questions;
  *clusters = multiprocessors_of(config->stream) / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  last_launch = {config->gridDim.x, config->blockDim.x, config->attrs[0].val.clusterDim.x,
                 config->dynamicSmemBytes};
  ++launches;
  return cudaSuccess;
}

// The compiler puts calls of these into every object.
void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {}
}

// Other functions that the library's objects call, but not in these launches.
#define NEVER_CALLED(name)                          \
  extern "C" void never_called_##name() asm(#name); \
  void never_called_##name() {                      \
    std::abort();                                   \
  }
NEVER_CALLED(__cudaGetKernel)
NEVER_CALLED(__cudaLaunchKernel)
NEVER_CALLED(__cudaPopCallConfiguration)
NEVER_CALLED(__cudaPushCallConfiguration)
NEVER_CALLED(cudaFuncGetAttributes)
NEVER_CALLED(cudaLaunchKernel)
NEVER_CALLED(cudaMemcpy2DAsync)
NEVER_CALLED(cudaMemcpyAsync)
NEVER_CALLED(cudaMemsetAsync)
NEVER_CALLED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
NEVER_CALLED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NEVER_CALLED(cudaStreamCreateWithFlags)
NEVER_CALLED(cudaStreamIsCapturing)
NEVER_CALLED(cudaStreamSynchronize)
