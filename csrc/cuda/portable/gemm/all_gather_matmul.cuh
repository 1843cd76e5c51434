// C = gather(A_shard) B in one kernel: first the tiles of its own rows, then those of rank + 1, rank + 2, ...
// as their rows arrive in this rank's slot; around rings, the pieces in the order of the rings.
#pragma once

#include "cuda/portable/workspace.cuh"
#include "matrices.cuh"
#include "tile_gemm.cuh"

namespace pyruntime::portable {

// Returns the pitch of gathered rows in the slot, a multiple of 8 elements for any k.
PYRUNTIME_HOST_DEVICE int64_t padded_width(int64_t width) {
  return (width + 7) / 8 * 8;
}

// Returns the first row of a piece of `rows` rows, cut as ChunkPlan cuts them.
PYRUNTIME_HOST_DEVICE int first_row_of_piece(int rows, int pieces, int piece) {
  const int longer = rows % pieces;  // the first pieces have one row more
  return piece * (rows / pieces) + (piece < longer ? piece : longer);
}

// Waits for all pieces that contain rows of the tile; called by one thread. False: stop.
PYRUNTIME_DEVICE bool rows_arrived(const Group& group, const Tile& tile, uint64_t epoch) {
  const int owner = tile.chunk.owner, pieces = group.pieces;
  if (owner == group.rank) return !has_failed(group);
  const bool whole = tile.chunk.piece == Chunk::kAll;
  const int first_piece = whole ? 0 : tile.chunk.piece,
            last = whole ? pieces : first_piece + tile.chunk.pieces;
  for (int piece = first_piece; piece < last; ++piece) {
    if (whole) {
      const int first = first_row_of_piece(tile.chunk.rows, pieces, piece);
      const int end = first_row_of_piece(tile.chunk.rows, pieces, piece + 1);
      if (end <= tile.row || first >= tile.row + tile.rows) continue;
    }
    if (!wait_for(group, group.flag(group.rank, owner, piece), epoch, owner, piece)) return false;
  }
  return true;
}

template <class T>
struct GatherJob {
  using Element = T;

  TileSchedule schedule;
  int64_t k;
  Matrices<T> matrices;
  Group group;

  PYRUNTIME_DEVICE const T* early_bias() const { return matrices.bias; }

  struct Run {
    const GatherJob& job;
    uint64_t epoch;

    PYRUNTIME_DEVICE bool begin(const Tile& tile) {
      // One thread acquires and the barrier passes it on. The copies that follow bypass L1.
      return device::barrier_and(threadIdx.x != 0 || rows_arrived(job.group, tile, epoch));
    }
    PYRUNTIME_DEVICE Operand<T> a(const Tile& tile) const {
      if (tile.chunk.owner == job.group.rank) {
        return operand_a(job.matrices.a, job.matrices.lda, tile.row, tile.rows);
      }
      const int64_t pitch = padded_width(job.k);
      const T* gathered = job.group.template data<T>(job.group.rank);
      return operand_a(gathered, pitch, tile.chunk.begin + tile.row, tile.rows);
    }
    template <int kLayout>
    PYRUNTIME_DEVICE Operand<T> b(const Tile& tile) const {
      return operand_b<kLayout>(job.matrices, tile);
    }
    PYRUNTIME_DEVICE bool before_store(const Tile&) {
      __syncthreads();
      return true;
    }
    PYRUNTIME_DEVICE void store(const Tile& tile, int row, int column, const Vector<T>& vector) {
      const int64_t at = tile.chunk.begin + tile.row + row;
      store_existing(job.matrices.c + at * job.matrices.ldc + tile.column + column, vector,
                     tile.columns - column);
    }
    PYRUNTIME_DEVICE void after_store(const Tile&) { __syncthreads(); }
    PYRUNTIME_DEVICE void end() {}  // pyruntime_finish() ends the flight
  };

  PYRUNTIME_DEVICE Run start() const { return {*this, group.control().epochs + 1}; }
};

// For launchers: checks the GEMM against the group's workspace.
void check_gather(const Group& group, const PyruntimeMatmul* matmul);

}  // namespace pyruntime::portable
