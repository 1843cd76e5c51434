// The kernel: four kinds of warps, each in a branch of its own, because each has its own share of registers.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "loader.cuh"
#include "mover.cuh"
#include "multipliers.cuh"

namespace pyruntime::sm90 {

// A multiprocessor has 65536 registers: 128 threads take 40 each, 256 take 232. Each multiplier has 128 sums.
constexpr int kFewRegisters = 40;
constexpr int kManyRegisters = 232;

template <class Gemm>
__global__ void __launch_bounds__(kThreads, 1) multiply(const __grid_constant__ Gemm gemm) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Types = typename Gemm::Types;
  using Pipeline = typename Types::Pipeline;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory<Gemm>*>(memory);

  const int warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
  const int block = static_cast<int>(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    shared.stopped = 0;
    Types::Mainloop::prefetch_tma_descriptors(gemm.own);
  }
  typename Pipeline::Params params;
  params.transaction_bytes = Types::Mainloop::TmaTransactionBytes;
  params.role = warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  params.is_leader = threadIdx.x % kWarpgroup == 0;
  params.num_consumers = kMultipliers;
  // Always a row, whatever the cluster's shape: CUTLASS derives from it which blocks must free a stage, and
  // in either shape that is every block.
  Pipeline pipeline(shared.pipeline, params,
                    cute::Shape<cute::Int<Gemm::Config::kCluster>, cute::_1, cute::_1>{});
  // The barriers must be initialized before any thread of either block of the cluster arrives.
  __syncthreads();
  if constexpr (Gemm::Config::kCluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kFewRegisters>();
    if (warp == 0) {
      load_tiles(gemm, shared, pipeline, block);
      arrive(kEnd, kAllButWatcher);
    } else if (warp == 1) {
      watch_tiles(gemm, shared, block);
    } else if (warp == 2) {
      move_tiles(gemm, shared, block);
      wait(kEnd, kAllButWatcher);  // no thread of this block reads the slot any more
      if (gemm.work == Work::kScatter && threadIdx.x % 32 == 0) {
        portable::end_block(gemm.group, gemm.epoch());
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kManyRegisters>();
    multiply_tiles(gemm, shared, pipeline, block);
    arrive(kEnd, kAllButWatcher);
  }
#endif
}

}  // namespace pyruntime::sm90
