/* What libpyruntime_cuda offers: plain C, raw pointers, sizes and a stream. No torch, and no CUDA header
   needed to call it; a stream is a cudaStream_t (hipStream_t), and nullptr the default stream.

   Every function that returns int returns 0, or one of the codes below; then pyruntime_error() says in a
   sentence what was wrong. All arguments are checked before anything is launched. Nothing is allocated and
   nothing waits for the device, except where it says so.

   How ranks meet (workspaces, slots, epochs, signals, deadlines): docs/explanation/gpu-protocol.md. */
#pragma once

#if defined(__CUDACC_RTC__) /* NVRTC has no headers of the host: rtc.h */
#define PYRUNTIME_API
#else
#include <stdint.h>
#define PYRUNTIME_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface. Raise it with every change after which a library that was built before must
   not be called any more: of a function's arguments, of a struct, of what a value means. A function that is
   added needs no new number: a library without it is refused anyway. */
enum { PYRUNTIME_INTERFACE = 2 };
PYRUNTIME_API int pyruntime_interface(void);

enum { PYRUNTIME_OK = 0, PYRUNTIME_INVALID = 1, PYRUNTIME_DEVICE_ERROR = 2 };

/* Ranks of one group: more share no memory anywhere. */
enum { PYRUNTIME_MOST_RANKS = 72 };

/* A flight uses one slot of a workspace; so many flights of a group may be under way at once. */
enum { PYRUNTIME_SLOTS = 4 };

/* What is signalled of a rank's part of a scatter, a flag each: blocks of so many rows and columns, row-major
   within the rows of their owner, whatever tiles the GEMM is computed by. */
enum { PYRUNTIME_SIGNAL_ROWS = 64, PYRUNTIME_SIGNAL_COLUMNS = 128 };

typedef enum { PYRUNTIME_BF16 = 0, PYRUNTIME_FP16 = 1, PYRUNTIME_FP32 = 2 } PyruntimeDtype;

/* How the operands of C [m, n] = A B lie in memory; all are row-major.
     NT  A [m, k], B [n, k]   forward        Y = X W^T
     NN  A [m, k], B [k, n]   gradient of X  dX = dY W */
typedef enum { PYRUNTIME_NT = 0, PYRUNTIME_NN = 1 } PyruntimeLayout;

/* Tiles of the GEMM; each rank's own affair. */
typedef enum { PYRUNTIME_TILES_SMALL = 0, PYRUNTIME_TILES_LARGE = 1 } PyruntimeTiles;

/* The sentence for this thread's last error. */
PYRUNTIME_API const char* pyruntime_error(void);

/* ---- groups ---- */

typedef struct {
  int32_t world_size;
  int32_t flags;      /* of one source rank in one slot: pieces of a gather, signals of a scatter */
  int64_t slot_bytes; /* of data */
} PyruntimeWorkspace;

typedef struct {
  PyruntimeWorkspace shape; /* the same on all ranks */
  int32_t rank;
  int32_t slot;            /* which slot this flight uses; the same on all ranks */
  int64_t deadline_ns;     /* of every single wait */
  void* const* workspaces; /* [world_size], on the host: where this rank sees each rank's workspace */
  int32_t pieces; /* of each rank's rows in a gather, a flag each, the same on all ranks; 0: one for every
                     flag that the workspace has */
  int32_t rings;  /* around which the rows of a gather come, both ways: then a rank has 2 * rings pieces, of
                     which piece i comes forwards around ring i and piece rings + i backwards; 0: each piece
                     comes from its owner, or no gather */
  const int32_t* ring_orders; /* [rings][world_size], on the host: all ranks, each beside its neighbours */
} PyruntimeGroup;

/* Bytes of a rank's workspace; negative: the error code's negative. */
PYRUNTIME_API int64_t pyruntime_workspace_bytes(const PyruntimeWorkspace* shape);
/* Once, before any rank uses it. The only time that anything is zeroed. */
PYRUNTIME_API int pyruntime_prepare_workspace(const PyruntimeWorkspace* shape, void* workspace, void* stream);

typedef enum {
  PYRUNTIME_NO_FAILURE = 0,
  PYRUNTIME_FAILURE_CLAIMED = 1, /* being written; not seen once the stream has ended */
  PYRUNTIME_FAILED = 2
} PyruntimeFailureState;

typedef enum {
  PYRUNTIME_OP_WAIT = 0,
  PYRUNTIME_OP_PUSH = 1,
  PYRUNTIME_OP_ALL_GATHER_MATMUL = 2,
  PYRUNTIME_OP_MATMUL_REDUCE_SCATTER = 3,
  PYRUNTIME_OP_MULTICAST = 4
} PyruntimeOp;

typedef struct {
  uint32_t state; /* PyruntimeFailureState; the first failure stays */
  int32_t op;     /* PyruntimeOp */
  int32_t rank;   /* that waited */
  int32_t peer;   /* that was waited for */
  int32_t chunk;  /* the flag; -1: leave to write into the peer's workspace */
  int32_t slot;
  uint64_t expected; /* epoch */
  uint64_t seen;
} PyruntimeFailure;

/* Waits for the stream, then copies the failure record: this rank's, or that of the rank which told it to
   stop. After a failure the workspaces are of no use until all ranks have prepared them anew. */
PYRUNTIME_API int pyruntime_failure(const PyruntimeGroup* group, PyruntimeFailure* out, void* stream);
/* The record as a sentence, cut to `size` with its final zero. */
PYRUNTIME_API int pyruntime_describe_failure(const PyruntimeFailure* failure, char* out, int64_t size);

/* ---- fused GEMMs; bf16 and fp16, summed in fp32; any m, n, k >= 0 ---- */

typedef struct {
  int32_t dtype, layout, tiles;
  int64_t m, n, k; /* m over all ranks */
  const void* a;
  const void* b;
  const void* bias; /* [n] or nullptr, added before rounding */
  void* c;
  int64_t lda, ldb, ldc; /* elements from row to row, as the matrix lies in memory */
  int32_t most_blocks;   /* 0: as many as are resident at once; fewer where ranks share a GPU */
  int32_t spare_blocks;  /* fewer than that, so that other kernels find room while this one waits */
} PyruntimeMatmul;

/* Which tiles a GEMM is quickest with: a rule of the sizes and the number of multiprocessors, so ranks
   with equal devices and equal sizes choose alike. `chunk_rows` are the rows of one rank. */
PYRUNTIME_API int pyruntime_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n);

/* C [m, n] = gather(A_shard) B; A_shard holds this rank's rows of [m, k]. The others' rows come into the slot
   by pyruntime_put() and pyruntime_pass_on(), where they lie as the rows of [m, k] do, whole vectors of 8
   elements apart, a flag for each piece. The slot stays readable until pyruntime_finish(). */
PYRUNTIME_API int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                              void* stream);
/* C = this rank's rows of sum over ranks of A B, C [rows of this rank, n]: parts are rounded to dtype, summed
   in rank order in fp32 (+ bias) and rounded once. All in one launch, which also finishes the flight. */
PYRUNTIME_API int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                                  void* stream);
/* ---- chunks, for GEMMs that another library computes ----

   A flight on a slot is: any puts, on one stream, then pyruntime_end_puts() there; any pyruntime_await() on
   the stream that reads; pyruntime_finish() on that stream when all is read. Every rank does all three in
   every flight, also one that puts nothing. What a chunk's bytes and flags mean is the caller's.

   A fused GEMM may stand for some of that, on this rank alone: pyruntime_all_gather_matmul() waits for flags
   0 to pieces - 1 itself, and pyruntime_matmul_reduce_scatter() puts, awaits and finishes;
   only pyruntime_end_puts() is left to call. Of a part of `rows` rows they raise, and wait for, as many flags
   from 0 on as there are signals of so many rows. */

/* Copies `bytes` by a copy engine into the slot of `peer`, from byte `offset` of its data on, and raises this
   rank's `flags` flags from `first` on there. Waits, on the device, until the peer has done with what the
   slot held before. */
PYRUNTIME_API int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer,
                                int64_t offset, int32_t first, int32_t flags, void* stream);
/* Where a peer's piece does not come from the peer itself: waits, on the device, until the `flags` flags of
   `origin` from `first` on are raised in this rank's slot, then does with `bytes` of the slot, from byte
   `offset` of its data on, what pyruntime_put() does, to the same place in the slot of `peer`, and raises the
   flags of `origin` there. It is a put of this flight; pyruntime_finish() must come after it. */
PYRUNTIME_API int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                                    int64_t offset, int32_t first, int32_t flags, void* stream);
/* No put of this flight comes any more. */
PYRUNTIME_API int pyruntime_end_puts(const PyruntimeGroup* group, void* stream);
/* This rank has read all that it wanted of the slot. */
PYRUNTIME_API int pyruntime_finish(const PyruntimeGroup* group, void* stream);
/* Waits, on the device, until `peer` has raised its `flags` flags from `first` on in this rank's slot. */
PYRUNTIME_API int pyruntime_await(const PyruntimeGroup* group, int32_t peer, int32_t first, int32_t flags,
                                  void* stream);
/* Where the data of this rank's slot begin. */
PYRUNTIME_API int pyruntime_slot_data(const PyruntimeGroup* group, void** data);
/* 1 where what is put on the stream now is captured into a graph instead of run, else 0. */
PYRUNTIME_API int pyruntime_is_capturing(void* stream);
/* Of the current device. */
PYRUNTIME_API int pyruntime_multiprocessors(void);

/* ---- one address for all ranks' copies (NVLink multicast) ----

   `multicast` stands for byte 0 of every rank's workspace at once. Chunks lie at the same place in all slots.
 */

/* 0 where this dialect and the current device can use such an address; else pyruntime_error() says why not.
   Whether the devices of a group have one is asked of who maps it. */
PYRUNTIME_API int pyruntime_can_multicast(void);
/* pyruntime_put() of `bytes` of this rank's own slot, from byte `offset` of its data on, to the same place in
   all others', stored once. Waits until all peers have done with what the slot held before. Stores into this
   rank's own slot too, the bits that it has: pyruntime_finish() must come after it. */
PYRUNTIME_API int pyruntime_put_to_all(const PyruntimeGroup* group, void* multicast, int64_t offset,
                                       int64_t bytes, int32_t first, int32_t flags, void* stream);
/* out[i] = the sum over all ranks of element i of what lies in their slots from byte `offset` of the data on
   [+ bias[i % width], after rounding], in an order and with a precision that are the switch's: other bits
   than pyruntime_reduce(). Every rank has written its part and said so by a flag that was awaited. */
PYRUNTIME_API int pyruntime_sum_copies(const PyruntimeGroup* group, void* multicast, void* out,
                                       int64_t offset, int64_t count, int32_t dtype, const void* bias,
                                       int64_t width, void* stream);
/* Where peers may read this rank's slot: waits, on the device, until all have finished the last flight in it,
   before this rank, or a put of it, writes there or to them. */
PYRUNTIME_API int pyruntime_await_leave(const PyruntimeGroup* group, void* stream);

/* ---- support ---- */

/* out[i] = round(parts[0][i] + parts[1][i] + ... [+ bias[i % width]]), summed in that order in fp32. */
PYRUNTIME_API int pyruntime_reduce(void* out, const void* const* parts, int32_t count_of_parts, int64_t count,
                                   int32_t dtype, const void* bias, int64_t width, void* stream);

typedef struct {
  void* param;      /* dtype; nullptr where the master is the parameter itself */
  float* master;    /* read and updated */
  const void* grad; /* grad_dtype */
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  double weight_decay;
} PyruntimeAdamwTensor;

typedef struct {
  double lr, beta1, beta2, eps;
  int64_t step; /* the first is 1 */
} PyruntimeAdamwOptions;

/* `tensors` lies on the host. grad_scale: one float on the device, or nullptr; NaN there, when the kernel
   runs, means that nothing is updated. `device_options`: a PyruntimeAdamwOptions on the device that is read
   in place of `options` when the kernel runs, for CUDA graphs; or nullptr. */
PYRUNTIME_API int pyruntime_adamw(const PyruntimeAdamwTensor* tensors, int32_t count_of_tensors,
                                  int32_t param_dtype, int32_t grad_dtype,
                                  const PyruntimeAdamwOptions* options,
                                  const PyruntimeAdamwOptions* device_options, const float* grad_scale,
                                  void* stream);

/* ---- layers: one pass over memory each; bf16, fp16 and fp32, arithmetic in fp32, one rounding ---- */

/* y = silu(gate) * up, [rows, features] each; gate and up may lie side by side in one matrix. The backward
   reads gate, up and, in place of y, its gradient. */
typedef struct {
  int32_t dtype;
  int64_t rows, features;
  const void* gate;
  const void* up;
  void* y;     /* written by the forward; the gradient of y, and only read, in the backward */
  void* dgate; /* both of the backward alone; each may lie where its operand does */
  void* dup;
  int64_t gate_up_pitch, y_pitch, dgate_dup_pitch; /* elements from row to row */
} PyruntimeSwiglu;

PYRUNTIME_API int pyruntime_swiglu(const PyruntimeSwiglu* swiglu, void* stream);
PYRUNTIME_API int pyruntime_swiglu_backward(const PyruntimeSwiglu* swiglu, void* stream);

/* Where the heads of q, k or v lie: element strides, those of a head side by side. */
typedef struct {
  void* data;
  int64_t batch_stride, position_stride, head_stride;
} PyruntimeHeads;

/* Rotates the heads of q and k by their positions, each head [a | b] as halves, from one layout into another
   or in place; v is copied, and left alone where both its addresses are the same. */
typedef struct {
  int32_t dtype;
  int32_t inverse; /* 0, or 1 for the transpose, which is the backward */
  int64_t batch, positions, head_dim;
  int64_t heads[3]; /* of q, k and v */
  PyruntimeHeads from[3], to[3];
  const float* cos; /* [positions, head_dim] both */
  const float* sin;
} PyruntimeRope;

PYRUNTIME_API int pyruntime_rope(const PyruntimeRope* rope, void* stream);

/* Columns vocab_start .. vocab_start + columns of the logits of all rows; labels [rows] count from the
   vocabulary's start. */
typedef struct {
  int32_t dtype;
  int64_t rows, columns, pitch;
  const void* data;
  const int64_t* labels;
  int64_t vocab_start;
} PyruntimeLogits;

/* stats [rows, 3]: the maximum, the sum of exp(logit - maximum), and the label's logit, 0 where the label
   lies in another shard. The same bits in every run. */
PYRUNTIME_API int pyruntime_cross_entropy_stats(const PyruntimeLogits* logits, float* stats, void* stream);
/* dlogits = grad * (exp(logits - lse) - onehot(labels)), with lse [rows] over the whole vocabulary and grad
   [rows] of each row's loss; rows whose grad is 0 become 0. dlogits may be the logits. */
PYRUNTIME_API int pyruntime_cross_entropy_gradient(const PyruntimeLogits* logits, const float* lse,
                                                   const float* grad, void* dlogits, int64_t dpitch,
                                                   void* stream);

#ifdef __cplusplus
}
#endif
