// The unit that a cluster of blocks multiplies at a time, and each block's tile of it, 128 rows high. Blocks
// below each other share the columns of B, blocks side by side the rows of A; each fetches a part of what
// they share for all.
#pragma once

#include "cuda/portable/gemm/tiles.h"

namespace pyruntime::sm90 {

using portable::Signals;
using portable::signals_of;
using portable::Tile;
using portable::TileSchedule;

constexpr int kBlockRows = 128;
constexpr int kHalfRows = 64;  // rows of a warpgroup
constexpr int kDepth = 64;     // elements of k in a stage: 128 bytes, the swizzle width of shared memory

template <int kColumns, int kBlocksDown, int kBlocksAcross, int kPipeline>
struct Tiles {
  static constexpr int kTileColumns = kColumns;
  static_assert(kHalfRows % PYRUNTIME_SIGNAL_ROWS == 0 && kColumns % PYRUNTIME_SIGNAL_COLUMNS == 0);
  static constexpr int kDown = kBlocksDown, kAcross = kBlocksAcross;
  static constexpr int kCluster = kDown * kAcross;
  static_assert(kDown == 1 || kAcross == 1, "all blocks of a cluster meet at the same barriers");
  static constexpr int kUnitRows = kDown * kBlockRows, kUnitColumns = kAcross * kColumns;
  static constexpr int kStages = kPipeline;
  static constexpr int kStageBytes = (kBlockRows + kColumns) * kDepth * 2;
  static constexpr int kResultBytes = kHalfRows * kColumns * 2;
};

// 227 KB of shared memory fit the stages and half of a result. In pairs, large tiles read two thirds, and
// small ones three quarters, of what single blocks would read from L2. Small ones are side by side, because
// they are for few rows: below a chunk of at most 128 rows a second block would have none.
using SmallTiles = Tiles<128, 1, 2, 6>;
using LargeTiles = Tiles<256, 2, 1, 4>;

// Returns the clusters that run at one time if so many blocks do; at least one.
constexpr int clusters_of(int blocks, int blocks_of_cluster) {
  return blocks < blocks_of_cluster ? 1 : blocks / blocks_of_cluster;
}

template <class Config>
TileSchedule make_units(const std::vector<Chunk>& order, int64_t columns) {
  return portable::make_schedule(order, columns, Config::kUnitRows, Config::kUnitColumns);
}

// Returns the tile of one block of the cluster. It has no rows if the chunk ends above it, and no columns if
// the GEMM ends before it. Such a block still fetches its share of the shared operand, so it waits for its
// rows like the others.
template <class Config>
PYRUNTIME_HOST_DEVICE Tile tile_of_block(const Tile& unit, int block) {
  const auto cut = [](int size, int most) { return size < 0 ? 0 : size > most ? most : size; };
  const int above = block % Config::kDown * kBlockRows, before = block / Config::kDown * Config::kTileColumns;
  Tile tile = unit;
  tile.row += above;
  tile.column += before;
  tile.rows = cut(unit.rows - above, kBlockRows);
  tile.columns = cut(unit.columns - before, Config::kTileColumns);
  return tile;
}

// Returns one warpgroup's rows of a block's tile; there may be none.
PYRUNTIME_HOST_DEVICE Tile half_of(const Tile& tile, int half) {
  Tile part = tile;
  const int left = tile.rows - half * kHalfRows;
  part.row += half * kHalfRows;
  part.rows = left < 0 ? 0 : left > kHalfRows ? kHalfRows : left;
  return part;
}

}  // namespace pyruntime::sm90
