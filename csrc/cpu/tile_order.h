// The order in which a bf16 GEMM visits its tiles (kRows rows by one panel of kPanel columns). Operands that
// are read again are still in the nearest caches, however long the sum is. Pure: tests count the reads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pyruntime::cpu {

constexpr int64_t kPanel = 64;  // columns
// 6 x 4 sums, 4 vectors of b and one of a take 29 of 32 registers.
constexpr int64_t kRows = 6;
constexpr int64_t kMostRows = 64 * kRows;  // rows whose sums are kept at the same time, at most

// The sum over k goes through the depth block by block, in order, and keeps its fp32 sums in between. So the
// size of a block does not change the result.
struct TileOrder {
  int64_t pairs;  // all pairs along k
  int64_t block;  // pairs visited together: every strip of rows reads a panel's part again
  int64_t some;   // rows whose sums are kept; their part of the left operand is read before the next block
  int64_t group;  // rows that are multiplied with all panels before the next: they stay in the last cache

  // Two level 2 caches.
  static constexpr int64_t kGroupBytes = 2 << 20;

  // For a left operand read in place, along k: the panel's part fills half of a level 2 cache.
  static TileOrder of_rows(int64_t depth) { return of(depth, 1024, kMostRows); }
  // For a left operand packed in strips (pack_strips), block by block: the panel's part fits a level 1 cache.
  static TileOrder of_strips(int64_t depth) { return of(depth, 128, 32 * kRows); }

  int64_t blocks() const { return std::max<int64_t>(1, (pairs + block - 1) / block); }

  // Calls visit(row, rows, first pair, pairs, row of the sums) for all tiles of rows [begin, end) with one
  // panel. Strips begin where `offset` + row is a multiple of kRows.
  template <typename Visit>
  void for_tiles(int64_t begin, int64_t end, int64_t offset, const Visit& visit) const {
    for (int64_t first = begin; first < end; first += some) {
      const int64_t until = std::min(first + some, end);
      for (int64_t pair = 0, b = 0; b < blocks(); ++b, pair += block) {
        for (int64_t row = first; row < until;) {
          const int64_t rows = std::min(kRows - (offset + row) % kRows, until - row);
          visit(row, rows, pair, std::min(block, pairs - pair), row - first);
          row += rows;
        }
      }
    }
  }

 private:
  static TileOrder of(int64_t depth, int64_t most, int64_t some) {
    TileOrder order{(depth + 1) / 2, most, some, some};
    // Makes all blocks equal in size.
    order.block = std::max<int64_t>(1, (order.pairs + order.blocks() - 1) / order.blocks());
    order.group = std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, 2 * depth) / some) * some;
    return order;
  }
};

}  // namespace pyruntime::cpu
