// The order in which a bf16 GEMM visits its tiles (kRows rows by one panel of kPanel columns). Operands that
// are read again are still in the nearest caches, however long the sum is. Pure: tests count the reads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pyruntime::cpu {

constexpr int64_t kPanel = 64;  // columns
constexpr int64_t kRows = 6;
constexpr int64_t kMostRows = 64 * kRows;  // of TileSizes

// The most pairs and rows that a GEMM visits before the next.
struct TileSizes {
  int64_t pairs;  // along k: every strip of rows reads a panel's part again, which a near cache keeps
  int64_t rows;   // whose sums are kept; their part of the left operand is read before the next block
};

// The sum over k goes through the depth block by block, in order, and keeps its fp32 sums in between. So the
// size of a block does not change the result.
struct TileOrder {
  int64_t pairs;  // all pairs along k
  int64_t block;  // pairs visited together
  int64_t some;   // rows whose sums are kept
  int64_t group;  // rows that are multiplied with all panels before the next: they stay in the last cache

  // Two level 2 caches.
  static constexpr int64_t kGroupBytes = 2 << 20;

  static TileOrder of(int64_t depth, const TileSizes& most) {
    TileOrder order{(depth + 1) / 2, most.pairs, most.rows, most.rows};
    // Makes all blocks equal in size.
    order.block = std::max<int64_t>(1, (order.pairs + order.blocks() - 1) / order.blocks());
    order.group =
        std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, 2 * depth) / order.some) * order.some;
    return order;
  }

  int64_t blocks() const { return std::max<int64_t>(1, (pairs + block - 1) / block); }

  // Calls visit(first row, rows, first pair, pairs) for all bands of rows [begin, end) with one panel: for
  // `some` rows, block by block.
  template <typename Visit>
  void for_bands(int64_t begin, int64_t end, const Visit& visit) const {
    for (int64_t first = begin; first < end; first += some) {
      for (int64_t pair = 0, b = 0; b < blocks(); ++b, pair += block) {
        visit(first, std::min(some, end - first), pair, std::min(block, pairs - pair));
      }
    }
  }
};

// Calls visit(row, rows) for the strips of a band of `rows` rows, whose first strip lacks `offset` rows.
template <typename Visit>
void for_strips(int64_t offset, int64_t rows, const Visit& visit) {
  for (int64_t row = 0; row < rows;) {
    const int64_t count = std::min(kRows - (offset + row) % kRows, rows - row);
    visit(row, count);
    row += count;
  }
}

}  // namespace pyruntime::cpu
