// The order of a GEMM's tiles. Chunks are visited in the order of ChunkPlan, the code of the CPU path, and no
// tile spans two chunks. Within a chunk, kGroup rows of tiles are visited column by column, so that blocks
// that run at the same time share operands in L2.
#pragma once

#include "cuda/compat.h"
#include "cuda/launchers.h"
#if !defined(__CUDACC_RTC__)
#include <vector>

#include "core/chunk_plan.h"
#endif

namespace pyruntime::portable {

struct Visit {
  int64_t begin;  // first row of the chunk
  int32_t rows;
  int16_t owner;
  int8_t piece, pieces;  // as in Chunk
};

struct Tile {
  Visit chunk;
  int row, column;    // the tile's first element, within the chunk and within the GEMM
  int rows, columns;  // existing ones
};

// The signals of a tile of a part, in the numbering of the owner's rows. Tiles begin at signal blocks.
struct Signals {
  int first, down, across;
  int pitch;  // of numbers, from one row of signals to the next

  PYRUNTIME_HOST_DEVICE int count() const { return down * across; }
  PYRUNTIME_HOST_DEVICE int number(int i) const { return first + i / across * pitch + i % across; }
};

PYRUNTIME_HOST_DEVICE Signals signals_of(const Tile& tile, int columns) {
  const auto pieces = [](int size, int of) { return (size + of - 1) / of; };
  const int pitch = pieces(columns, PYRUNTIME_SIGNAL_COLUMNS);
  return {tile.row / PYRUNTIME_SIGNAL_ROWS * pitch + tile.column / PYRUNTIME_SIGNAL_COLUMNS,
          pieces(tile.rows, PYRUNTIME_SIGNAL_ROWS), pieces(tile.columns, PYRUNTIME_SIGNAL_COLUMNS), pitch};
}

struct TileSchedule {
  static constexpr int kGroup = 8;

  int visits, tile_rows, tile_columns, columns;
  Visit visit[PYRUNTIME_MOST_RANKS];

  PYRUNTIME_HOST_DEVICE int tiles_across() const { return (columns + tile_columns - 1) / tile_columns; }
  PYRUNTIME_HOST_DEVICE int tiles_down(int rows) const { return (rows + tile_rows - 1) / tile_rows; }
  PYRUNTIME_HOST_DEVICE int64_t tiles_of(int rows) const {
    return static_cast<int64_t>(tiles_down(rows)) * tiles_across();
  }

  // Finds the tile with this number; false beyond the last.
  PYRUNTIME_HOST_DEVICE bool at(int64_t number, Tile& tile) const {
    for (int step = 0; step < visits; ++step) {
      const int64_t tiles = tiles_of(visit[step].rows);
      if (number < tiles) {
        tile.chunk = visit[step];
        place(static_cast<int>(number), tile);
        return true;
      }
      number -= tiles;
    }
    return false;
  }

  int64_t count() const {
    int64_t tiles = 0;
    for (int step = 0; step < visits; ++step) tiles += tiles_of(visit[step].rows);
    return tiles;
  }

 private:
  PYRUNTIME_HOST_DEVICE void place(int number, Tile& tile) const {
    const int across = tiles_across(), down = tiles_down(tile.chunk.rows);
    const int group = number / (kGroup * across), within = number % (kGroup * across);
    const int height = down - group * kGroup < kGroup ? down - group * kGroup : kGroup;
    const int m = group * kGroup + within % height, n = within / height;
    tile.row = m * tile_rows;
    tile.column = n * tile_columns;
    tile.rows = tile.chunk.rows - tile.row < tile_rows ? tile.chunk.rows - tile.row : tile_rows;
    tile.columns = columns - tile.column < tile_columns ? columns - tile.column : tile_columns;
  }
};

#if !defined(__CUDACC_RTC__)  // made by the launching host
inline TileSchedule make_schedule(const std::vector<Chunk>& order, int64_t columns, int tile_rows,
                                  int tile_columns) {
  TileSchedule schedule{};
  schedule.tile_rows = tile_rows;
  schedule.tile_columns = tile_columns;
  schedule.columns = static_cast<int>(columns);
  for (const Chunk& chunk : order) {
    schedule.visit[schedule.visits++] = {chunk.begin, static_cast<int32_t>(chunk.rows),
                                         static_cast<int16_t>(chunk.owner), static_cast<int8_t>(chunk.piece),
                                         static_cast<int8_t>(chunk.pieces)};
  }
  return schedule;
}
#endif

}  // namespace pyruntime::portable
