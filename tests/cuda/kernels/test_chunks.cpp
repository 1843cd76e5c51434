// Chunks that are put together, and the wait for all ranks at once.
#include "ranks.h"

namespace {

using namespace kernels;

constexpr int kRanks = 3, kFlags = 2;
constexpr int64_t kBytes = 40;

// What `from` puts for `to` in a flight.
std::vector<unsigned char> chunk(int from, int to, int flight) {
  std::vector<unsigned char> bytes(kBytes);
  for (int64_t i = 0; i < kBytes; ++i)
    bytes[i] = static_cast<unsigned char>(7 * from + 31 * to + 5 * flight + i);
  return bytes;
}

void put_to_others(const PyruntimeGroup& group, int flight) {
  std::vector<std::vector<unsigned char>> chunks;
  std::vector<PyruntimePut> puts;
  for (int step = 1; step < kRanks; ++step) {
    const int peer = (group.rank + step) % kRanks;
    chunks.push_back(chunk(group.rank, peer, flight));
    puts.push_back({chunks.back().data(), kBytes, peer, group.rank * kBytes, 0, kFlags});
  }
  EXPECT_OK(pyruntime_put_together(&group, puts.data(), kRanks - 1, nullptr));
  EXPECT_OK(pyruntime_end_puts(&group, nullptr));
}

TEST(chunks_that_are_put_together_are_there_after_the_wait_for_all_in_every_flight) {
  const Workspaces workspaces({kRanks, kFlags + 1, kRanks * kBytes});
  check::in_ranks(kRanks, [&](int rank) {
    const PyruntimeGroup group = workspaces.group(rank);
    void* data = nullptr;
    EXPECT_OK(pyruntime_slot_data(&group, &data));
    for (int flight = 0; flight < 6; ++flight) {
      put_to_others(group, flight);
      EXPECT_OK(pyruntime_await_all(&group, 0, kFlags, nullptr));
      for (int from = 0; from < kRanks; ++from) {
        const std::vector<unsigned char> wanted = chunk(from, rank, flight);
        const auto* here = static_cast<const unsigned char*>(data) + from * kBytes;
        if (from != rank) EXPECT(std::equal(wanted.begin(), wanted.end(), here));
      }
      EXPECT_OK(pyruntime_finish(&group, nullptr));
    }
    EXPECT_EQ(description(failure_of(group)), std::string("nothing failed"));
  });
}

TEST(a_wait_for_all_names_the_rank_that_has_not_put) {
  const Workspaces workspaces({kRanks, kFlags, kRanks * kBytes});
  check::in_ranks(kRanks, [&](int rank) {
    if (rank == 2) return;
    const PyruntimeGroup group = workspaces.group(rank, 0, rank == 0 ? kSecond / 5 : 30 * kSecond);
    put_to_others(group, 0);
    if (rank == 0) {  // rank 1 may be slow; it is not the one that is missing
      const PyruntimeGroup patient = workspaces.group(0, 0, 30 * kSecond);
      EXPECT_OK(pyruntime_await(&patient, 1, 0, kFlags, nullptr));
    }
    EXPECT_OK(pyruntime_await_all(&group, 0, kFlags, nullptr));
    // Rank 1 has patience; it ends because rank 0 told it to, with the same cause.
    const PyruntimeFailure failure = failure_of(group);
    EXPECT_EQ(failure.op, PYRUNTIME_OP_WAIT);
    EXPECT_EQ(failure.rank, 0);
    EXPECT_EQ(failure.peer, 2);
  });
}

// Rank 1 has not finished with its slot: nobody may read what is put after that.
TEST(chunks_that_are_put_together_without_leave_are_not_announced) {
  const Workspaces workspaces({kRanks, kFlags, kRanks * kBytes});
  check::in_ranks(kRanks, [&](int rank) {
    PyruntimeGroup group = workspaces.group(rank);
    put_to_others(group, 0);
    EXPECT_OK(pyruntime_await_all(&group, 0, kFlags, nullptr));
    if (rank == 1) {
      while (failure_of(group).state == PYRUNTIME_NO_FAILURE) nap_ms(5);
    } else {
      EXPECT_OK(pyruntime_finish(&group, nullptr));
      group.deadline_ns = rank == 0 ? kSecond / 5 : 30 * kSecond;
      put_to_others(group, 1);
      EXPECT_OK(pyruntime_await_all(&group, 0, kFlags, nullptr));
    }
    EXPECT_EQ(failure_of(group).op, PYRUNTIME_OP_PUSH);
    EXPECT_EQ(failure_of(group).rank, 0);
    EXPECT_EQ(failure_of(group).peer, 1);
  });
}

}  // namespace
