/* The fused GEMMs for Hopper (compute capability 9.0), by TMA and wgmma. They take what their namesakes in
   cuda/launchers.h take and do the same, over the same workspaces, flags and parts: a rank may call these and
   another the portable ones in the same flight.

   They are not made for every GEMM. Where they are not, they return PYRUNTIME_REFUSED before anything is
   launched, pyruntime_error() says why, and the caller takes the portable function with the same arguments.
 */
#pragma once

#include "cuda/launchers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Not wrong, but not for these kernels: another device, an empty GEMM (m, n or k is 0), rows or starts of
   a matrix that TMA cannot address (a, b, and c but for a scatter: multiples of 16 bytes), or a library built
   without them. */
enum { PYRUNTIME_REFUSED = 3 };

/* Which tiles these kernels are quickest with where so many blocks run at one time, one a multiprocessor (0:
   on all of this device but one, as beside a gather's own puts): a rule of its arguments. `chunk_rows` are
   the rows of one rank. */
PYRUNTIME_API int pyruntime_sm90_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n, int64_t k,
                                              int32_t blocks);

/* PYRUNTIME_OK where these kernels are built and the current device is theirs, else PYRUNTIME_REFUSED. */
PYRUNTIME_API int pyruntime_sm90_is_on_device(void);

/* Blocks come in pairs: most_blocks and spare_blocks leave at least one. */
PYRUNTIME_API int pyruntime_sm90_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                                   void* stream);
PYRUNTIME_API int pyruntime_sm90_matmul_reduce_scatter(const PyruntimeGroup* group,
                                                       const PyruntimeMatmul* matmul, void* stream);

#ifdef __cplusplus
}
#endif
