// Chooses the fastest tiles for a GEMM by a model of the time, which depends only on the sizes and on the
// number of blocks that run at one time. So every size has an answer, and ranks with equal devices and sizes
// choose alike.
#pragma once

#include "units.h"

namespace pyruntime::sm90 {

// Time in steps. A step is the time that a block of large tiles takes for 64 elements of k.
struct TileCosts {
  double step, rest;  // `rest`: time of a tile that no other work hides
};

// A small tile is half the work but takes more than half the time, because it reads 1.5 times as much for it.
// Estimated from the widths of shared memory and L2.
constexpr TileCosts kSmallCosts{0.58, 2.0};
constexpr TileCosts kLargeCosts{1.0, 3.0};

template <class Config>
double estimated_time(const TileCosts& costs, int64_t chunk_rows, int64_t m, int64_t n, int64_t k,
                      int blocks) {
  const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  const int64_t last = m % chunk_rows;
  const int64_t down =
      m / chunk_rows * pieces(chunk_rows, Config::kUnitRows) + pieces(last, Config::kUnitRows);
  const int64_t units = down * pieces(n, Config::kUnitColumns);
  const int64_t clusters = clusters_of(blocks, Config::kCluster);
  return static_cast<double>(pieces(units, clusters)) *
         (costs.step * static_cast<double>(pieces(k, kDepth)) + costs.rest);
}

// chunk_rows: the rows of one rank.
inline int32_t choose_tiles(int64_t chunk_rows, int64_t m, int64_t n, int64_t k, int blocks) {
  if (chunk_rows < 1 || m < 1 || n < 1) return PYRUNTIME_TILES_SMALL;
  const double small = estimated_time<SmallTiles>(kSmallCosts, chunk_rows, m, n, k, blocks);
  const double large = estimated_time<LargeTiles>(kLargeCosts, chunk_rows, m, n, k, blocks);
  return large <= small ? PYRUNTIME_TILES_LARGE : PYRUNTIME_TILES_SMALL;
}

}  // namespace pyruntime::sm90
