#include "core/chunk_plan.h"

#include <algorithm>

namespace pyruntime {

int64_t rows_of_rank(int64_t rows, int world_size, int rank, int holder) {
  if (holder != kEveryRank) return rank == holder ? rows : 0;
  return rows / world_size + (rank < rows % world_size ? 1 : 0);
}

ChunkPlan::ChunkPlan(int64_t rows, int world_size, int rank, int pieces, int holder)
    : rows_(rows), max_rows_(0), rank_(rank), pieces_(pieces) {
  chunks_.reserve(world_size);
  int64_t begin = 0;
  for (int owner = 0; owner < world_size; ++owner) {
    const int64_t count = rows_of_rank(rows, world_size, owner, holder);
    max_rows_ = std::max(max_rows_, count);
    chunks_.push_back({owner, begin, count});
    begin += count;
  }
}

Chunk ChunkPlan::run(int owner, int first, int count) const {
  const Chunk& whole = chunks_[owner];
  const int64_t longer = whole.rows % pieces_;  // the first pieces have one row more
  const auto begin_of = [&](int piece) {
    return whole.begin + piece * (whole.rows / pieces_) + std::min<int64_t>(piece, longer);
  };
  return {owner, begin_of(first), begin_of(first + count) - begin_of(first), first, count};
}

std::vector<Chunk> ChunkPlan::gather_order() const {
  std::vector<Chunk> order;
  order.reserve(chunks_.size());
  for (int step = 0; step < world_size(); ++step) order.push_back(chunks_[(rank_ + step) % world_size()]);
  return order;
}

std::vector<Chunk> ChunkPlan::scatter_order() const {
  std::vector<Chunk> order;
  order.reserve(chunks_.size());
  for (int step = 1; step <= world_size(); ++step) order.push_back(chunks_[(rank_ + step) % world_size()]);
  return order;
}

}  // namespace pyruntime
