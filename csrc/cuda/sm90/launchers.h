/* The fused GEMMs for Hopper (compute capability 9.0), by TMA and wgmma. They take the arguments of their
   namesakes in cuda/launchers.h and do the same, over the same workspaces, flags and parts: in one flight,
   one rank may call these and another the portable ones.

   They do not support every GEMM. If not, they return PYRUNTIME_REFUSED before anything is launched,
   pyruntime_error() says why, and the caller calls the portable function with the same arguments. */
#pragma once

#include "cuda/launchers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Valid, but not supported here: another device, an empty GEMM (m, n or k is 0), rows or starts of a matrix
   that TMA cannot address (a, b, and except in a scatter c: multiples of 16 bytes), or a library built
   without these kernels. */
enum { PYRUNTIME_REFUSED = 3 };

/* Returns the fastest tiles if `blocks` blocks run at one time, one a multiprocessor (0: all multiprocessors
   of this device but one, as beside a gather's own puts); depends only on its arguments. chunk_rows: the rows
   of one rank. */
PYRUNTIME_API int pyruntime_sm90_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n, int64_t k,
                                              int32_t blocks);

/* Returns PYRUNTIME_OK if these kernels are built and fit the current device, else PYRUNTIME_REFUSED. */
PYRUNTIME_API int pyruntime_sm90_is_on_device(void);

/* Blocks come in pairs; most_blocks and spare_blocks leave at least one pair. */
PYRUNTIME_API int pyruntime_sm90_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                                   void* stream);
PYRUNTIME_API int pyruntime_sm90_matmul_reduce_scatter(const PyruntimeGroup* group,
                                                       const PyruntimeMatmul* matmul, void* stream);

#ifdef __cplusplus
}
#endif
