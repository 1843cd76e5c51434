// Ways of rows between ranks of which not every two have a link of their own: around rings of direct links,
// from neighbour to neighbour.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

// Orders of a group's ranks, in each of which a rank has a direct link to the next, and the last to the
// first. Every ring is gone around both ways at once, so a rank's rows are cut into ways() pieces: piece i
// goes forwards around ring i, and piece rings + i backwards. A rank passes on what it gets until all have
// it, and every link that rings use carries one piece of each rank, each way and ring.
class Rings {
 public:
  Rings() = default;
  explicit Rings(std::vector<std::vector<int>> orders) : orders_(std::move(orders)) {}

  bool empty() const { return orders_.empty(); }
  int ways() const { return 2 * static_cast<int>(orders_.size()); }
  // The rank whose rows come to `rank` on this way in so many steps; -1 of them: who gets what `rank` sends.
  int before(int way, int rank, int steps) const;
  // This rank's rows whole, then the others' pieces step by step, as they come; what comes of one rank in one
  // step lies side by side and is one chunk. The plan has ways() pieces.
  std::vector<Chunk> gather_order(const ChunkPlan& plan) const;

  // In a sentence, what is wrong with them for so many ranks; "" for nothing.
  std::string why_not(int world_size) const;
  std::string text() const;       // "0-1-3-2, 0-2-1-3"
  std::vector<int> flat() const;  // all orders, one after the other

  bool operator==(const Rings& other) const { return orders_ == other.orders_; }

 private:
  std::vector<std::vector<int>> orders_;
};

}  // namespace pyruntime
