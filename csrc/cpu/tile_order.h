// The order in which a bf16 GEMM visits its tiles (kRows rows by one panel of kPanel columns), so that what
// is read again is still in the nearest caches, however deep the sum is. Pure: tests count what it reads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pyruntime::cpu {

constexpr int64_t kPanel = 64;  // columns
// 6 rows of 4 sums, 4 vectors of b and one of a are 29 of 32 registers.
constexpr int64_t kRows = 6;
constexpr int64_t kMostRows = 64 * kRows;  // whose sums are kept at once

// A sum over k goes over the depth block by block, in order, and its fp32 sums are kept in between: how large
// a block is changes no bit.
struct TileOrder {
  int64_t pairs;  // of k in all
  int64_t block;  // pairs that are visited together: a panel's part is read again by every strip of rows
  int64_t some;  // rows whose sums are kept, and whose part of the left operand is read before the next block
  int64_t
      group;  // rows that all panels are multiplied with before the next rows: they stay in the last cache

  // A level 2 cache, twice.
  static constexpr int64_t kGroupBytes = 2 << 20;

  // Rows of a left operand as they lie, which are read along k: half of a level 2 cache for the panel's part.
  static TileOrder of_rows(int64_t depth) { return of(depth, 1024, kMostRows); }
  // A left operand in strips (pack_strips), block by block: the panel's part fits a level 1 cache.
  static TileOrder of_strips(int64_t depth) { return of(depth, 128, 32 * kRows); }

  int64_t blocks() const { return std::max<int64_t>(1, (pairs + block - 1) / block); }

  // visit(row, rows, first pair, pairs, row of the sums) for all tiles of the rows from `begin` to `end` with
  // one panel. Strips of rows begin at multiples of kRows of `offset` + row.
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
    // Blocks of one size.
    order.block = std::max<int64_t>(1, (order.pairs + order.blocks() - 1) / order.blocks());
    order.group = std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, 2 * depth) / some) * some;
    return order;
  }
};

}  // namespace pyruntime::cpu
