#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "core/chunk_plan.h"

namespace {

using pyruntime::Chunk;
using pyruntime::ChunkPlan;

constexpr int kLargestWorld = 9;
constexpr int64_t kMostRows = 40;

// torch.tensor_split by its definition: the first rows % P parts hold one row more.
std::vector<int64_t> tensor_split(int64_t rows, int parts) {
  std::vector<int64_t> sizes(parts, rows / parts);
  for (int64_t i = 0; i < rows % parts; ++i) sizes[i] += 1;
  return sizes;
}

template <typename Body>
void for_every_plan(const Body& body) {
  for (int world = 1; world <= kLargestWorld; ++world) {
    for (int64_t rows = 0; rows <= kMostRows; ++rows) {
      for (int rank = 0; rank < world; ++rank) body(ChunkPlan(rows, world, rank), rows, world, rank);
    }
  }
}

TEST(rows_are_cut_as_tensor_split_cuts_them) {
  for_every_plan([](const ChunkPlan& plan, int64_t rows, int world, int rank) {
    const auto sizes = tensor_split(rows, world);
    int64_t begin = 0;
    for (int owner = 0; owner < world; ++owner) {
      EXPECT_EQ(plan.of(owner).owner, owner);
      EXPECT_EQ(plan.of(owner).begin, begin);
      EXPECT_EQ(plan.of(owner).rows, sizes[owner]);
      EXPECT_EQ(pyruntime::rows_of_rank(rows, world, owner), sizes[owner]);
      begin += sizes[owner];
    }
    EXPECT_EQ(begin, rows);
    EXPECT_EQ(plan.rows(), rows);
    EXPECT_EQ(plan.world_size(), world);
    EXPECT_EQ(plan.own().owner, rank);
    EXPECT_EQ(plan.max_rows(), sizes[0]);
  });
}

TEST(rows_beyond_32_bits_are_cut_without_overflow) {
  const int64_t rows = (int64_t{1} << 40) + 5;
  const ChunkPlan plan(rows, 7, 6);
  EXPECT_EQ(plan.of(6).begin + plan.of(6).rows, rows);
}

// Rows that are left out change neither whose a row is nor in which half of the pieces it lies.
TEST(some_rows_keep_their_owners_and_halves) {
  std::mt19937 random(7);
  for (int world = 1; world <= kLargestWorld; ++world) {
    for (const auto& [before, pieces] : {std::pair{1, 1}, {3, 2}, {4, 2}, {6, 4}, {2, 8}}) {
      for (const int one_in : {1, 2, 5, 1000}) {
        const int64_t all = kMostRows + world;
        const ChunkPlan plan(all, world, 0, before);
        std::vector<int64_t> rows;
        for (int64_t row = 0; row < all; ++row) {
          if (random() % one_in == 0) rows.push_back(row);
        }
        const ChunkPlan some = plan.of_some(rows, pieces);
        const bool has_halves = before % 2 == 0 && pieces % 2 == 0;
        int64_t next = 0, most = 0;
        for (int owner = 0; owner < world; ++owner) {
          EXPECT_EQ(some.of(owner).begin, next);
          most = std::max(most, some.of(owner).rows);
          const Chunk& whole = plan.of(owner);
          const int64_t middle = plan.piece(owner, before / 2).begin;
          for (int piece = 0; piece < pieces; ++piece) {
            const Chunk chunk = some.piece(owner, piece);
            EXPECT_EQ(chunk.begin, next);
            for (; next < chunk.begin + chunk.rows; ++next) {
              EXPECT(rows[next] >= whole.begin && rows[next] < whole.begin + whole.rows);
              if (has_halves) EXPECT_EQ(rows[next] < middle, piece < pieces / 2);
            }
          }
        }
        EXPECT_EQ(next, static_cast<int64_t>(rows.size()));
        EXPECT_EQ(some.rows(), next);
        EXPECT_EQ(some.max_rows(), most);
      }
    }
  }
}

TEST(every_order_visits_every_chunk_once) {
  for_every_plan([](const ChunkPlan& plan, int64_t, int world, int) {
    for (const auto& order : {plan.gather_order(), plan.scatter_order()}) {
      std::set<int> owners;
      for (const Chunk& chunk : order) {
        owners.insert(chunk.owner);
        EXPECT_EQ(chunk.begin, plan.of(chunk.owner).begin);
        EXPECT_EQ(chunk.rows, plan.of(chunk.owner).rows);
      }
      EXPECT_EQ(order.size(), static_cast<size_t>(world));
      EXPECT_EQ(owners.size(), static_cast<size_t>(world));
    }
  });
}

TEST(a_gather_begins_and_a_scatter_ends_with_the_own_chunk) {
  for_every_plan([](const ChunkPlan& plan, int64_t, int, int rank) {
    EXPECT_EQ(plan.gather_order().front().owner, rank);
    EXPECT_EQ(plan.scatter_order().back().owner, rank);
  });
}

TEST(no_two_ranks_visit_the_same_peer_in_the_same_step) {
  for (int world = 1; world <= kLargestWorld; ++world) {
    for (int step = 0; step < world; ++step) {
      std::set<int> gathered;
      std::set<int> scattered;
      for (int rank = 0; rank < world; ++rank) {
        const ChunkPlan plan(3 * world + 1, world, rank);
        gathered.insert(plan.gather_order()[step].owner);
        scattered.insert(plan.scatter_order()[step].owner);
      }
      EXPECT_EQ(gathered.size(), static_cast<size_t>(world));
      EXPECT_EQ(scattered.size(), static_cast<size_t>(world));
    }
  }
}

// Pieces of some rows of each rank but one, in any order, of which some are empty if there are more than
// rows; rows of `cut` lie elsewhere.
void joins(int rows_of_a_rank, int pieces, int own, int cut, uint32_t seed) {
  constexpr int kWorld = 5, kRowBytes = 6;
  const ChunkPlan plan(kWorld * rows_of_a_rank, kWorld, 0, pieces);
  std::vector<Chunk> order;
  for (int owner = 0; owner < kWorld; ++owner) {
    for (int piece = 0; piece < pieces && owner != own; ++piece) order.push_back(plan.piece(owner, piece));
  }
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  const std::vector<char> memory(1000), elsewhere(1000);
  std::vector<const char*> of_chunks;
  for (const Chunk& chunk : order) {
    of_chunks.push_back((chunk.owner == cut ? elsewhere : memory).data() + chunk.begin * kRowBytes);
  }
  std::vector<int> seen(order.size(), 0);
  size_t last_first = 0;
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const std::vector<size_t>& run : joined(order, of_chunks, kRowBytes)) {
    EXPECT(std::is_sorted(run.begin(), run.end()) && (found.empty() || run.front() > last_first));
    last_first = run.front();
    int64_t begin = plan.rows(), end = 0, rows = 0;
    for (const size_t place : run) {
      ++seen[place];
      begin = std::min(begin, order[place].begin);
      end = std::max(end, order[place].begin + order[place].rows);
      rows += order[place].rows;
    }
    EXPECT_EQ(end - begin, rows);  // no hole
    found.emplace_back(begin, end);
  }
  EXPECT(std::ranges::all_of(seen, [](int times) { return times == 1; }));
  std::vector<std::pair<int64_t, int64_t>> wanted;
  for (int owner = 0; owner < kWorld; ++owner) {
    if (owner == own) continue;
    const bool goes_on = owner > 0 && owner - 1 != own && owner != cut && owner - 1 != cut;
    const int64_t begin = owner * rows_of_a_rank, end = begin + rows_of_a_rank;
    if (goes_on) {
      wanted.back().second = end;
    } else {
      wanted.emplace_back(begin, end);
    }
  }
  std::ranges::sort(found);
  EXPECT(found == wanted);
}

TEST(chunks_that_lie_behind_each_other_are_joined_whatever_their_order_and_empty_ones_too) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    for (const int rows : {1, 2, 3, 7}) joins(rows, 4, seed % 6, seed % 7, seed);
  }
}

}  // namespace
