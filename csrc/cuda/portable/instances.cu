// One configuration of one kernel. The build compiles this file once for every (job, tiles, dtype), with the
// three names below defined (tools/build_cuda.py).
#include "all_gather_matmul.cuh"
#include "launch.cuh"
#include "matmul_reduce_scatter.cuh"

namespace pyruntime::portable {

template <class Config, class Job>
void launch_tiles(const Job& job, const PyruntimeMatmul& matmul, runtime::Stream stream) {
  const int32_t layout = matmul.layout;
  if (layout == PYRUNTIME_NT) {
    launch_layout<Config, PYRUNTIME_NT>(job, matmul, stream);
  } else if (layout == PYRUNTIME_NN) {
    launch_layout<Config, PYRUNTIME_NN>(job, matmul, stream);
  } else if constexpr (Job::kTransposesA) {
    launch_layout<Config, PYRUNTIME_TN>(job, matmul, stream);
  }
}

using Job = PYRUNTIME_INSTANCE_JOB<PYRUNTIME_INSTANCE_TYPE>;
template void launch_tiles<PYRUNTIME_INSTANCE_TILES, Job>(const Job&, const PyruntimeMatmul&,
                                                          runtime::Stream);

}  // namespace pyruntime::portable
