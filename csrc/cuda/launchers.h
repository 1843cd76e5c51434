/* The interface of libpyruntime_cuda: plain C, raw pointers, sizes and a stream. Callers need neither torch
   nor a CUDA header; a stream is a cudaStream_t (hipStream_t), and nullptr the default stream.

   A function that returns int returns 0, or an error code below; pyruntime_error() then explains it in a
   sentence. All arguments are checked before anything is launched. Unless stated otherwise, nothing is
   allocated and nothing waits for the device.

   The protocol between ranks (workspaces, slots, epochs, signals, deadlines) is in
   csrc/cuda/protocol.md. */
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

/* The number of this interface. Raise it with every change after which an older library must not be called:
   of a function's arguments, of a struct, of the meaning of a value. An added function needs no new number: a
   library without it is refused anyway. */
enum { PYRUNTIME_INTERFACE = 4 };
PYRUNTIME_API int pyruntime_interface(void);

enum { PYRUNTIME_OK = 0, PYRUNTIME_INVALID = 1, PYRUNTIME_DEVICE_ERROR = 2 };

/* The most ranks of a group: no machine has more that share memory. */
enum { PYRUNTIME_MOST_RANKS = 72 };

/* A flight uses one slot of a workspace, so a group has at most so many open flights. */
enum { PYRUNTIME_SLOTS = 4 };

/* The block of a rank's part of a scatter that one flag signals. Blocks are numbered row-major within the
   rows of their owner, whatever tiles the GEMM uses. */
enum { PYRUNTIME_SIGNAL_ROWS = 64, PYRUNTIME_SIGNAL_COLUMNS = 128 };

typedef enum { PYRUNTIME_BF16 = 0, PYRUNTIME_FP16 = 1, PYRUNTIME_FP32 = 2 } PyruntimeDtype;

/* The layouts of the operands of C [m, n] = A B; all are row-major.
     NT  A [m, k], B [n, k]   forward        Y = X W^T
     NN  A [m, k], B [k, n]   gradient of X  dX = dY W */
typedef enum { PYRUNTIME_NT = 0, PYRUNTIME_NN = 1 } PyruntimeLayout;

/* Tiles of the GEMM; ranks may differ. */
typedef enum { PYRUNTIME_TILES_SMALL = 0, PYRUNTIME_TILES_LARGE = 1 } PyruntimeTiles;

/* The sentence for this thread's last error. */
PYRUNTIME_API const char* pyruntime_error(void);

/* ---- groups ---- */

typedef struct {
  int32_t world_size;
  int32_t flags;      /* for each source rank in a slot: pieces of a gather, signals of a scatter */
  int64_t slot_bytes; /* data only */
} PyruntimeWorkspace;

typedef struct {
  PyruntimeWorkspace shape; /* the same on all ranks */
  int32_t rank;
  int32_t slot;            /* the slot of this flight; the same on all ranks */
  int64_t deadline_ns;     /* for each wait */
  void* const* workspaces; /* [world_size], on the host: this rank's address of each rank's workspace */
  int32_t pieces; /* of each rank's rows in a gather, one flag each, the same on all ranks; 0: one for
                     every flag of the workspace */
  int32_t rings;  /* around which a gather's rows travel, both ways. A rank then has 2 * rings pieces:
                     piece i comes forwards around ring i, piece rings + i backwards. 0: each piece
                     comes from its owner, or no gather */
  const int32_t* ring_orders; /* [rings][world_size], on the host: the ranks in the order of each ring */
} PyruntimeGroup;

/* Returns the bytes of a rank's workspace, or the negative of an error code. */
PYRUNTIME_API int64_t pyruntime_workspace_bytes(const PyruntimeWorkspace* shape);
/* Zeroes a workspace's header, counters, credits and flags, once, before any rank uses it. Nothing is zeroed
   later. */
PYRUNTIME_API int pyruntime_prepare_workspace(const PyruntimeWorkspace* shape, void* workspace, void* stream);

typedef enum {
  PYRUNTIME_NO_FAILURE = 0,
  PYRUNTIME_FAILURE_CLAIMED = 1, /* being written; never after the stream has ended */
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
  uint32_t state; /* PyruntimeFailureState; the first failure is kept */
  int32_t op;     /* PyruntimeOp */
  int32_t rank;   /* the waiting rank */
  int32_t peer;   /* the rank it waited for */
  int32_t chunk;  /* the flag; -1: the credit to write into the peer's workspace */
  int32_t slot;
  uint64_t expected; /* epoch */
  uint64_t seen;
} PyruntimeFailure;

/* Waits for the stream, then copies the failure record: this rank's, or that of the rank that stopped it.
   After a failure the workspaces are unusable until all ranks have prepared them again. */
PYRUNTIME_API int pyruntime_failure(const PyruntimeGroup* group, PyruntimeFailure* out, void* stream);
/* Makes a stream that waits for no other, for pyruntime_stop(). It stays for good. */
PYRUNTIME_API int pyruntime_new_stream(void** stream);
/* Ends all waits in this rank's workspace, those under way too, as if a peer had failed. For a host that
   knows that they are in vain, from any of its threads. */
PYRUNTIME_API int pyruntime_stop(const PyruntimeGroup* group, void* stream);
/* Writes the record as a sentence, cut to `size` bytes with its final zero. */
PYRUNTIME_API int pyruntime_describe_failure(const PyruntimeFailure* failure, char* out, int64_t size);

/* ---- fused GEMMs; bf16 and fp16, summed in fp32; any m, n, k >= 0 ---- */

typedef struct {
  int32_t dtype, layout, tiles;
  int64_t m, n, k; /* m over all ranks */
  const void* a;
  const void* b;
  const void* bias; /* [n] or nullptr, added before rounding */
  void* c;
  int64_t lda, ldb, ldc; /* elements from row to row in memory */
  int32_t most_blocks;   /* 0: as many as are resident at once; fewer if ranks share a GPU */
  int32_t spare_blocks;  /* left free, so that other kernels find room while this one waits */
} PyruntimeMatmul;

/* Returns the fastest tiles for a GEMM, by a rule of the sizes and the number of multiprocessors, so ranks
   with equal devices and sizes choose alike. chunk_rows: the rows of one rank. */
PYRUNTIME_API int pyruntime_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n);

/* C [m, n] = gather(A_shard) B; A_shard has this rank's rows of [m, k]. pyruntime_put() and
   pyruntime_pass_on() bring the others' rows into the slot, at their rows of an [m, k] whose pitch is rounded
   up to 8 elements, with a flag for each piece. The slot stays readable until pyruntime_finish(). */
PYRUNTIME_API int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                              void* stream);
/* C [rows of this rank, n] = this rank's rows of the sum of A B over ranks: parts are rounded to dtype,
   summed in rank order in fp32 (+ bias) and rounded once. One launch, which also finishes the flight. */
PYRUNTIME_API int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                                  void* stream);
/* ---- chunks, for GEMMs that another library computes ----

   A flight on a slot is: any puts, on one stream, then pyruntime_end_puts() there; any pyruntime_await() on
   the reading stream; pyruntime_finish() on that stream after all reads. Every rank does all three in every
   flight, even if it puts nothing. The caller decides what a chunk's bytes and flags mean.

   A fused GEMM may replace some of these calls, on this rank only: pyruntime_all_gather_matmul() waits for
   flags 0 to pieces - 1 itself, and pyruntime_matmul_reduce_scatter() puts, awaits and finishes, so that only
   pyruntime_end_puts() remains. For a part of `rows` rows they raise, and wait for, the flags from 0 on, one
   for each signal block. */

/* Copies `bytes` by a copy engine into the slot of `peer`, from byte `offset` of its data on, and raises this
   rank's `flags` flags from `first` on there. Waits, on the device, for the peer's credit: it no longer needs
   the slot's earlier content. */
PYRUNTIME_API int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer,
                                int64_t offset, int32_t first, int32_t flags, void* stream);
typedef struct {
  const void* from;
  int64_t bytes;
  int32_t peer;
  int64_t offset;
  int32_t first, flags;
} PyruntimePut;

/* Does what pyruntime_put() does for each of at most PYRUNTIME_MOST_RANKS puts, but waits once, before the
   first, and raises the flags of all behind the last. */
PYRUNTIME_API int pyruntime_put_together(const PyruntimeGroup* group, const PyruntimePut* puts, int32_t count,
                                         void* stream);
/* Passes a piece of `origin` on to `peer`. Waits, on the device, until the `flags` flags of `origin` from
   `first` on are raised in this rank's slot. Then puts `bytes` of the slot, from byte `offset` of its data
   on, at the same place in the slot of `peer`, and raises the flags of `origin` there. It is a put of this
   flight; pyruntime_finish() must come after it. */
PYRUNTIME_API int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                                    int64_t offset, int32_t first, int32_t flags, void* stream);
/* Ends the puts of this flight. */
PYRUNTIME_API int pyruntime_end_puts(const PyruntimeGroup* group, void* stream);
/* Ends the flight: this rank has read all that it wanted from the slot. */
PYRUNTIME_API int pyruntime_finish(const PyruntimeGroup* group, void* stream);
/* Waits, on the device, until `peer` has raised its `flags` flags from `first` on in this rank's slot. */
PYRUNTIME_API int pyruntime_await(const PyruntimeGroup* group, int32_t peer, int32_t first, int32_t flags,
                                  void* stream);
/* Waits in one launch until all other ranks have raised these flags. */
PYRUNTIME_API int pyruntime_await_all(const PyruntimeGroup* group, int32_t first, int32_t flags,
                                      void* stream);
/* Sets *data to the start of the data of this rank's slot. */
PYRUNTIME_API int pyruntime_slot_data(const PyruntimeGroup* group, void** data);
/* Returns 1 if the stream is being captured into a graph, else 0. */
PYRUNTIME_API int pyruntime_is_capturing(void* stream);
/* Returns the multiprocessors of the current device. */
PYRUNTIME_API int pyruntime_multiprocessors(void);

/* ---- one address for all ranks' copies (NVLink multicast) ----

   `multicast` addresses byte 0 of every rank's workspace at once. Chunks are at the same place in all slots.
 */

/* Returns 0 if this dialect and the current device can use such an address; else pyruntime_error() says why
   not. Only the code that maps one knows whether a group's devices have it. */
PYRUNTIME_API int pyruntime_can_multicast(void);
/* Does what pyruntime_put() does with `bytes` of this rank's own slot, from byte `offset` of its data on, to
   the same place in all others, stored once. Waits for the credits of all peers. Also stores the unchanged
   bits into this rank's own slot: pyruntime_finish() must come after it. */
PYRUNTIME_API int pyruntime_put_to_all(const PyruntimeGroup* group, void* multicast, int64_t offset,
                                       int64_t bytes, int32_t first, int32_t flags, void* stream);
/* out[i] = the sum over all ranks of element i in their slots, from byte `offset` of the data on [+
   bias[i % width], after rounding]. The switch decides order and precision, so the bits differ from
   pyruntime_reduce(). Every rank must have written its part, and its flag must have been awaited. */
PYRUNTIME_API int pyruntime_sum_copies(const PyruntimeGroup* group, void* multicast, void* out,
                                       int64_t offset, int64_t count, int32_t dtype, const void* bias,
                                       int64_t width, void* stream);
/* For slots that peers read: waits, on the device, until all have finished the last flight in it, before this
   rank, or a put of it, writes there or to them. */
PYRUNTIME_API int pyruntime_await_leave(const PyruntimeGroup* group, void* stream);

/* ---- support ---- */

/* out[i] = round(parts[0][i] + parts[1][i] + ... [+ bias[i % width]]), summed in that order in fp32. If there
   are more than PYRUNTIME_MOST_RANKS parts, all but one of them must lie at equal distances. most_blocks: for
   a sum beside GEMMs, which get the rest of the device; 0: as many as fit. The bits are the same. */
PYRUNTIME_API int pyruntime_reduce(void* out, const void* const* parts, int32_t count_of_parts, int64_t count,
                                   int32_t dtype, const void* bias, int64_t width, int32_t most_blocks,
                                   void* stream);

/* With a master the parameter becomes the rounded master. Without one it is bf16, read and updated itself,
   and rounded up or down at random so that the mean is exact: element i by the random number of
   (seed, first + i), which is that of the CPU path. */
typedef struct {
  void* param;      /* of param_dtype; nullptr if the master is the parameter itself */
  float* master;    /* read and updated; nullptr: none */
  const void* grad; /* grad_dtype */
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  double weight_decay;
  uint32_t seed, first;
} PyruntimeAdamwTensor;

typedef struct {
  double lr, beta1, beta2, eps;
  int64_t step; /* the first is 1 */
} PyruntimeAdamwOptions;

/* tensors: on the host; all have masters, or none. grad_scale: one float on the device, or nullptr; if it is
   NaN when the kernel runs, nothing is updated. device_options: on the device, or nullptr; read instead of
   `options` when the kernel runs, for CUDA graphs. */
PYRUNTIME_API int pyruntime_adamw(const PyruntimeAdamwTensor* tensors, int32_t count_of_tensors,
                                  int32_t param_dtype, int32_t grad_dtype,
                                  const PyruntimeAdamwOptions* options,
                                  const PyruntimeAdamwOptions* device_options, const float* grad_scale,
                                  void* stream);

typedef struct {
  PyruntimeAdamwTensor tensor; /* `param` is only read, and only without a master */
  void* ahead;                 /* of param_dtype; becomes what the step would make of the parameter */
  const void* earlier_grad;    /* grad_dtype; of the step before, which master and moments do not have yet and
                                  first take; nullptr: they have it. Only with a master */
} PyruntimeAdamwAhead;

/* A step that may be dropped: masters and moments do not take it. The bits are those of pyruntime_adamw().
   param_dtype: also fp32. earlier: the options of the step before; may be nullptr without earlier grads. */
PYRUNTIME_API int pyruntime_adamw_ahead(const PyruntimeAdamwAhead* tensors, int32_t count_of_tensors,
                                        int32_t param_dtype, int32_t grad_dtype,
                                        const PyruntimeAdamwOptions* options,
                                        const PyruntimeAdamwOptions* earlier, float grad_scale, void* stream);

/* ---- layers: one pass over memory each; bf16, fp16 and fp32, arithmetic in fp32, one rounding ---- */

/* y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), a row at a time; all contiguous. With a
   residual, x + residual is rounded, stored in `summed` and normalised. The backward reads x (what was
   normalised), weight, rstd and, in place of y, its gradient; sums have a fixed order. */
typedef struct {
  int32_t dtype;
  int64_t rows, columns;
  const void* x;    /* [rows, columns] */
  const void* also; /* nullptr, or [rows, columns]: the residual; backward: a gradient that is added to dx */
  const void* weight; /* [columns] */
  void* y;            /* forward: written; backward: the gradient of y, only read */
  void* summed;       /* forward: x + residual, nullptr without one */
  float* rstd;        /* [rows]; forward: written; backward: only read */
  void* dx;           /* backward only, as dweight and parts */
  void* dweight;      /* [columns] */
  float* parts;       /* [pyruntime_rms_norm_parts(), columns], for the kernels' use */
  float eps;
} PyruntimeRmsNorm;

PYRUNTIME_API int pyruntime_rms_norm(const PyruntimeRmsNorm* norm, void* stream);
PYRUNTIME_API int64_t pyruntime_rms_norm_parts(int32_t dtype, int64_t rows, int64_t columns);
PYRUNTIME_API int pyruntime_rms_norm_backward(const PyruntimeRmsNorm* norm, void* stream);

/* y = silu(gate) * up, [rows, features] each; gate and up may be side by side in one matrix. The backward
   reads gate, up and, in place of y, its gradient. */
typedef struct {
  int32_t dtype;
  int64_t rows, features;
  const void* gate;
  const void* up;
  void* y;     /* forward: written; backward: the gradient of y, only read */
  void* dgate; /* dgate and dup: backward only; each may overwrite its operand */
  void* dup;
  int64_t gate_up_pitch, y_pitch, dgate_dup_pitch; /* elements from row to row */
} PyruntimeSwiglu;

PYRUNTIME_API int pyruntime_swiglu(const PyruntimeSwiglu* swiglu, void* stream);
PYRUNTIME_API int pyruntime_swiglu_backward(const PyruntimeSwiglu* swiglu, void* stream);

/* The gating of experts, times the weight p of each row: y = p * u * g * sigmoid(alpha * g),
   where g is gate up to `limit`, and u is shift + up within [-limit, limit]; all contiguous. The backward
   writes y once more. The sums over a row's features have a fixed order. */
typedef struct {
  int32_t dtype;
  int32_t interleaved; /* a row of gate_up has 0: all of gate first; 1: gate and up in turns */
  int64_t rows, features;
  const void* gate_up;       /* [rows, 2 features] */
  const float* weights;      /* [rows]; p */
  void* y;                   /* [rows, features] */
  const void* grad;          /* [rows, features]; of y; backward only, as what is below */
  void* dgate_up;            /* [rows, 2 features] */
  float* dweights;           /* [rows] */
  float alpha, limit, shift; /* SwiGLU: 1, infinity, 0 */
} PyruntimeGating;

PYRUNTIME_API int pyruntime_weighted_gating(const PyruntimeGating* gating, void* stream);
PYRUNTIME_API int pyruntime_weighted_gating_backward(const PyruntimeGating* gating, void* stream);

/* The order of the rows that a router has sent to experts. Place p of the table is slot p % slots of row
   p / slots; expert e belongs to group (e - first) / per, if that is one of `groups`. Every group gets its
   places in ascending order, with per > 1 only the first of a row; groups follow one another. Nothing beyond
   the sum of all counts is written into what is written for each place in that order. */
typedef struct {
  int64_t rows;
  int32_t slots;
  int32_t first, per, groups;
  const float* table; /* [rows, 2 slots]: the experts of each row, or -1 for none, then the weight of each */
  int64_t* counts;    /* [groups]: the places of each */
  int32_t* scratch;   /* [pyruntime_sort_routes_scratch()], for the kernels' use */
  int64_t* rows_of;   /* [rows * slots]: in the order of the groups, the row of each place */
  int64_t* places;    /* [rows * slots]: the place itself; nullptr: not asked for */
  float* weights;     /* [rows * slots]: its weight; nullptr: not asked for */
  int32_t*
      positions; /* [rows * slots]: where each place is in that order, -1: nowhere; nullptr: not asked for */
} PyruntimeRoutes;

PYRUNTIME_API int pyruntime_sort_routes(const PyruntimeRoutes* routes, void* stream);
PYRUNTIME_API int64_t pyruntime_sort_routes_scratch(int64_t rows, int32_t slots, int32_t groups);

/* y [rows, columns]: for each row the sum of the rows of `values` at its positions, as
   pyruntime_sort_routes() writes them, without those below 0: in ascending order, in fp32, rounded once. */
typedef struct {
  int32_t dtype;
  int32_t slots;
  int64_t rows, columns, held;
  const int32_t* positions; /* [rows, slots], below `held`; those of a row differ */
  const void* values;       /* [held, columns] */
  void* y;
} PyruntimePlaceSums;

PYRUNTIME_API int pyruntime_sum_places(const PyruntimePlaceSums* sums, void* stream);

/* The address of the heads of q, k or v; strides in elements, the elements of a head contiguous. */
typedef struct {
  void* data;
  int64_t batch_stride, position_stride, head_stride;
} PyruntimeHeads;

/* Rotates the heads of q and k by their positions, each head [a | b] as halves, from one layout into another
   or in place. v is copied, unless both its addresses are the same. */
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

/* Columns vocab_start .. vocab_start + columns of all rows' logits; labels [rows] count from the start of the
   whole vocabulary. */
typedef struct {
  int32_t dtype;
  int64_t rows, columns, pitch;
  const void* data;
  const int64_t* labels;
  int64_t vocab_start;
} PyruntimeLogits;

/* stats [rows, 3]: the maximum, the sum of exp(logit - maximum), and the label's logit, 0 if the label is in
   another shard. The same bits in every run. */
PYRUNTIME_API int pyruntime_cross_entropy_stats(const PyruntimeLogits* logits, float* stats, void* stream);
/* dlogits = grad * (exp(logits - lse) - onehot(labels)), with lse [rows] over the whole vocabulary and grad
   [rows], the gradient of each row's loss; rows with a grad of 0 become 0. dlogits may be the logits. */
PYRUNTIME_API int pyruntime_cross_entropy_gradient(const PyruntimeLogits* logits, const float* lse,
                                                   const float* grad, void* dlogits, int64_t dpitch,
                                                   void* stream);

/* ---- compression: one pass over memory each, the bits of csrc/cpu/compression; all contiguous ---- */

/* Packs values [rows, width] into packed [rows, width + ceil(width / 128)], as fp8.h says, and the inverse.
 */
PYRUNTIME_API int pyruntime_pack_fp8(const void* values, int32_t dtype, int64_t rows, int64_t width,
                                     uint8_t* packed, void* stream);
PYRUNTIME_API int pyruntime_unpack_fp8(const uint8_t* packed, int64_t rows, int64_t width, void* values,
                                       int32_t dtype, void* stream);

typedef struct {
  int32_t dtype; /* of the values */
  int32_t bits;  /* of a code, 1 to 8 */
  int64_t count;
  const void* values;
  float* residual;   /* nullptr, or [count]: added to the values; becomes what the codes lose */
  uint8_t* packed;   /* the memory that quantize.h describes */
  int32_t is_random; /* 0: rounded to the nearest; 1: at random, by the seed and the first value's index */
  uint32_t seed, first;
} PyruntimeQuantized;

PYRUNTIME_API int pyruntime_quantize(const PyruntimeQuantized* quantized, void* stream);
/* Writes the values of the codes to out [count], or adds them. */
PYRUNTIME_API int pyruntime_dequantize(const uint8_t* packed, int32_t bits, float* out, int64_t count,
                                       int32_t add, void* stream);

#ifdef __cplusplus
}
#endif
