#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/ring/ring.h"
#include "transport/ring/ring_of_threads.h"
#include "transport/ring/ring_ops.h"

namespace {

using namespace ring_test;

// Every rank with every other, without and with ranks that share a host.
template <typename Body>
void for_every_ring(const Body& body) {
  for (const auto& [ranks, ranks_per_host] : {std::pair{2, 1}, {3, 1}, {4, 1}, {4, 2}, {6, 2}}) {
    Setup setup;
    setup.ranks = ranks;
    setup.ranks_per_host = ranks_per_host;
    body(setup);
  }
}

// No rows, fewer than ranks, fewer than pieces, ragged; one block and two; one piece and many.
void every_shape_comes_out_right(Kind kind) {
  for_every_ring([&](Setup setup) {
    for (const int64_t chunk_bytes : {1 << 20, 40}) {
      setup.options.chunk_bytes = chunk_bytes;
      RingOfThreads(setup).run([&](Member& member) {
        int op = 0;
        for (const int64_t rows : {0, 1, 2, 3, 5, 17}) {
          run_op(member, kind, {rows, 1, 1, 5}, ++op);
          run_op(member, kind, {rows, 2, 3, 4}, ++op);
        }
      });
    }
  });
}

TEST(a_gather_brings_every_row_to_every_rank) {
  every_shape_comes_out_right(Kind::kGather);
}

TEST(a_scatter_brings_the_sum_over_the_ranks_to_its_owner) {
  every_shape_comes_out_right(Kind::kScatter);
}

TEST(a_scatter_for_all_brings_every_sum_to_every_rank) {
  every_shape_comes_out_right(Kind::kScatterAll);
}

TEST(dtypes_and_biases_come_out_right) {
  for_every_ring([](const Setup& setup) {
    RingOfThreads(setup).run([](Member& member) {
      int op = 0;
      for (const auto dtype : {c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Double}) {
        for (const Kind kind : kAllKinds) {
          run_op(member, kind, {19, 2, 1, 6, dtype, kind != Kind::kGather}, ++op);
          run_op(member, kind, {19, 1, 2, 3, dtype, kind != Kind::kGather}, ++op);
        }
      }
    });
  });
}

TEST(rows_without_columns_need_no_bytes) {
  for_every_ring([](const Setup& setup) {
    RingOfThreads(setup).run([](Member& member) {
      for (const Kind kind : kAllKinds) run_op(member, kind, {7, 1, 1, 0}, 1);
    });
  });
}

TEST(every_rank_learns_how_many_rows_the_others_hold) {
  for_every_ring([](const Setup& setup) {
    RingOfThreads(setup).run([](Member& member) {
      for (int round = 0; round < 6; ++round) {
        FlightDescriptor descriptor = describe(Op::kAllGather, {1, 2, 1, 5}, member);
        descriptor.rows = pyruntime::kUnknownRows;
        descriptor.own_rows = 100 * round + member.rank();
        const std::vector<int64_t> held = member.transport().rows_held(descriptor);
        EXPECT_EQ(held.size(), static_cast<size_t>(member.ranks()));
        for (int rank = 0; rank < member.ranks(); ++rank) EXPECT_EQ(held[rank], 100 * round + rank);
      }
    });
  });
}

// --- several at once

TEST(flights_may_be_published_and_completed_in_another_order_on_every_rank) {
  for_every_ring([](Setup setup) {
    setup.most_delay_seconds = 200e-6;
    RingOfThreads(setup).run([](Member& member) {
      std::mt19937 random(member.rank());
      int op = 0;
      for (int round = 0; round < 10; ++round) {
        std::vector<std::unique_ptr<RingOp>> flights;
        for (int i = 0; i < pyruntime::kSlots; ++i) {
          ++op;
          flights.push_back(begin(member, kAllKinds[op % 3], {11 + i, 1, 1, 9}, op));
        }
        std::shuffle(flights.begin(), flights.end(), random);
        for (const auto& flight : flights) flight->publish();
        std::shuffle(flights.begin(), flights.end(), random);
        for (const auto& flight : flights) flight->sum();
        std::shuffle(flights.begin(), flights.end(), random);
        for (const auto& flight : flights) flight->complete();
      }
    });
  });
}

TEST(slots_are_used_again_for_other_sizes) {
  for_every_ring([](const Setup& setup) {
    RingOfThreads(setup).run([](Member& member) {
      for (int op = 1; op <= 10 * pyruntime::kSlots; ++op) {
        const int64_t rows = op % 7 == 0 ? 0 : 3 * op % 50;
        run_op(member, kAllKinds[op % 3], {rows, 1 + op % 2, 1, 1 + op % 13}, op);
      }
    });
  });
}

TEST(a_fifth_flight_is_refused_and_the_group_goes_on) {
  for_every_ring([](const Setup& setup) {
    if (setup.ranks_per_host > 1) return;  // there the workspace refuses, and then the group is broken
    RingOfThreads(setup).run([](Member& member) {
      std::vector<std::unique_ptr<RingOp>> flights;
      for (int op = 1; op <= pyruntime::kSlots; ++op) {
        flights.push_back(begin(member, Kind::kGather, {9, 1, 1, 3}, op));
        flights.back()->publish();
      }
      EXPECT_THROWS(begin(member, Kind::kGather, {9, 1, 1, 3}, 99),
                    "Group 'ring' already has 4 ops in flight; finish one before beginning all_gather.");
      for (const auto& flight : flights) flight->complete();
      for (int op = 5; op <= 12; ++op) run_op(member, kAllKinds[op % 3], {9, 1, 1, 3}, op);
    });
  });
}

// Each rank publishes, sums and completes when it likes, as far as `kSlots` flights and the others, who wait
// for what it has not done yet, allow it.
void random_ops(Member& member, unsigned seed, int ops) {
  struct Running {
    std::unique_ptr<RingOp> op;
    bool summed = false;
  };
  std::mt19937 common(seed);                      // the same on all ranks
  std::mt19937 own(seed * 1000 + member.rank());  // one rank's
  std::deque<Running> running;                    // in the order in which they were begun
  std::vector<RingOp*> unpublished;
  const auto up_to = [](std::mt19937& random, int most) {
    return std::uniform_int_distribution<int>(0, most)(random);
  };
  const auto publish_all = [&] {
    std::shuffle(unpublished.begin(), unpublished.end(), own);
    for (RingOp* op : unpublished) op->publish(&own);
    unpublished.clear();
  };
  const auto complete = [&](int which) {
    publish_all();
    // Others may wait for the sums of earlier flights, and may not have begun later ones.
    for (int i = 0; i <= which; ++i) {
      if (!running[i].summed) running[i].op->sum();
      running[i].summed = true;
    }
    running[which].op->complete();
    running.erase(running.begin() + which);
  };
  for (int op = 1; op <= ops; ++op) {
    const Kind kind = kAllKinds[up_to(common, 2)];
    Shape shape{up_to(common, 40), 1 + up_to(common, 1), 1 + up_to(common, 2), 1 + up_to(common, 16)};
    if (up_to(common, 3) == 0) shape.dtype = c10::ScalarType::BFloat16;
    shape.with_bias = kind != Kind::kGather && up_to(common, 1) == 0;
    if (up_to(own, 9) == 0) std::this_thread::sleep_for(std::chrono::microseconds(up_to(own, 1000)));
    // The slot's flight before it.
    while (!running.empty() && running.front().op->number() <= op - pyruntime::kSlots) complete(0);
    running.push_back({begin(member, kind, shape, op)});
    unpublished.push_back(running.back().op.get());
    if (up_to(own, 1) == 0) publish_all();
    // Ranks that share a host wait for each other's completion, so they complete in one order.
    const int last = static_cast<int>(running.size()) - 1;
    if (up_to(own, 2) == 0) complete(member.ranks_per_host() > 1 ? 0 : up_to(own, last));
  }
  while (!running.empty()) complete(0);
}

TEST(random_ops_over_a_network_with_random_delays_come_out_right) {
  for_every_ring([](Setup setup) {
    setup.most_delay_seconds = 300e-6;
    setup.options.chunk_bytes = 100;
    RingOfThreads(setup).run([](Member& member) { random_ops(member, 1, 200); });
  });
}

TEST(random_ops_over_a_fast_network_come_out_right) {
  for_every_ring([](const Setup& setup) {
    RingOfThreads(setup).run([](Member& member) { random_ops(member, 2, 200); });
  });
}

// --- what travels

// bf16 sums of numbers that bf16 cannot add exactly; returns how many differ from the exact sum, rounded
// once.
int64_t sums_not_rounded_once(const Setup& setup) {
  std::atomic<int64_t> differ{0};
  RingOfThreads(setup).run([&](Member& member) {
    const Shape shape{40, 1, 1, 16, c10::ScalarType::BFloat16};
    const auto part = [](int rank, int64_t row, int64_t column) {
      return rank == (row + column) % 3 ? 256.0f : number_at(1, rank, 0, row, column);
    };
    const auto flight = member.transport().scatter(describe(Op::kReduceScatter, shape, member), false);
    for (const Chunk& chunk : flight->order()) {
      fill(flight->part(chunk), chunk, shape,
           [&](int64_t, int64_t row, int64_t column) { return part(member.rank(), row, column); });
      flight->publish(chunk);
    }
    const Chunk own = pyruntime::ChunkPlan(shape.rows, member.ranks(), member.rank()).own();
    const at::Tensor out = at::empty({1, own.rows, shape.width}, shape.dtype);
    flight->reduce(out, {});
    flight->finish();
    for_each_element<c10::BFloat16>(out, own, shape,
                                    [&](c10::BFloat16& element, int64_t, int64_t row, int64_t column) {
                                      float sum = 0;
                                      for (int rank = 0; rank < member.ranks(); ++rank) {
                                        sum += part(rank, row, column);
                                      }
                                      differ += element != c10::BFloat16(sum);
                                    });
  });
  return differ;
}

TEST(partial_sums_that_travel_in_float32_are_rounded_once) {
  for_every_ring([](Setup setup) {
    setup.options.wire = c10::ScalarType::Float;
    EXPECT_EQ(sums_not_rounded_once(setup), 0);
    // The numbers tell the difference: as bf16 they are rounded on the way.
    setup.options.wire = c10::ScalarType::Undefined;
    if (setup.ranks > 2) EXPECT(sums_not_rounded_once(setup) > 0);
  });
}

TEST(a_wire_dtype_changes_no_exact_sum) {
  for_every_ring([](Setup setup) {
    setup.options.wire = c10::ScalarType::Float;
    RingOfThreads(setup).run([](Member& member) { random_ops(member, 3, 60); });
  });
}

// --- the end

TEST(flush_returns_when_everything_has_arrived) {
  for_every_ring([](Setup setup) {
    setup.most_delay_seconds = 2e-3;
    setup.options.chunk_bytes = 100;
    RingOfThreads(setup).run([](Member& member) {
      for (int op = 1; op <= 5; ++op) {
        run_op(member, kAllKinds[op % 3], {40, 1, 1, 8}, op);
        member.transport().flush();
        EXPECT_EQ(member.network().on_the_way_from(member.rank()), 0);
      }
    });
  });
}

TEST(a_group_may_be_closed_and_opened_again) {
  for_every_ring([](Setup setup) {
    setup.most_delay_seconds = 300e-6;
    RingOfThreads ring(setup);
    for (int opening = 0; opening < 6; ++opening) {
      ring.run([&](Member& member) { random_ops(member, 10 + opening, 10); });
    }
  });
}

TEST(a_ring_measures_its_link_once_and_all_ranks_go_by_the_same_cost) {
  for_every_ring([](Setup setup) {
    setup.options.chunk_bytes = 0;
    RingOfThreads ring(setup);
    std::vector<std::string> said(setup.ranks);
    for (unsigned opening = 0; opening < 2; ++opening) {
      ring.run([&](Member& member) {
        const std::string text = member.transport().description();
        EXPECT(text.find("measured") != std::string::npos);
        if (opening > 0) EXPECT_EQ(text, said[member.rank()]);
        said[member.rank()] = text;
        random_ops(member, opening, 20);
      });
      for (const std::string& text : said) EXPECT_EQ(text, said.front());
    }
  });
}

TEST(a_ring_says_what_it_is) {
  Setup setup;
  setup.ranks = 3;
  RingOfThreads(setup).run([](Member& member) {
    EXPECT_EQ(member.transport().description(), "ring over memory, 3 hosts, chunks of about 256 bytes");
  });
  setup.ranks = 4;
  setup.ranks_per_host = 2;
  RingOfThreads(setup).run([](Member& member) {
    EXPECT_EQ(
        member.transport().description(),
        "hierarchical: 2 hosts of 2 ranks, symmetric memory inside a host and memory between them, chunks "
        "of about 256 bytes");
  });
}

}  // namespace
