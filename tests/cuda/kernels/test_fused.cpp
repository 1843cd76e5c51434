// The fused kernels with ranks as processes that share nothing but their workspaces.
#include "core/rings.h"
#include "fused.h"

namespace {

using namespace pyruntime;
using namespace kernels;

template <class T>
void gathers(const Problem& p) {
  const Workspaces workspaces(gather_shape(p, dtype_of<T>()));
  check::in_ranks(p.world_size, [&](int rank) {
    const Gather<T> gather(p, 1);
    gather.check(gather_once(gather, workspaces, rank, 0));
  });
}

template <class T>
void scatters(const Problem& p) {
  const Workspaces workspaces(scatter_shape(p, dtype_of<T>()));
  check::in_ranks(p.world_size, [&](int rank) {
    const Scatter<T> scatter(p, 1);
    scatter.check(rank, scatter_once(scatter, workspaces, rank, 0));
  });
}

// Around two rings of four ranks: each piece comes from a neighbour that has it. Slots are used again.
template <class T>
void gathers_around(const Problem& p, int calls) {
  static const int32_t orders[] = {0, 1, 2, 3, 0, 2, 1, 3};
  const Rings rings({{0, 1, 2, 3}, {0, 2, 1, 3}});
  const Workspaces workspaces(gather_shape(p, dtype_of<T>()));
  check::in_ranks(p.world_size, [&](int rank) {
    for (int call = 0; call < calls; ++call) {
      const Gather<T> gather(p, call);
      std::vector<T> c = poison<T>(p.m * p.n);
      const PyruntimeMatmul matmul = gather.request(rank, c);
      PyruntimeGroup group = workspaces.group(rank, call % PYRUNTIME_SLOTS);
      group.rings = 2;
      group.ring_orders = orders;
      group.pieces = rings.ways();
      const ChunkPlan plan(p.m, p.world_size, rank, rings.ways());
      const int64_t row_bytes = gather.lda() * static_cast<int64_t>(sizeof(T));
      for (int step = 0; step + 1 < p.world_size; ++step) {
        for (int way = 0; way < rings.ways(); ++way) {
          const int owner = rings.before(way, rank, step), next = rings.before(way, rank, -1);
          const Chunk piece = plan.piece(owner, way);
          const int64_t bytes = piece.rows * row_bytes, offset = piece.begin * row_bytes;
          if (step == 0) {
            EXPECT_OK(pyruntime_put(&group, gather.whole.data() + piece.begin * gather.lda(), bytes, next,
                                    offset, way, 1, nullptr));
          } else {
            EXPECT_OK(pyruntime_pass_on(&group, owner, bytes, next, offset, way, 1, nullptr));
          }
        }
      }
      EXPECT_OK(pyruntime_end_puts(&group, nullptr));
      EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
      EXPECT_OK(pyruntime_finish(&group, nullptr));
      EXPECT_EQ(description(failure_of(group)), std::string("nothing failed"));
      gather.check(c);
    }
  });
}

TEST(a_gather_around_rings_multiplies_the_rows_of_all_ranks) {
  gathers_around<Bf16>({4, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 150, 70, 40, 4}, 1);
  gathers_around<Fp16>({4, PYRUNTIME_NN, PYRUNTIME_TILES_LARGE, 97, 30, 24, 4, true}, 1);
  gathers_around<Bf16>({4, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 3, 17, 9, 4}, 6);  // pieces without rows
}

TEST(a_gather_multiplies_the_rows_of_all_ranks) {
  gathers<Bf16>({2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 130, 140, 72});
  gathers<Fp16>({3, PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 100, 70, 40, 1, true});
  gathers<Bf16>({2, PYRUNTIME_NT, PYRUNTIME_TILES_LARGE, 140, 30, 24});
}

TEST(a_gather_of_ragged_sizes) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 4; ++round) {
    const Problem p{static_cast<int>(random_size(draw, 2, 4)),
                    static_cast<int>(random_size(draw, 0, 1)),
                    PYRUNTIME_TILES_SMALL,
                    random_size(draw, 1, 190),
                    random_size(draw, 1, 150),
                    random_size(draw, 1, 90),
                    static_cast<int>(random_size(draw, 1, 3)),
                    round % 2 == 0};
    gathers<Bf16>(p);
  }
}

TEST(a_gather_with_fewer_rows_than_ranks) {
  gathers<Bf16>({4, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 3, 17, 9, 2});
}

TEST(a_group_of_one_rank) {
  gathers<Bf16>({1, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 70, 33, 20});
  scatters<Bf16>({1, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 70, 33, 20});
}

TEST(a_scatter_sums_the_parts_of_all_ranks_in_rank_order) {
  scatters<Bf16>({2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 130, 136, 72});
  scatters<Fp16>({3, PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 100, 70, 40, 1, true});
  scatters<Bf16>({4, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 90, 40, 80});
  scatters<Bf16>({2, PYRUNTIME_NN, PYRUNTIME_TILES_LARGE, 140, 30, 24});
}

TEST(a_scatter_of_ragged_sizes) {
  std::mt19937_64 draw(kSeed + 1);
  for (int round = 0; round < 4; ++round) {
    scatters<Bf16>({static_cast<int>(random_size(draw, 2, 4)), static_cast<int>(random_size(draw, 0, 1)),
                    PYRUNTIME_TILES_SMALL, random_size(draw, 1, 190), random_size(draw, 1, 150),
                    random_size(draw, 1, 90), 1, round % 2 == 0});
  }
}

TEST(a_scatter_with_fewer_rows_than_ranks) {
  scatters<Bf16>({4, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 3, 17, 9, 1, true});
}

// Ranks wander apart as far as the slots let them: each naps for itself, and none is ever told that another
// has ended. Inputs change from call to call; outputs are poisoned.
constexpr double kLongest = 100.0;  // seconds
#if defined(__SANITIZE_ADDRESS__)
constexpr int kCalls = 8;  // several times slower
#else
constexpr int kCalls = 40;
#endif

void late_at_random(int rank, int call) {
  std::mt19937_64 draw(kSeed + 100 * rank + call);
  if (random_size(draw, 0, 9) == 0) nap_ms(random_size(draw, 1, 5));
}

TEST(many_gathers_with_late_ranks_and_changing_inputs) {
  const Problem p{3, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 50, 20, 24, 2};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(
      p.world_size,
      [&](int rank) {
        for (int call = 0; call < kCalls; ++call) {
          late_at_random(rank, call);
          const Gather<Bf16> gather(p, call);
          gather.check(gather_once(gather, workspaces, rank, call));
        }
      },
      kLongest);
}

TEST(many_scatters_with_late_ranks_and_changing_inputs) {
  const Problem p{3, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 40, 20, 24, 1, true};
  const Workspaces workspaces(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(
      p.world_size,
      [&](int rank) {
        for (int call = 0; call < kCalls; ++call) {
          late_at_random(rank, call);
          const Scatter<Bf16> scatter(p, call);
          scatter.check(rank, scatter_once(scatter, workspaces, rank, call));
        }
      },
      kLongest);
}

TEST(ranks_may_take_different_tiles) {
  const Problem p{3, PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 400, 300, 24};
  const Workspaces workspaces(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(
      p.world_size,
      [&](int rank) {
        for (int call = 0; call < 3; ++call) {
          Scatter<Bf16> scatter(p, call);
          scatter.p.tiles = (rank + call) % 2;
          scatter.check(rank, scatter_once(scatter, workspaces, rank, call));
        }
      },
      kLongest);
}

// What a captured graph does: the same launches with the same arguments, in one slot.
TEST(one_slot_is_enough_for_calls_that_are_replayed) {
  const Problem p{2, PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 20, 9, 11};
  const Workspaces gathered(gather_shape(p, PYRUNTIME_BF16)), scattered(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(
      p.world_size,
      [&](int rank) {
        for (int call = 0; call < kCalls; ++call) {
          late_at_random(rank, call);
          const Gather<Bf16> gather(p, call);
          gather.check(gather_once(gather, gathered, rank, 0));
          const Scatter<Bf16> scatter(p, call);
          scatter.check(rank, scatter_once(scatter, scattered, rank, 0));
        }
      },
      kLongest);
}

TEST(a_slot_serves_several_gemms_and_can_be_read_until_it_is_finished) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 33, 12, 19};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(p.world_size, [&](int rank) {
    for (int call = 0; call < 4; ++call) {
      const Gather<Bf16> gather(p, call);
      const PyruntimeGroup group = workspaces.group(rank, call % PYRUNTIME_SLOTS);
      for (int weight = 0; weight < 2; ++weight) {
        std::vector<Bf16> c = poison<Bf16>(p.m * p.n);
        const PyruntimeMatmul matmul = gather.request(rank, c);
        if (weight == 0) put_rows(gather, group);
        EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
        gather.check(c);
        void* data = nullptr;
        EXPECT_OK(pyruntime_slot_data(&group, &data));
        const auto* rows = static_cast<const Bf16*>(data) + shard_begin(p, 1 - rank) * gather.lda();
        for (int64_t i = 0; i < p.k; ++i) EXPECT_EQ(rows[i].bits, gather.shard(1 - rank)[i].bits);
      }
      EXPECT_OK(pyruntime_finish(&group, nullptr));
    }
  });
}

TEST(results_are_the_same_bits_whatever_the_order_of_threads_and_the_number_of_blocks) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 150, 140, 70, 1, true};
  const Workspaces workspaces(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(p.world_size, [&](int rank) {
    const Scatter<Bf16> scatter(p, 1);
    const std::vector<Bf16> first = scatter_once(scatter, workspaces, rank, 0);
    scatter.check(rank, first);
    for (int call = 1; call < 4; ++call) {
      host::set_schedule(10 * call + rank + (call == 3));
      host::set_multiprocessors(1 + call + rank);
      const std::vector<Bf16> again = scatter_once(scatter, workspaces, rank, call);
      EXPECT(std::memcmp(again.data(), first.data(), first.size() * 2) == 0);
    }
  });
}

}  // namespace
