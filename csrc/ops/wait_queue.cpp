#include "ops/wait_queue.h"

#include <algorithm>
#include <utility>

namespace pyruntime {

namespace {

// Half a millisecond of a core with 100 GFLOP/s.
constexpr int64_t kPieceFlops = 50'000'000;
constexpr int64_t kPiecesOfLarge = 50;  // of a large GEMM, whose pieces would otherwise be too thin
constexpr int64_t kRowsMultiple = 48;   // of 16, and of the strips of cpu/tile_order.h

}  // namespace

WaitQueue& WaitQueue::of_this_thread() {
  static thread_local WaitQueue queue;
  return queue;
}

void WaitQueue::add(const std::shared_ptr<Piecework>& product) {
  std::erase_if(products_, [](const auto& weak) { return weak.expired(); });
  products_.push_back(product);
}

bool WaitQueue::work() {
  return std::ranges::any_of(products_, [](const auto& weak) {
    const std::shared_ptr<Piecework> product = weak.lock();
    return product && product->multiply();
  });
}

std::vector<std::shared_ptr<Piecework>> WaitQueue::products() const {
  std::vector<std::shared_ptr<Piecework>> alive;
  for (const auto& weak : products_) {
    if (auto product = weak.lock()) alive.push_back(std::move(product));
  }
  return alive;
}

int64_t rows_of_piece(int64_t depth, int64_t rows, int64_t width) {
  const int64_t flops_per_row = 2 * depth * width;
  if (flops_per_row == 0) return rows;
  const int64_t most = std::max(kPieceFlops, rows * flops_per_row / kPiecesOfLarge);
  return std::max(kRowsMultiple, most / flops_per_row / kRowsMultiple * kRowsMultiple);
}

}  // namespace pyruntime
