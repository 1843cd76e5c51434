// What the blocks of the kernels for Hopper multiply, in the order of the CPU path's chunks and under the
// numbers by which the portable kernels signal; and a choice of tiles for every size.
#include <map>

#include "cuda/portable/gemm/tile_gemm.cuh"
#include "cuda/sm90/choose_tiles.h"
#include "cuda/sm90/staging.h"
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;
using portable::make_schedule;
using sm90::Tile;
using sm90::TileSchedule;

// How often each signal is raised: by owner, then number.
using Raised = std::vector<std::map<int, int>>;

// Adds the signals of a tile, which lie within it.
void raise_signals(Raised& raised, const Tile& tile, int64_t columns) {
  const sm90::Signals signals = sm90::signals_of(tile, static_cast<int>(columns));
  for (int i = 0; i < signals.count(); ++i) {
    ++raised[tile.chunk.owner][signals.number(i)];
    const int row = signals.number(i) / signals.pitch * PYRUNTIME_SIGNAL_ROWS;
    const int column = signals.number(i) % signals.pitch * PYRUNTIME_SIGNAL_COLUMNS;
    EXPECT(row >= tile.row && row < tile.row + tile.rows);
    EXPECT(column >= tile.column && column < tile.column + tile.columns);
  }
}

// Ranks may run either kernel in one flight.
Raised raised_by_portable_kernel(const std::vector<Chunk>& order, int world, int64_t columns) {
  using Config = portable::SmallTiles;
  const TileSchedule schedule = make_schedule(order, columns, Config::kTileRows, Config::kTileColumns);
  Raised raised(world);
  Tile tile;
  for (int64_t number = 0; schedule.at(number, tile); ++number) raise_signals(raised, tile, columns);
  return raised;
}

template <class Config>
void expect_units(const ChunkPlan& plan, const std::vector<Chunk>& order, int64_t columns) {
  const TileSchedule units = sm90::make_units<Config>(order, columns);
  Raised raised(plan.world_size()), by_halves(plan.world_size());
  std::vector<int> owners;
  std::vector<int64_t> elements(plan.world_size());
  Tile unit;
  for (int64_t number = 0; units.at(number, unit); ++number) {
    if (owners.empty() || owners.back() != unit.chunk.owner) owners.push_back(unit.chunk.owner);
    for (int block = 0; block < Config::kCluster; ++block) {
      const Tile tile = sm90::tile_of_block<Config>(unit, block);
      EXPECT(tile.rows >= 0 && tile.rows <= sm90::kBlockRows);
      EXPECT(tile.rows == 0 || tile.row + tile.rows <= tile.chunk.rows);
      EXPECT(tile.columns >= 0 && tile.columns <= Config::kTileColumns);
      EXPECT(tile.columns == 0 || tile.column + tile.columns <= columns);
      EXPECT(block > 0 || (tile.rows > 0 && tile.columns > 0));
      // What blocks share they wait for alike.
      EXPECT(Config::kAcross == 1 || tile.rows == unit.rows);
      raise_signals(raised, tile, columns);
      for (int half = 0; half < 2; ++half) {
        const Tile part = sm90::half_of(tile, half);
        EXPECT(part.rows >= 0 && part.rows <= sm90::kHalfRows);
        EXPECT(part.rows == 0 || part.row + part.rows <= tile.row + tile.rows);
        elements[tile.chunk.owner] += static_cast<int64_t>(part.rows) * part.columns;
        raise_signals(by_halves, part, columns);
      }
    }
  }
  EXPECT(raised == raised_by_portable_kernel(order, plan.world_size(), columns));
  EXPECT(by_halves == raised);
  std::vector<int> visited;
  for (const Chunk& chunk : order) {
    EXPECT_EQ(elements[chunk.owner], chunk.rows * columns);
    if (chunk.rows > 0 && columns > 0) visited.push_back(chunk.owner);
  }
  EXPECT(owners == visited);
}

TEST(units_follow_the_chunks_of_the_cpu_path_and_signal_as_the_portable_kernels_do) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 300; ++round) {
    const int world = static_cast<int>(random_size(draw, 1, 9));
    const int64_t rows = random_size(draw, 0, 5000), columns = random_size(draw, 0, 2000);
    const ChunkPlan plan(rows, world, static_cast<int>(random_size(draw, 0, world - 1)));
    for (const auto& order : {plan.gather_order(), plan.scatter_order()}) {
      expect_units<sm90::SmallTiles>(plan, order, columns);
      expect_units<sm90::LargeTiles>(plan, order, columns);
    }
  }
}

TEST(every_size_has_its_tiles_on_every_device) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 20000; ++round) {
    const auto size = [&] {
      return random_size(draw, 0, 1) == 0 ? random_size(draw, 0, 300) : random_size(draw, 0, 1 << 30);
    };
    const int tiles =
        sm90::choose_tiles(size(), size(), size(), size(), static_cast<int>(random_size(draw, 0, 200)));
    EXPECT(tiles == PYRUNTIME_TILES_SMALL || tiles == PYRUNTIME_TILES_LARGE);
  }
}

TEST(products_that_fill_the_device_get_large_tiles_and_others_small_ones) {
  EXPECT_EQ(sm90::choose_tiles(8192, 8192, 8192, 8192, 132), PYRUNTIME_TILES_LARGE);
  EXPECT_EQ(sm90::choose_tiles(1024, 8192, 7168, 8192, 132), PYRUNTIME_TILES_LARGE);
  EXPECT_EQ(sm90::choose_tiles(64, 512, 768, 4096, 132), PYRUNTIME_TILES_SMALL);    // few rows of each rank
  EXPECT_EQ(sm90::choose_tiles(512, 512, 1280, 8192, 132), PYRUNTIME_TILES_SMALL);  // few tiles
}

// 66 units of large tiles: with a spare block they do not run at one time on 132 multiprocessors.
TEST(a_block_that_is_spared_takes_its_cluster_along) {
  static_assert(sm90::clusters_of(132, 2) == 66 && sm90::clusters_of(131, 2) == 65);
  static_assert(sm90::clusters_of(1, 2) == 1 && sm90::clusters_of(131, 1) == 131);
  EXPECT_EQ(sm90::choose_tiles(1536, 1536, 2816, 4096, 132), PYRUNTIME_TILES_LARGE);
  EXPECT_EQ(sm90::choose_tiles(1536, 1536, 2816, 4096, 131), PYRUNTIME_TILES_SMALL);
}

// Every thread's registers go through stmatrix, as the PTX ISA describes both, into shared memory; then TMA
// reads it, as the driver API describes the swizzle: bits 4 to 6 of an address are those of the byte in the
// box, xor bits 7 to 9.
template <class Config>
void expect_staged() {
  std::vector<int> shared(Config::kResultBytes / 2, -1);
  for (int warp = 0; warp < 4; ++warp) {
    for (int piece = 0; piece < Config::kTileColumns / 8; piece += 2) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::vector<int> banks(8);
        for (int lane = 0; lane < 32; ++lane) {
          const int thread = warp * 32 + lane, giver = warp * 32 + matrix * 8 + lane / 4;
          const int at = sm90::staged_at(sm90::stored_row(giver), sm90::stored_piece(giver, piece));
          EXPECT(at % 16 == 0 && at + 16 <= Config::kResultBytes);
          if (lane % 4 == 0) ++banks[at / 16 % 8];
          // The fourth pair of registers that this is: of two pieces, upper and lower rows.
          const int row = warp * 16 + matrix % 2 * 8 + lane / 4;
          const int column = sm90::summed_column(thread, piece + matrix / 2);
          for (int e = 0; e < 2; ++e) {
            int& place = shared[at / 2 + lane % 4 * 2 + e];
            EXPECT_EQ(place, -1);
            place = row * 1000 + column + e;
          }
        }
        EXPECT(std::all_of(banks.begin(), banks.end(), [](int rows) { return rows == 1; }));
      }
    }
  }
  for (int row = 0; row < sm90::kHalfRows; ++row) {
    for (int column = 0; column < Config::kTileColumns; ++column) {
      const int byte = row * 128 + column % 64 * 2, swizzled = byte ^ (byte >> 3 & 0x70);
      EXPECT_EQ(shared[(column / 64 * sm90::kBoxBytes + swizzled) / 2], row * 1000 + column);
    }
  }
}

TEST(results_are_staged_where_tma_takes_them_without_conflicts_of_banks) {
  expect_staged<sm90::SmallTiles>();
  expect_staged<sm90::LargeTiles>();
}

}  // namespace
