// Routes of rows around rings of direct links, from neighbour to neighbour: for groups in which some ranks
// have no link between them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

// Orders of a group's ranks. In each order every rank has a direct link to the next, and the last to the
// first. Rows travel around each ring in both directions at once, so a rank's rows are cut into ways()
// pieces: piece i goes forwards around ring i, and piece rings + i backwards. A rank passes on what it
// receives until all have it. Each link of a ring carries one piece of each rank in each direction.
class Rings {
 public:
  Rings() = default;
  explicit Rings(std::vector<std::vector<int>> orders) : orders_(std::move(orders)) {}

  bool empty() const { return orders_.empty(); }
  int ways() const { return 2 * static_cast<int>(orders_.size()); }
  // The rank whose rows reach `rank` this way after `steps` steps; with steps = -1 the rank that `rank` sends
  // to.
  int before(int way, int rank, int steps) const;
  // This rank's rows whole, then the others' pieces, step by step as they arrive. Pieces of one rank that
  // arrive in the same step and are neighbours in memory form one chunk. The plan has ways() pieces.
  std::vector<Chunk> gather_order(const ChunkPlan& plan) const;

  // A sentence that says why these orders do not fit that many ranks; "" if they do.
  std::string why_not(int world_size) const;
  std::string text() const;       // "0-1-3-2, 0-2-1-3"
  std::vector<int> flat() const;  // all orders, one after the other

  bool operator==(const Rings& other) const { return orders_ == other.orders_; }

 private:
  std::vector<std::vector<int>> orders_;
};

}  // namespace pyruntime
