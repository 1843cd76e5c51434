// What a cluster of blocks multiplies at a time, and which part of it each block has. A block's tile is 128
// rows high; the blocks of a cluster lie below each other and share the columns of B, each of which is
// fetched once for all.
#pragma once

#include "cuda/portable/tiles.h"

namespace pyruntime::sm90 {

using portable::Signals;
using portable::signals_of;
using portable::Tile;
using portable::TileSchedule;

constexpr int kBlockRows = 128;
constexpr int kDepth =
    64;  // of a stage, in elements of k: 128 bytes, which is what shared memory is swizzled by

template <int kColumns, int kBlocks, int kPipeline>
struct Tiles {
  static constexpr int kTileColumns = kColumns;
  static_assert(kBlockRows % PYRUNTIME_SIGNAL_ROWS == 0 && kColumns % PYRUNTIME_SIGNAL_COLUMNS == 0);
  static constexpr int kCluster = kBlocks;
  static constexpr int kUnitRows = kBlocks * kBlockRows;
  static constexpr int kStages = kPipeline;
  static constexpr int kStageBytes = (kBlockRows + kColumns) * kDepth * 2;
  static constexpr int kResultBytes = kBlockRows * kColumns * 2;
};

// Shared memory of 227 KB holds the stages and one result beside them. A large tile reads as much from L2 in
// a given time as L2 gives, if it reads alone: in pairs it reads two thirds of that.
using SmallTiles = Tiles<128, 1, 5>;
using LargeTiles = Tiles<256, 2, 3>;

template <class Config>
TileSchedule make_units(const std::vector<Chunk>& order, int64_t columns) {
  return portable::make_schedule(order, columns, Config::kUnitRows, Config::kTileColumns);
}

// The tile of one block of the cluster. It has no rows where the chunk ends above it; such a block still
// fetches its share of B.
PYRUNTIME_HOST_DEVICE Tile tile_of_block(const Tile& unit, int block) {
  Tile tile = unit;
  const int above = block * kBlockRows;
  tile.row += above;
  tile.rows = unit.rows - above;
  if (tile.rows < 0) tile.rows = 0;
  if (tile.rows > kBlockRows) tile.rows = kBlockRows;
  return tile;
}

}  // namespace pyruntime::sm90
