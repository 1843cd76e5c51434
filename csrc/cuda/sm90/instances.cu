// One configuration of the kernel. The build compiles this file once for every (tiles, dtype, layout), with
// the three names below defined (tools/build_cuda.py).
#include "launch.cuh"

namespace pyruntime::sm90 {

template void launch<PYRUNTIME_INSTANCE_TILES, portable::PYRUNTIME_INSTANCE_TYPE, PYRUNTIME_INSTANCE_LAYOUT>(
    const Problem&, void*);

}  // namespace pyruntime::sm90
