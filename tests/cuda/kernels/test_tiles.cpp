// Tiles are visited in the order of the CPU path's chunks, each element once.
#include <map>

#include "core/rings.h"
#include "cuda/portable/gemm/all_gather_matmul.cuh"
#include "cuda/portable/gemm/tiles.h"
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace pyruntime::portable;
using namespace kernels;

void expect_order(const ChunkPlan& plan, const std::vector<Chunk>& order, int64_t columns, int tile_rows,
                  int tile_columns) {
  const TileSchedule schedule = make_schedule(order, columns, tile_rows, tile_columns);
  std::vector<int> visits(plan.rows() * columns);
  std::vector<int> owners;
  Tile tile;
  int64_t number = 0;
  for (; schedule.at(number, tile); ++number) {
    const Chunk& chunk = plan.of(tile.chunk.owner);
    EXPECT_EQ(tile.chunk.begin, chunk.begin);
    EXPECT_EQ(tile.chunk.rows, chunk.rows);
    EXPECT(tile.rows > 0 && tile.rows <= tile_rows && tile.columns > 0 && tile.columns <= tile_columns);
    EXPECT(tile.row % tile_rows == 0 && tile.column % tile_columns == 0);
    if (owners.empty() || owners.back() != tile.chunk.owner) owners.push_back(tile.chunk.owner);
    for (int i = 0; i < tile.rows; ++i) {
      for (int j = 0; j < tile.columns; ++j)
        ++visits[(chunk.begin + tile.row + i) * columns + tile.column + j];
    }
  }
  EXPECT_EQ(number, schedule.count());
  EXPECT(std::all_of(visits.begin(), visits.end(), [](int times) { return times == 1; }));
  std::vector<int> expected;
  for (const Chunk& chunk : order) {
    if (chunk.rows > 0 && columns > 0) expected.push_back(chunk.owner);
  }
  EXPECT(owners == expected);
}

TEST(tiles_follow_the_chunks_of_the_cpu_path_and_cover_every_element_once) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 200; ++round) {
    const int world = static_cast<int>(random_size(draw, 1, 9));
    const int64_t rows = random_size(draw, 0, 120), columns = random_size(draw, 0, 40);
    const int tile_rows = static_cast<int>(random_size(draw, 1, 9)),
              tile_columns = static_cast<int>(random_size(draw, 1, 9));
    const ChunkPlan plan(rows, world, static_cast<int>(random_size(draw, 0, world - 1)));
    expect_order(plan, plan.gather_order(), columns, tile_rows, tile_columns);
    expect_order(plan, plan.scatter_order(), columns, tile_rows, tile_columns);
  }
}

// Rows that come around rings are visited piece by piece, each element once.
TEST(tiles_follow_pieces_that_come_around_rings) {
  const Rings rings({{0, 1, 2, 3}, {0, 2, 1, 3}});
  for (const int64_t rows : {0, 7, 16, 83}) {
    const ChunkPlan plan(rows, 4, 2, rings.ways());
    const std::vector<Chunk> order = rings.gather_order(plan);
    const TileSchedule schedule = make_schedule(order, 40, 8, 16);
    std::vector<int> visits(rows * 40);
    size_t at = 0;
    Tile tile;
    for (int64_t number = 0; schedule.at(number, tile); ++number) {
      while (order[at].begin != tile.chunk.begin || order[at].rows == 0) ++at;  // never back
      const Chunk& chunk = order[at];
      EXPECT(tile.chunk.owner == chunk.owner && tile.chunk.rows == chunk.rows);
      EXPECT(tile.chunk.piece == chunk.piece && tile.chunk.pieces == chunk.pieces);
      for (int i = 0; i < tile.rows; ++i) {
        for (int j = 0; j < tile.columns; ++j) {
          ++visits[(chunk.begin + tile.row + i) * 40 + tile.column + j];
        }
      }
    }
    EXPECT(std::all_of(visits.begin(), visits.end(), [](int times) { return times == 1; }));
  }
}

#if PYRUNTIME_CDNA

// Offsets of what each lane of a wave reads at once, `bytes` of each: lanes that are served together meet in
// no bank. A clock serves 128 bytes of lanes side by side.
template <class OffsetOf>
void expect_no_conflicts(int bytes, const OffsetOf& offset_of) {
  const int together = 128 / bytes;
  for (int first = 0; first < 64; first += together) {
    std::vector<int> banks(32);
    for (int lane = first; lane < first + together; ++lane) {
      for (int word = 0; word < bytes / 4; ++word) ++banks[(offset_of(lane) / 4 + word) % 32];
    }
    EXPECT(std::all_of(banks.begin(), banks.end(), [](int words) { return words == 1; }));
  }
}

TEST(lanes_that_read_together_meet_in_no_bank) {
  using AlongK = OperandTile<Bf16, true, 128, LargeTiles::kThreads>;
  using AcrossK = OperandTile<Bf16, false, 128, LargeTiles::kThreads>;
  for (int row = 0; row < 128; row += 16) {
    expect_no_conflicts(16, [&](int lane) { return AlongK::offset_of(row + lane % 16, lane / 16 * 8); });
  }
  for (int column = 0; column < 128; column += 64) {
    for (int e = 0; e < 8; ++e) {
      expect_no_conflicts(
          8, [&](int lane) { return AcrossK::offset_of(column + lane % 16 * 4, lane / 16 * 8 + e); });
    }
  }
}

#endif

// Whatever the tiles, every signal of a part is that of one tile, of the one that has its elements.
void expect_signals(const std::vector<Chunk>& order, int64_t columns, int tile_rows, int tile_columns) {
  const TileSchedule schedule = make_schedule(order, columns, tile_rows, tile_columns);
  const int across = static_cast<int>((columns + PYRUNTIME_SIGNAL_COLUMNS - 1) / PYRUNTIME_SIGNAL_COLUMNS);
  std::map<std::pair<int, int>, int> seen;  // owner, number
  Tile tile;
  for (int64_t number = 0; schedule.at(number, tile); ++number) {
    const Signals signals = signals_of(tile, static_cast<int>(columns));
    for (int i = 0; i < signals.count(); ++i) {
      const int row = signals.number(i) / across * PYRUNTIME_SIGNAL_ROWS;
      const int column = signals.number(i) % across * PYRUNTIME_SIGNAL_COLUMNS;
      EXPECT(row >= tile.row && row < tile.row + tile.rows);
      EXPECT(column >= tile.column && column < tile.column + tile.columns);
      ++seen[{tile.chunk.owner, signals.number(i)}];
    }
  }
  size_t expected = 0;
  for (const Chunk& chunk : order) {
    expected += (chunk.rows + PYRUNTIME_SIGNAL_ROWS - 1) / PYRUNTIME_SIGNAL_ROWS * across;
  }
  EXPECT_EQ(seen.size(), expected);
  EXPECT(std::all_of(seen.begin(), seen.end(), [](const auto& one) { return one.second == 1; }));
}

TEST(signals_are_the_same_for_all_tiles) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 100; ++round) {
    const int world = static_cast<int>(random_size(draw, 1, 9));
    const int64_t rows = random_size(draw, 0, 3000), columns = random_size(draw, 0, 2000);
    const ChunkPlan plan(rows, world, static_cast<int>(random_size(draw, 0, world - 1)));
    for (const auto& [tile_rows, tile_columns] : {std::pair{64, 128}, {128, 128}, {128, 256}}) {
      expect_signals(plan.scatter_order(), columns, tile_rows, tile_columns);
    }
  }
}

TEST(pieces_are_cut_as_the_cpu_path_cuts_them) {
  for (int pieces = 1; pieces <= 7; ++pieces) {
    for (int rows = 0; rows <= 30; ++rows) {
      const ChunkPlan plan(rows, 1, 0, pieces);
      for (int piece = 0; piece < pieces; ++piece) {
        EXPECT_EQ(first_row_of_piece(rows, pieces, piece), plan.piece(0, piece).begin);
        EXPECT_EQ(first_row_of_piece(rows, pieces, piece + 1),
                  plan.piece(0, piece).begin + plan.piece(0, piece).rows);
      }
    }
  }
}

TEST(a_group_of_the_most_ranks_fits_a_kernels_parameters) {
  EXPECT(sizeof(GatherJob<Bf16>) < 4096);
  const ChunkPlan plan(1000, PYRUNTIME_MOST_RANKS, 5);
  expect_order(plan, plan.gather_order(), 3, 4, 2);
}

}  // namespace
