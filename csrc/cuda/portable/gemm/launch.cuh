// Launches a job: one declaration for the launchers, one definition for each (tiles, job), which instances.cu
// compiles into separate objects because these take long to compile.
#pragma once

#include <type_traits>

#include "cuda/portable/checks.h"
#include "matrices.cuh"
#include "tile_gemm.cuh"

namespace pyruntime::portable {

template <class Config, class Job>
void launch_tiles(const Job& job, const PyruntimeMatmul& matmul, void* stream);

template <class Config, int kLayout, class Job>
void launch_layout(const Job& job, const PyruntimeMatmul& matmul, void* stream) {
  const auto kernel = tile_gemm<Config, typename Job::Element, kLayout, Job>;
  runtime::allow_shared_bytes(kernel, Config::kSharedBytes);
  const int resident = runtime::resident_blocks(kernel, Config::kThreads, Config::kSharedBytes);
  // The whole grid must be resident, because its blocks wait for other ranks.
  const int fit = blocks_for(job.schedule.count(), matmul.most_blocks, resident < 1 ? 1 : resident);
  const int most = runtime::multiprocessors() * resident - matmul.spare_blocks;
  const int blocks = fit < most ? fit : most < 1 ? 1 : most;
  PYRUNTIME_LAUNCH(kernel, blocks, Config::kThreads, Config::kSharedBytes, stream, job);
}

// Calls use(Config{}) with the requested tiles.
template <class Use>
void with_tiles(int32_t tiles, const Use& use) {
  const int room = runtime::shared_bytes_per_block();
  check_device("the search for a device");
  const auto checked = [&](auto config) {
    using Config = decltype(config);
    require(Config::kSharedBytes <= room, "these tiles need ", Config::kSharedBytes,
            " bytes of shared memory, and a block has ", room, " here; use small tiles (0).");
    use(config);
  };
  if (tiles == PYRUNTIME_TILES_LARGE) {
    checked(LargeTiles{});
  } else {
    checked(SmallTiles{});
  }
}

template <class T>
Matrices<T> matrices_of(const PyruntimeMatmul& matmul) {
  return {static_cast<const T*>(matmul.a),
          static_cast<const T*>(matmul.b),
          static_cast<const T*>(matmul.bias),
          static_cast<T*>(matmul.c),
          matmul.lda,
          matmul.ldb,
          matmul.ldc};
}

// Launches the job make(schedule, matrices) with the requested tiles and element type. order: of the chunks.
template <class Make>
void launch_job(const PyruntimeMatmul& matmul, const std::vector<Chunk>& order, void* stream,
                const Make& make) {
  with_tiles(matmul.tiles, [&](auto tiles) {
    using Config = decltype(tiles);
    const TileSchedule schedule = make_schedule(order, matmul.n, Config::kTileRows, Config::kTileColumns);
    with_half(matmul.dtype, [&](auto element) {
      launch_tiles<Config>(make(schedule, matrices_of<decltype(element)>(matmul)), matmul, stream);
    });
  });
}

}  // namespace pyruntime::portable
