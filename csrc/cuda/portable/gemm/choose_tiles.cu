#include "cuda/launchers.h"
#include "tile_gemm.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n) {
  if (runtime::shared_bytes_per_block() < LargeTiles::kSharedBytes) return PYRUNTIME_TILES_SMALL;
  // Large tiles are faster if they are mostly filled and there is one for every multiprocessor.
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const int64_t across = tiles(n, LargeTiles::kTileColumns);
  const int64_t count = tiles(m, LargeTiles::kTileRows) * across;
  const bool filled = 4 * chunk_rows >= 3 * LargeTiles::kTileRows * tiles(chunk_rows, LargeTiles::kTileRows);
  return filled && count >= runtime::multiprocessors() ? PYRUNTIME_TILES_LARGE : PYRUNTIME_TILES_SMALL;
}
