// C = this rank's rows of the sum over ranks of A B, in one kernel. Tiles of the next rank's rows come first
// and this rank's own last. A finished tile for another rank goes into its owner's slot, followed by its
// signals. A finished own tile is summed with the others' tiles straight from shared memory, so nothing
// remains to be done after the last GEMM.
//
// No block waits for another block's own tile, and tiles for others wait only for the epoch before. So some
// rank can always proceed.
#pragma once

#include "cuda/portable/workspace.cuh"
#include "matrices.cuh"
#include "tile_gemm.cuh"

namespace pyruntime::portable {

// Returns the sum over all ranks of 8 elements, of which `existing` exist: parts in rank order in fp32, this
// rank's own among them, then the bias, rounded once. The others' parts start at `parts` and are `stride`
// elements apart.
template <class T>
PYRUNTIME_DEVICE Vector<T> sum_of_parts(const T* parts, int64_t stride, const Group& group,
                                        const Vector<T>& own, const T* bias, int existing) {
  float sums[8] = {};
#pragma unroll 8  // loads of several ranks under way at once; they are added in rank order
  for (int source = 0; source < group.world_size(); ++source) {
    const Vector<T> one = source == group.rank ? own : load_vector_streaming(parts + source * stride);
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[e] += to_float(one.values[e]);
  }
  Vector<T> rounded;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (bias != nullptr && e < existing) sums[e] += to_float(bias[e]);
    rounded.values[e] = round_to<T>(sums[e]);
  }
  return rounded;
}

// Raises the signals of a part in the owner's slot; called by one thread after the part is written.
PYRUNTIME_DEVICE void raise_signals(const Group& group, int owner, const Signals& signals, uint64_t epoch) {
  device::release_system();
  for (int i = 0; i < signals.count(); ++i) {
    device::store_relaxed_system(group.flag(owner, group.rank, signals.number(i)), epoch);
  }
}

template <class T>
struct ScatterJob {
  using Element = T;

  TileSchedule schedule;
  int64_t k;
  Matrices<T> matrices;
  Group group;
  int64_t part_elements;  // in one rank's part of the slot
  int64_t part_pitch;     // whole vectors

  PYRUNTIME_DEVICE const T* early_bias() const { return nullptr; }

  struct Run {
    const ScatterJob& job;
    uint64_t epoch;

    PYRUNTIME_DEVICE bool is_own(const Tile& tile) const { return tile.chunk.owner == job.group.rank; }

    // Returns the address, in the owner's slot, of `source`'s part of an element of the tile.
    PYRUNTIME_DEVICE T* part(const Tile& tile, int source, int row, int column) const {
      return job.group.template data<T>(tile.chunk.owner) + source * job.part_elements +
             (tile.row + row) * job.part_pitch + tile.column + column;
    }

    PYRUNTIME_DEVICE bool begin(const Tile& tile) {
      const auto may_go_on = [&] {
        return is_own(tile) ? !has_failed(job.group) : wait_for_credit(job.group, tile.chunk.owner, epoch);
      };
      return device::barrier_and(threadIdx.x != 0 || may_go_on());
    }
    PYRUNTIME_DEVICE Operand<T> a(const Tile& tile) const {
      return operand_a(job.matrices.a, job.matrices.lda, tile.chunk.begin + tile.row, tile.rows);
    }
    template <int kLayout>
    PYRUNTIME_DEVICE Operand<T> b(const Tile& tile) const {
      return operand_b<kLayout>(job.matrices, tile);
    }

    PYRUNTIME_DEVICE bool before_store(const Tile& tile) {
      return device::barrier_and(!is_own(tile) || parts_arrived(tile));
    }

    // Each thread waits for some of the peers' signals.
    PYRUNTIME_DEVICE bool parts_arrived(const Tile& tile) const {
      const Group& group = job.group;
      const Signals signals = signals_of(tile, job.schedule.columns);
      const int threads = static_cast<int>(blockDim.x), all = group.world_size() * signals.count();
      for (int i = static_cast<int>(threadIdx.x); i < all; i += threads) {
        const int peer = i % group.world_size(), number = signals.number(i / group.world_size());
        if (peer == group.rank) continue;
        if (!wait_for(group, group.flag(group.rank, peer, number), epoch, peer, number)) return false;
      }
      return true;
    }

    PYRUNTIME_DEVICE void store(const Tile& tile, int row, int column, const Vector<T>& vector) {
      if (!is_own(tile)) return store_vector(part(tile, job.group.rank, row, column), vector);
      const int existing = tile.columns - column;
      const T* bias = job.matrices.bias;
      const Vector<T> rounded =
          sum_of_parts(part(tile, 0, row, column), job.part_elements, job.group, vector,
                       bias == nullptr ? nullptr : bias + tile.column + column, existing);
      store_existing(job.matrices.c + (tile.row + row) * job.matrices.ldc + tile.column + column, rounded,
                     existing);
    }

    PYRUNTIME_DEVICE void after_store(const Tile& tile) {
      device::publishing_barrier();
      if (!is_own(tile) && threadIdx.x == 0) {
        raise_signals(job.group, tile.chunk.owner, signals_of(tile, job.schedule.columns), epoch);
      }
    }
    PYRUNTIME_DEVICE void end() { end_flight(job.group, epoch); }
  };

  PYRUNTIME_DEVICE Run start() const { return {*this, group.control().epochs + 1}; }
};

// For launchers: the elements of the largest part of any rank, and of a row of a part.
int64_t part_elements(int64_t m, int64_t n, int world_size);
int64_t part_pitch(int64_t n);
// Checks the GEMM against the group's workspace.
void check_scatter(const Group& group, const PyruntimeMatmul& matmul);

}  // namespace pyruntime::portable
