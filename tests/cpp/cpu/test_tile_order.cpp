// How much of a GEMM's operands comes anew into a level 2 cache, counted line by line in the order in which
// tiles are visited: a time would be the machine's.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cpu/tile_order.h"

namespace {

using namespace pyruntime::cpu;

// As on AVX512-BF16 (bf16_tiles_avx512.h).
constexpr TileSizes kOfRows{1024, kMostRows}, kOfStrips{128, 32 * kRows};

// Calls visit(row, rows, first pair, pairs, row of the sums) strip by strip.
template <typename Visit>
void for_tiles(const TileOrder& order, int64_t begin, int64_t end, int64_t offset, const Visit& visit) {
  order.for_bands(begin, end, [&](int64_t first, int64_t rows, int64_t pair, int64_t pairs) {
    for_strips(offset + first, rows,
               [&](int64_t row, int64_t count) { visit(first + row, count, pair, pairs, row); });
  });
}

// 16 lines a set, the least recently used one goes.
class Cache {
 public:
  explicit Cache(int64_t bytes) : sets_(bytes / kLine / kWays), lines_(sets_ * kWays, -1) {}

  void read(int64_t address, int64_t bytes) {
    for (int64_t line = address / kLine; line <= (address + bytes - 1) / kLine; ++line) touch(line);
  }
  int64_t missed_bytes() const { return missed_ * kLine; }

 private:
  static constexpr int64_t kLine = 64, kWays = 16;

  void touch(int64_t line) {
    int64_t* set = &lines_[line % sets_ * kWays];
    int64_t way = 0;
    while (way < kWays - 1 && set[way] != line) ++way;
    if (set[way] != line) ++missed_;
    for (; way > 0; --way) set[way] = set[way - 1];
    set[0] = line;
  }

  int64_t sets_, missed_ = 0;
  std::vector<int64_t> lines_;
};

// Bytes that come into a cache of 1 MiB for each multiplication of a^T @ b, a [depth, 768], b [depth, 256].
double traffic(const TileOrder& order) {
  constexpr int64_t kColumns = 768, kPanels = 4;
  constexpr int64_t kA = 0, kB = int64_t{1} << 40, kSums = int64_t{1} << 41, kPair = 4;
  Cache cache(1 << 20);
  for (int64_t begin = 0; begin < kColumns; begin += order.group) {
    for (int64_t panel = 0; panel < kPanels; ++panel) {
      for_tiles(order, begin, std::min(begin + order.group, kColumns), 0,
                [&](int64_t row, int64_t rows, int64_t pair, int64_t pairs, int64_t at) {
                  cache.read(kA + (pair * kColumns + row * pairs) * kPair, rows * pairs * kPair);
                  cache.read(kB + (panel * order.pairs + pair) * kPanel * kPair, pairs * kPanel * kPair);
                  cache.read(kSums + at * kPanel * kPair, rows * kPanel * kPair);
                });
    }
  }
  return static_cast<double>(cache.missed_bytes()) /
         static_cast<double>(2 * order.pairs * kColumns * kPanels * kPanel);
}

TEST(every_tile_is_visited_once_and_the_blocks_of_a_sum_in_order) {
  for (const int64_t depth : {0, 1, 2, 255, 256, 257, 2048, 5001}) {
    for (const TileSizes& most : {kOfRows, kOfStrips}) {
      const TileOrder order = TileOrder::of(depth, most);
      for (const int64_t offset : {0, 5, 48}) {
        const int64_t rows = 500;
        std::vector<int64_t> next(rows, 0), place(rows, -1);
        int64_t ends = 0;
        for_tiles(order, 0, rows, offset,
                  [&](int64_t row, int64_t count, int64_t pair, int64_t pairs, int64_t at) {
                    EXPECT(count > 0 && (offset + row) / kRows == (offset + row + count - 1) / kRows);
                    EXPECT(at >= 0 && at + count <= order.some);
                    for (int64_t i = row; i < row + count; ++i) {
                      EXPECT(next[i] == pair);
                      EXPECT(pair == 0 || place[i] == at + i - row);
                      next[i] = pair + pairs;
                      place[i] = at + i - row;
                    }
                    ends += pair + pairs == order.pairs ? count : 0;
                  });
        EXPECT(ends == rows);
      }
    }
  }
}

TEST(a_long_sum_brings_no_more_into_the_cache_than_a_short_one) {
  const double of_short = traffic(TileOrder::of(1024, kOfStrips));
  for (const int64_t depth : {4096, 16384}) {
    EXPECT(traffic(TileOrder::of(depth, kOfStrips)) < 1.25 * of_short);
    TileOrder uncut = TileOrder::of(depth, kOfStrips);
    uncut.block = uncut.pairs;
    EXPECT(depth < 16384 || traffic(uncut) > 3 * of_short);  // what the counting would find
  }
}

}  // namespace
