#include "core/chunk_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

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
  const auto cut = [](int64_t begin, int64_t rows, int piece, int pieces) {
    return begin + piece * (rows / pieces) + std::min<int64_t>(piece, rows % pieces);
  };
  const auto begin_of = [&](int piece) {
    if (halves_.empty()) return cut(whole.begin, whole.rows, piece, pieces_);
    const int64_t middle = halves_[owner];
    const int half = pieces_ / 2;
    return piece < half ? cut(whole.begin, middle - whole.begin, piece, half)
                        : cut(middle, whole.begin + whole.rows - middle, piece - half, half);
  };
  return {owner, begin_of(first), begin_of(first + count) - begin_of(first), first, count};
}

ChunkPlan ChunkPlan::of_some(const std::vector<int64_t>& rows, int pieces) const {
  const auto place_of = [&](int64_t row) {
    return std::lower_bound(rows.begin(), rows.end(), row) - rows.begin();
  };
  ChunkPlan some(static_cast<int64_t>(rows.size()), world_size(), rank_, pieces);
  some.max_rows_ = 0;
  for (int owner = 0; owner < world_size(); ++owner) {
    const Chunk& all = chunks_[owner];
    const int64_t begin = place_of(all.begin);
    some.chunks_[owner] = {owner, begin, place_of(all.begin + all.rows) - begin};
    some.max_rows_ = std::max(some.max_rows_, some.chunks_[owner].rows);
    if (pieces % 2 == 0 && pieces_ % 2 == 0) {
      some.halves_.push_back(place_of(run(owner, pieces_ / 2, 0).begin));
    }
  }
  return some;
}

std::vector<Chunk> ChunkPlan::order_from(int owner) const {
  std::vector<Chunk> order(chunks_);
  std::rotate(order.begin(), order.begin() + owner % world_size(), order.end());
  return order;
}

std::vector<std::vector<std::size_t>> joined(const std::vector<Chunk>& order,
                                             const std::vector<const char*>& memory, int64_t row_bytes) {
  std::vector<size_t> by_row(order.size());
  std::iota(by_row.begin(), by_row.end(), 0);
  // An empty chunk begins where its neighbour does, and stands before it.
  const auto key = [&](size_t place) { return std::pair(order[place].begin, order[place].rows > 0); };
  std::stable_sort(by_row.begin(), by_row.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  std::vector<std::vector<size_t>> runs;
  int64_t end = -1;
  const char* end_of_memory = nullptr;  // unless all of the run is empty
  for (const size_t place : by_row) {
    const Chunk& chunk = order[place];
    const bool is_near = chunk.rows == 0 || end_of_memory == nullptr || memory[place] == end_of_memory;
    if (chunk.begin != end || !is_near) {
      runs.emplace_back();
      end_of_memory = nullptr;
    }
    runs.back().push_back(place);
    end = chunk.begin + chunk.rows;
    if (chunk.rows > 0) end_of_memory = memory[place] + chunk.rows * row_bytes;
  }
  for (std::vector<size_t>& run : runs) std::sort(run.begin(), run.end());
  std::sort(runs.begin(), runs.end());
  return runs;
}

}  // namespace pyruntime
