// This rank's rows on their way into the slots of all others, each piece followed by its signal. The peer
// that needs them first is rank - 1, whose order of chunks is rank - 1, rank, ...; then rank - 2, and so on.
#include "all_gather_matmul.cuh"
#include "checks.h"
#include "puts.cuh"

namespace pyruntime::portable {

namespace {

constexpr int kThreads = 256;

struct Push {
  Group group;
  const unsigned char* from;  // this rank's rows
  int64_t from_pitch;         // bytes
  int64_t row_bytes;          // that exist
  int64_t to_pitch;           // bytes; whole vectors
  int64_t first_row;          // of this rank's rows among all
  int rows;

  PYRUNTIME_HOST_DEVICE int peer(int step) const {
    return (group.rank + group.world_size() - step) % group.world_size();
  }
  PYRUNTIME_HOST_DEVICE int begin(int piece) const { return first_row_of_piece(rows, group.pieces, piece); }
  PYRUNTIME_HOST_DEVICE unsigned char* target(int peer, int row) const {
    return group.data<unsigned char>(peer) + (first_row + row) * to_pitch;
  }
};

// Rows [begin, end) by all threads of the grid.
PYRUNTIME_DEVICE void copy_rows(const Push& push, int peer, int begin, int end) {
  const int64_t vectors = push.to_pitch / 16, count = (end - begin) * vectors;
  const bool aligned = is_aligned(push.from) && push.from_pitch % 16 == 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t row = begin + i / vectors, at = i % vectors * 16;
    const unsigned char* from = push.from + row * push.from_pitch + at;
    unsigned char* to = push.target(peer, static_cast<int>(row)) + at;
    if (aligned && at + 16 <= push.row_bytes) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 16; e += 2) {  // what pads a row is never read
        if (at + e < push.row_bytes) {
          *reinterpret_cast<uint16_t*>(to + e) = *reinterpret_cast<const uint16_t*>(from + e);
        }
      }
    }
  }
}

PYRUNTIME_KERNEL(kThreads, 1)
push_chunk(PYRUNTIME_PARAMETER Push parameter) {
  const Push& push = device::first_parameter(parameter);
  const Group& group = push.group;
  const uint64_t epoch = group.control().pushes + 1;
  bool ok = true;
  for (int step = 1; ok && step < group.world_size(); ++step) {
    const int peer = push.peer(step);
    ok = device::barrier_and(threadIdx.x != 0 || wait_for_credit(group, peer, epoch));
    for (int piece = 0; ok && piece < group.pieces; ++piece) {
      copy_rows(push, peer, push.begin(piece), push.begin(piece + 1));
      device::publishing_barrier();
      if (threadIdx.x == 0) {
        // The block that comes last signals for all; its fence covers theirs, which the ticket has ordered.
        device::fence_system();
        if (comes_last(group.ticket(peer, piece))) {
          device::store_release_system(group.flag(peer, group.rank, piece), epoch);
        }
      }
    }
  }
  // Every block has read the epoch before it is counted on: the last ticket of the last piece came after
  // that.
  device::publishing_barrier();
  if (threadIdx.x == 0) {
    device::fence_device();
    uint32_t* ticket = group.ticket(group.rank, 0);  // nobody sends to itself, so this one is free
    if (comes_last(ticket) && !has_failed(group)) group.control().pushes = epoch;
  }
}

// ---- by copy engines: one copy a piece, between a wait and a signal of one thread each ----

void push_by_engine(const Push& push, runtime::Stream stream) {
  const Group& group = push.group;
  for (int step = 1; step < group.world_size(); ++step) {
    const int peer = push.peer(step);
    PYRUNTIME_LAUNCH(await_leave_to_put, 1, 32, 0, stream, group, peer);
    for (int piece = 0; piece < group.pieces; ++piece) {
      const int begin = push.begin(piece), rows = push.begin(piece + 1) - begin;
      runtime::copy_rows(push.target(peer, begin), push.to_pitch, push.from + begin * push.from_pitch,
                         push.from_pitch, push.row_bytes, rows, stream);
      PYRUNTIME_LAUNCH(raise_flags, 1, kFlagThreads, 0, stream, group, peer, piece, 1);
    }
  }
  PYRUNTIME_LAUNCH(count_puts, 1, 32, 0, stream, group);
}

}  // namespace
}  // namespace pyruntime::portable

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_push_chunk(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, int32_t engine,
                         int32_t blocks, void* stream) {
  return guarded("push_chunk", [&] {
    Push push{};
    push.group = checked_group(group, PYRUNTIME_OP_PUSH);
    check_gather(push.group, matmul);
    require(blocks >= 0, "blocks=", blocks, "; use 0 for as many as there are multiprocessors.");
    const int64_t bytes = element_bytes(matmul->dtype);
    const Chunk own = ChunkPlan(matmul->m, group->shape.world_size, group->rank).own();
    push.from = static_cast<const unsigned char*>(matmul->a);
    push.from_pitch = matmul->lda * bytes;
    push.row_bytes = matmul->k * bytes;
    push.to_pitch = padded_width(matmul->k) * bytes;
    push.first_row = own.begin;
    push.rows = static_cast<int>(own.rows);
    const auto on = static_cast<runtime::Stream>(stream);
    if (engine != 0) return push_by_engine(push, on);
    const int64_t vectors = own.rows * (push.to_pitch / 16);
    PYRUNTIME_LAUNCH(push_chunk, blocks_for(vectors / kThreads, blocks, 1), kThreads, 0, on, push);
  });
}
