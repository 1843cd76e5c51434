// One configuration of one kernel. The build compiles this file once for every (job, tiles, dtype), with the
// three names below defined (tools/build_cuda.py).
#include "all_gather_matmul.cuh"
#include "launch.cuh"
#include "matmul_reduce_scatter.cuh"

namespace pyruntime::portable {

template <class Config, class Job>
void launch_tiles(const Job& job, const PyruntimeMatmul& matmul, void* stream) {
  if (matmul.layout == PYRUNTIME_NT) return launch_layout<Config, PYRUNTIME_NT>(job, matmul, stream);
  launch_layout<Config, PYRUNTIME_NN>(job, matmul, stream);
}

using Job = PYRUNTIME_INSTANCE_JOB<PYRUNTIME_INSTANCE_TYPE>;
template void launch_tiles<PYRUNTIME_INSTANCE_TILES, Job>(const Job&, const PyruntimeMatmul&, void*);

}  // namespace pyruntime::portable
