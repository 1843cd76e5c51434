// Rows go around rings of direct links: every piece comes to every rank, from a neighbour that has it.
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "core/chunk_plan.h"
#include "core/rings.h"

namespace {

using pyruntime::Chunk;
using pyruntime::ChunkPlan;
using pyruntime::Rings;

using Orders = std::vector<std::vector<int>>;

// Two orders of 8 ranks, as a node of Frontier has them.
const Orders kTwo{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 5, 4, 3, 2, 6, 7}};

TEST(a_way_leads_from_neighbour_to_neighbour_through_all_ranks) {
  const Rings rings(kTwo);
  EXPECT_EQ(rings.ways(), 4);
  EXPECT_EQ(rings.before(0, 3, 1), 2);  // forwards around the first
  EXPECT_EQ(rings.before(1, 3, 1), 4);  // forwards around the second
  EXPECT_EQ(rings.before(2, 3, 1), 4);  // and backwards
  EXPECT_EQ(rings.before(3, 3, 1), 2);
  EXPECT_EQ(rings.before(1, 3, -1), 2);  // who is next
  EXPECT_EQ(rings.before(0, 0, 1), 7);
  for (int way = 0; way < rings.ways(); ++way) {
    for (int rank = 0; rank < 8; ++rank) {
      std::set<int> met;
      for (int step = 0; step < 8; ++step) {
        const int owner = rings.before(way, rank, step);
        met.insert(owner);
        // What this rank passes on in a step is what the next one has one step later.
        EXPECT_EQ(rings.before(way, rings.before(way, rank, -1), step + 1), owner);
      }
      EXPECT_EQ(met.size(), size_t{8});
    }
  }
}

TEST(chunks_are_visited_in_the_order_in_which_they_come) {
  const Rings rings(kTwo);
  for (const int64_t rows : {0, 3, 32, 61}) {
    for (int rank = 0; rank < 8; ++rank) {
      const ChunkPlan plan(rows, 8, rank, rings.ways());
      const std::vector<Chunk> order = rings.gather_order(plan);
      EXPECT(order.front().owner == rank && order.front().is_whole());
      std::set<std::pair<int, int>> seen;
      std::vector<int> times(rows);
      int last_step = 1;
      for (size_t at = 0; at < order.size(); ++at) {
        const Chunk& chunk = order[at];
        for (int64_t row = 0; row < chunk.rows; ++row) ++times[chunk.begin + row];
        if (at == 0) continue;
        for (int piece = chunk.piece; piece < chunk.piece + chunk.pieces; ++piece) {
          int step = 1;
          while (rings.before(piece, rank, step) != chunk.owner) ++step;
          EXPECT(step == last_step || step == last_step + 1);
          last_step = step;
          EXPECT(seen.insert({chunk.owner, piece}).second);
        }
      }
      EXPECT_EQ(seen.size(), size_t{7 * 4});
      EXPECT_EQ(last_step, 7);
      EXPECT(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
    }
  }
}

TEST(pieces_that_come_together_are_one_chunk) {
  const std::vector<Chunk> order = Rings(kTwo).gather_order(ChunkPlan(64, 8, 0, 4));
  // Both rings begin 0-1 and end 7-0: each neighbour sends two pieces of its own in the first step.
  EXPECT_EQ(order[1].owner, 7);
  EXPECT_EQ(order[1].piece, 0);
  EXPECT_EQ(order[1].pieces, 2);
  EXPECT_EQ(order[2].owner, 1);
  EXPECT_EQ(order[2].piece, 2);
  EXPECT_EQ(order[2].pieces, 2);
}

TEST(a_ring_names_every_rank_once) {
  EXPECT_EQ(Rings().why_not(3), std::string());
  EXPECT_EQ(Rings(kTwo).why_not(8), std::string());
  EXPECT_EQ(Rings(Orders{{0, 2, 1}, {0, 1, 1}}).why_not(3),
            std::string("the ring 0-1-1 does not name each of 3 ranks once; give orders of 0 to 2, or leave "
                        "rings out."));
  EXPECT(!Rings(Orders{{0, 1}}).why_not(3).empty());
  EXPECT(!Rings(Orders{{0, 1, 3}}).why_not(3).empty());
  EXPECT(!Rings(Orders{{}}).why_not(3).empty());
}

}  // namespace
