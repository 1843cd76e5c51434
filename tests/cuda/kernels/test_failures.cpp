// Ranks that do not come: every wait ends, says who was waited for, and nothing is written afterwards.
#include <chrono>
#include <thread>

#include "cuda/portable/workspace.cuh"
#include "fused.h"

namespace {

using namespace pyruntime;
using namespace kernels;

constexpr int64_t kDeadline = kSecond / 5;
constexpr int64_t kPatience = 30 * kSecond;

portable::WorkspaceHeader& header_of(const PyruntimeGroup& group, int rank) {
  return *static_cast<portable::WorkspaceHeader*>(group.workspaces[rank]);
}

template <class T>
bool all_poisoned(const std::vector<T>& values, int64_t begin, int64_t end) {
  return std::all_of(values.begin() + begin, values.begin() + end,
                     [](T value) { return value.bits == 0xffff; });
}

TEST(a_gather_whose_peer_never_sends_names_it_and_writes_only_its_own_rows) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 20, 12, 16, 2};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(2, [&](int rank) {
    if (rank == 1) return;
    const Gather<Bf16> gather(p, 1);
    std::vector<Bf16> c = poison<Bf16>(p.m * p.n);
    const PyruntimeMatmul matmul = gather.request(rank, c);
    const PyruntimeGroup group = workspaces.group(rank, 1, kDeadline);
    put_rows(gather, group);
    EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
    EXPECT_EQ(description(failure_of(group)),
              std::string(
                  "all_gather_matmul, rank 0 waiting for rank 1 to send chunk 0 into slot 1 (expected epoch "
                  "1, seen 0): the deadline has passed."));
    EXPECT(!all_poisoned(c, 0, 10 * p.n));
    EXPECT(all_poisoned(c, 10 * p.n, 20 * p.n));
  });
}

TEST(a_tile_waits_for_every_piece_that_it_has_rows_in) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 20, 12, 16, 3};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(1, [&](int) {
    const Gather<Bf16> gather(p, 1);
    std::vector<Bf16> c = poison<Bf16>(p.m * p.n);
    const PyruntimeMatmul matmul = gather.request(0, c);
    const PyruntimeGroup group = workspaces.group(0, 0, kDeadline);
    const PyruntimeGroup peer = workspaces.group(1, 0, kDeadline);
    for (const int piece : {0, 2}) EXPECT_OK(pyruntime_put(&peer, nullptr, 0, 0, 0, piece, 1, nullptr));
    EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
    EXPECT_EQ(failure_of(group).peer, 1);
    EXPECT_EQ(failure_of(group).chunk, 1);
    EXPECT(all_poisoned(c, 10 * p.n, 20 * p.n));
  });
}

TEST(a_scatter_whose_peer_never_sends_names_the_tile_and_leaves_the_result_alone) {
  const Problem p{3, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 12, 10, 16};
  const Workspaces workspaces(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(3, [&](int rank) {
    if (rank == 2) return;
    const Scatter<Bf16> scatter(p, 1);
    std::vector<Bf16> c = poison<Bf16>(4 * p.n);
    const PyruntimeMatmul matmul = scatter.request(rank, c);
    const PyruntimeGroup group = workspaces.group(rank, 0, rank == 0 ? kDeadline : kPatience);
    if (rank == 0) {  // rank 1 may be slow; it is not the one that is missing
      const PyruntimeGroup patient = workspaces.group(0, 0, kPatience);
      EXPECT_OK(pyruntime_await(&patient, 1, 0, 1, nullptr));
    }
    EXPECT_OK(pyruntime_matmul_reduce_scatter(&group, &matmul, nullptr));
    // Rank 1 has patience; it ends because rank 0 told it to, with the same cause.
    EXPECT_EQ(
        description(failure_of(group)),
        std::string("matmul_reduce_scatter, rank 0 waiting for rank 2 to send chunk 0 into slot 0 (expected "
                    "epoch 1, seen 0): the deadline has passed."));
    EXPECT(all_poisoned(c, 0, 4 * p.n));
  });
}

TEST(a_wait_ends_when_the_host_stops_it_and_nothing_is_written_down) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 8, 4, 16};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(1, [&](int) {
    const PyruntimeGroup group = workspaces.group(0, 0, kPatience);
    const auto begun = std::chrono::steady_clock::now();
    std::thread host([&] {
      void* stream = nullptr;
      EXPECT_OK(pyruntime_new_stream(&stream));
      nap_ms(50);
      EXPECT_OK(pyruntime_stop(&group, stream));
    });
    EXPECT_OK(pyruntime_await(&group, 1, 0, 1, nullptr));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    host.join();
    EXPECT(took.count() > 0.04 && took.count() < 10);
    EXPECT_EQ(failure_of(group).state, PYRUNTIME_NO_FAILURE);
    EXPECT_EQ(header_of(group, 0).stopped_by, 1u);
    EXPECT_EQ(header_of(group, 1).stopped_by, 0u);
  });
}

// Rank 1 has not finished with its slot, so rank 0 may not write there again.
TEST(a_put_without_leave_fails_and_tells_the_peer_whose_rows_it_spoils) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 8, 4, 16};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(2, [&](int rank) {
    const Gather<Bf16> gather(p, 1);
    std::vector<Bf16> c = poison<Bf16>(p.m * p.n);
    const PyruntimeMatmul matmul = gather.request(rank, c);
    PyruntimeGroup group = workspaces.group(rank, 0, kPatience);
    put_rows(gather, group);
    EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
    gather.check(c);
    if (rank == 0) {
      EXPECT_OK(pyruntime_finish(&group, nullptr));
      group.deadline_ns = kDeadline;
      put_rows(gather, group);
    } else {
      while (failure_of(group).state == PYRUNTIME_NO_FAILURE) nap_ms(5);
    }
    const PyruntimeFailure failure = failure_of(group);
    EXPECT_EQ(failure.op, PYRUNTIME_OP_PUSH);
    EXPECT_EQ(failure.rank, 0);
    EXPECT_EQ(failure.chunk, -1);
    EXPECT_EQ(description(failure),
              std::string(
                  "push of rows, rank 0 waiting for rank 1 to have done with slot 0 (expected epoch 1, seen "
                  "0): the deadline has passed."));
  });
}

// Several streams of a rank fail at once: while one of them still writes the record, the others' copies
// follow.
TEST(who_is_not_the_first_to_fail_tells_its_peer_before_it_copies) {
  const Problem p{3, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 12, 4, 16};
  for (const bool passes_on : {false, true}) {
    const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
    check::in_ranks(1, [&](int) {
      PyruntimeGroup group = workspaces.group(0, 0, kPatience);
      if (!passes_on) EXPECT_OK(pyruntime_put(&group, nullptr, 0, 1, 0, 0, 1, nullptr));  // takes the credit
      EXPECT_OK(pyruntime_end_puts(&group, nullptr));
      group.deadline_ns = kDeadline;
      header_of(group, 0).failure.state = PYRUNTIME_FAILURE_CLAIMED;
      if (passes_on) {
        EXPECT_OK(pyruntime_pass_on(&group, 2, 0, 1, 0, 0, 1, nullptr));
      } else {
        EXPECT_OK(pyruntime_put(&group, nullptr, 0, 1, 0, 0, 1, nullptr));
      }
      EXPECT_EQ(header_of(group, 1).stopped_by, uint64_t{1});
      EXPECT_EQ(header_of(group, 0).stopped_by, uint64_t{1});
      EXPECT_EQ(header_of(group, 2).stopped_by, uint64_t{0});
    });
  }
}

TEST(who_was_told_to_stop_tells_whom_it_copies_to) {
  const Problem p{3, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 12, 4, 16};
  const Workspaces workspaces(gather_shape(p, PYRUNTIME_BF16));
  check::in_ranks(1, [&](int) {
    const PyruntimeGroup group = workspaces.group(0, 0, kPatience);
    header_of(group, 0).stopped_by = 3;  // by rank 2, which has not come to rank 1 yet
    EXPECT_OK(pyruntime_put(&group, nullptr, 0, 1, 0, 0, 1, nullptr));
    EXPECT_EQ(header_of(group, 1).stopped_by, uint64_t{3});
  });
}

TEST(a_late_peer_within_the_deadline_is_waited_for) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 20, 12, 16};
  const Workspaces gathered(gather_shape(p, PYRUNTIME_BF16)), scattered(scatter_shape(p, PYRUNTIME_BF16));
  check::in_ranks(2, [&](int rank) {
    for (int late = 0; late < 2; ++late) {
      if (rank == late) nap_ms(150);
      const Gather<Bf16> gather(p, late);
      gather.check(gather_once(gather, gathered, rank, late));
      if (rank != late) nap_ms(150);
      const Scatter<Bf16> scatter(p, late);
      scatter.check(rank, scatter_once(scatter, scattered, rank, late));
    }
  });
}

TEST(after_a_failure_nothing_runs_until_all_have_prepared_anew) {
  const Problem p{2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 20, 12, 16};
  const PyruntimeWorkspace shape = scatter_shape(p, PYRUNTIME_BF16);
  const Workspaces workspaces(shape);
  const Scatter<Bf16> scatter(p, 1);
  check::in_ranks(1, [&](int) {
    std::vector<Bf16> c = poison<Bf16>(10 * p.n);
    const PyruntimeMatmul matmul = scatter.request(0, c);
    PyruntimeGroup group = workspaces.group(0, 0, kDeadline);
    EXPECT_OK(pyruntime_matmul_reduce_scatter(&group, &matmul, nullptr));
    EXPECT_EQ(failure_of(group).peer, 1);
    group.deadline_ns = kPatience;
    group.slot = 1;
    EXPECT_OK(pyruntime_matmul_reduce_scatter(&group, &matmul, nullptr));  // at once
    EXPECT_EQ(failure_of(group).slot, 0);                                  // the first cause stays
    EXPECT(all_poisoned(c, 0, 10 * p.n));
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_OK(pyruntime_prepare_workspace(&shape, group.workspaces[rank], nullptr));
    }
  });
  check::in_ranks(2, [&](int rank) { scatter.check(rank, scatter_once(scatter, workspaces, rank, 0)); });
}

TEST(a_wait_of_its_own_ends_at_the_flag_or_at_the_deadline) {
  const Workspaces workspaces({2, 3, 0});
  check::in_ranks(2, [&](int rank) {
    PyruntimeGroup group = workspaces.group(rank, 0, kPatience);
    if (rank == 1) {
      nap_ms(50);
      EXPECT_OK(pyruntime_put(&group, nullptr, 0, 0, 0, 1, 1, nullptr));
      return;
    }
    EXPECT_OK(pyruntime_await(&group, 1, 1, 1, nullptr));
    EXPECT_EQ(failure_of(group).state, static_cast<uint32_t>(PYRUNTIME_NO_FAILURE));
    group.deadline_ns = kDeadline;
    EXPECT_OK(pyruntime_await(&group, 1, 2, 1, nullptr));
    EXPECT_EQ(
        description(failure_of(group)),
        std::string("wait, rank 0 waiting for rank 1 to send chunk 2 into slot 0 (expected epoch 1, seen 0): "
                    "the deadline has passed."));
  });
}

}  // namespace
