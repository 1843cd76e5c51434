// Chunks through one address for all ranks' copies: the same bytes as by a copy for each peer, sums as close
// to fp64 as their type allows, and ranks that do not come.
#include "cuda/portable/checks.h"
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

constexpr int64_t kGuard = 48;  // bytes behind what is written

unsigned char* data_of(const PyruntimeGroup& group) {
  void* data = nullptr;
  EXPECT_OK(pyruntime_slot_data(&group, &data));
  return static_cast<unsigned char*>(data);
}

// The host dialect plays the address: any will do.
void* multicast_of(const PyruntimeGroup& group) {
  return group.workspaces[group.rank];
}

// What rank `rank` sends in a round.
unsigned char byte_of(int round, int rank, int64_t i) {
  return static_cast<unsigned char>(37 * round + 101 * rank + 13 * i + i / 251);
}

void await_all(const PyruntimeGroup& group) {
  for (int peer = 0; peer < group.shape.world_size; ++peer) {
    if (peer != group.rank) EXPECT_OK(pyruntime_await(&group, peer, 0, 1, nullptr));
  }
}

// Rows of all ranks, gathered often enough that every slot is used again. Ranks below `by_copies` put a copy
// to each peer.
void gathers(int world, int64_t rows, int64_t row_bytes, int by_copies) {
  const int64_t bytes = rows * row_bytes;
  const Workspaces workspaces({world, 1, bytes + kGuard});
  const int late = static_cast<int>(kSeed % world);
  check::in_ranks(world, [&](int rank) {
    const Chunk own = ChunkPlan(rows, world, rank).own();
    for (int round = 0; round < 3 * PYRUNTIME_SLOTS; ++round) {
      const PyruntimeGroup group = workspaces.group(rank, round % PYRUNTIME_SLOTS);
      unsigned char* slot = data_of(group);
      const int64_t at = own.begin * row_bytes, size = own.rows * row_bytes;
      if (rank == late && round % 5 == 2) nap_ms(20);
      for (int64_t i = at; i < at + size; ++i) slot[i] = byte_of(round, rank, i);
      if (rank < by_copies) {
        for (int peer = 0; peer < world; ++peer) {
          if (peer != rank) EXPECT_OK(pyruntime_put(&group, slot + at, size, peer, at, 0, 1, nullptr));
        }
      } else {
        EXPECT_OK(pyruntime_put_to_all(&group, multicast_of(group), at, size, 0, 1, nullptr));
      }
      EXPECT_OK(pyruntime_end_puts(&group, nullptr));
      await_all(group);
      for (int owner = 0; owner < world; ++owner) {
        const Chunk theirs = ChunkPlan(rows, world, owner).own();
        for (int64_t i = theirs.begin * row_bytes; i < (theirs.begin + theirs.rows) * row_bytes; ++i) {
          if (slot[i] == byte_of(round, owner, i)) continue;
          check::fail(__FILE__, __LINE__,
                      "byte " + std::to_string(i) + " of rank " + std::to_string(owner) + " in round " +
                          std::to_string(round));
          return;
        }
      }
      EXPECT(std::all_of(slot + bytes, slot + bytes + kGuard, [](auto byte) { return byte == 0xff; }));
      EXPECT_OK(pyruntime_finish(&group, nullptr));
    }
    EXPECT_EQ(failure_of(workspaces.group(rank)).state, uint32_t{PYRUNTIME_NO_FAILURE});
  });
}

TEST(a_chunk_stored_once_lies_in_all_slots_byte_for_byte) {
  for (int world = 1; world <= 4; ++world) {
    gathers(world, 1, 2, 0);
    gathers(world, 7, 6, 0);
    gathers(world, 50, 14, 0);
    gathers(world, 9, 400, 0);
  }
  gathers(3, 11, 20000, 0);
}

TEST(ranks_that_store_once_and_ranks_that_copy_meet_in_one_flight) {
  gathers(2, 5, 30, 1);
  gathers(4, 23, 18, 2);
}

TEST(without_leave_of_all_nothing_is_stored) {
  constexpr int64_t kBytes = 100;
  const Workspaces workspaces({3, 1, kBytes});
  check::in_ranks(3, [&](int rank) {
    PyruntimeGroup group = workspaces.group(rank, 2);
    unsigned char* slot = data_of(group);
    std::fill_n(slot + 30 * rank, 30, static_cast<unsigned char>(rank));
    EXPECT_OK(pyruntime_put_to_all(&group, multicast_of(group), 30 * rank, 30, 0, 1, nullptr));
    EXPECT_OK(pyruntime_end_puts(&group, nullptr));
    await_all(group);
    if (rank != 1) EXPECT_OK(pyruntime_finish(&group, nullptr));
    if (rank != 0) return;
    // Rank 2 may be slow; it is not the one that holds its slot.
    const portable::Group view = portable::checked_group(&group, PYRUNTIME_OP_WAIT);
    while (device::load_acquire_system(view.credit(0, 2)) < 1) nap_ms(1);
    group.deadline_ns = kSecond / 5;
    std::fill_n(slot, 30, static_cast<unsigned char>(77));
    EXPECT_OK(pyruntime_put_to_all(&group, multicast_of(group), 0, 30, 0, 1, nullptr));
    EXPECT_EQ(description(failure_of(group)),
              std::string("multicast of rows, rank 0 waiting for rank 1 to have done with slot 2 (expected "
                          "epoch 1, seen 0): the deadline has passed."));
    for (int peer = 1; peer < 3; ++peer) {
      const auto* theirs = view.data<unsigned char>(peer);
      EXPECT(std::all_of(theirs, theirs + 30, [](auto byte) { return byte == 0; }));
      EXPECT_EQ(*view.flag(peer, 0, 0), uint64_t{1});
    }
  });
}

// Elements `shift` on of every rank's slot, summed by every rank; results lie `out_shift` elements off.
template <class T>
void sums(int world, int64_t count, int64_t shift, int64_t out_shift, bool with_bias) {
  constexpr int64_t kWidth = 7;
  const int64_t offset = shift * sizeof(T);
  const Workspaces workspaces({world, 1, static_cast<int64_t>((count + shift) * sizeof(T))});
  const int late = static_cast<int>(kSeed % world);
  check::in_ranks(world, [&](int rank) {
    for (int round = 0; round < 2 * PYRUNTIME_SLOTS + 1; ++round) {
      const PyruntimeGroup group = workspaces.group(rank, round % PYRUNTIME_SLOTS);
      EXPECT_OK(pyruntime_await_leave(&group, nullptr));  // peers have read what is written over
      std::vector<std::vector<T>> parts;
      for (int peer = 0; peer < world; ++peer) parts.push_back(random_values<T>(count, 100 * round + peer));
      const std::vector<T> bias = random_values<T>(kWidth, 7000 + round);
      if (rank == late && round % 3 == 1) nap_ms(20);
      std::memcpy(data_of(group) + offset, parts[rank].data(), count * sizeof(T));
      for (int peer = 0; peer < world; ++peer) {
        if (peer != rank) EXPECT_OK(pyruntime_put(&group, nullptr, 0, peer, 0, 0, 1, nullptr));
      }
      EXPECT_OK(pyruntime_end_puts(&group, nullptr));
      await_all(group);
      std::vector<T> out = poison<T>(count + out_shift + 1);
      EXPECT_OK(pyruntime_sum_copies(&group, multicast_of(group), out.data() + out_shift, offset, count,
                                     dtype_of<T>(), with_bias ? bias.data() : nullptr, kWidth, nullptr));
      EXPECT_OK(pyruntime_finish(&group, nullptr));
      const auto exact = [&](int64_t, int64_t i) {
        double sum = with_bias ? to_float(bias[i % kWidth]) : 0.0;
        for (const auto& part : parts) sum += to_float(part[i]);
        return sum;
      };
      const auto allowed = [&](int64_t, int64_t i) {  // a rounding of the sum and one behind the bias
        double size = with_bias ? std::fabs(to_float(bias[i % kWidth])) : 0.0;
        for (const auto& part : parts) size += std::fabs(to_float(part[i]));
        return (2 * unit<T>() + world * unit<float>()) * size;
      };
      expect_close("sum", out.data() + out_shift, count, 1, count, exact, allowed);
      for (int64_t i = 0; i < out_shift; ++i) EXPECT(std::isnan(to_float(out[i])));
      EXPECT(std::isnan(to_float(out[count + out_shift])));
    }
    EXPECT_EQ(failure_of(workspaces.group(rank)).state, uint32_t{PYRUNTIME_NO_FAILURE});
  });
}

TEST(sums_of_all_copies_are_those_in_fp64) {
  for (int world = 2; world <= 4; ++world) {
    sums<Bf16>(world, 1001, 3, 0, true);
    sums<Fp16>(world, 4096, 0, 0, false);
    sums<float>(world, 517, 1, 2, true);
  }
  sums<Bf16>(2, 5, 1, 0, false);  // no whole vector
  sums<float>(4, 20000, 2, 0, false);
  sums<Fp16>(3, 800, 8, 1, false);
}

TEST(what_makes_no_whole_vector_is_summed_in_rank_order) {
  const Workspaces workspaces({3, 1, 12});
  check::in_ranks(3, [&](int rank) {
    const PyruntimeGroup group = workspaces.group(rank);
    const float part[3] = {rank == 0 ? 1.0f : rank == 1 ? 1e8f : -1e8f, 1.0f, 2.0f};
    std::memcpy(data_of(group), part, sizeof(part));
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != rank) EXPECT_OK(pyruntime_put(&group, nullptr, 0, peer, 0, 0, 1, nullptr));
    }
    await_all(group);
    float out[3] = {};
    EXPECT_OK(
        pyruntime_sum_copies(&group, multicast_of(group), out, 0, 3, PYRUNTIME_FP32, nullptr, 3, nullptr));
    EXPECT_EQ(out[0], 0.0f);  // (1 + 1e8) - 1e8; from the last rank on it is 1
    EXPECT_EQ(out[1], 3.0f);
    EXPECT_EQ(out[2], 6.0f);
  });
}

std::string refused(int code) {
  EXPECT_EQ(code, int{PYRUNTIME_INVALID});
  return pyruntime_error();
}

TEST(bad_arguments_are_refused_in_a_sentence) {
  const Workspaces workspaces({2, 4, 64});
  const PyruntimeGroup group = workspaces.group(0);
  EXPECT_OK(pyruntime_can_multicast());
  EXPECT_EQ(
      refused(pyruntime_put_to_all(&group, nullptr, 0, 8, 0, 1, nullptr)),
      std::string("put_to_all: the multicast address is 0; it must be mapped, at a multiple of 16 bytes."));
  EXPECT_EQ(refused(pyruntime_put_to_all(&group, multicast_of(group), 60, 8, 0, 1, nullptr)),
            std::string("put_to_all: bytes 60 to 68 of a slot of 64; make a larger workspace."));
  EXPECT_EQ(refused(pyruntime_put_to_all(&group, multicast_of(group), 0, 8, 3, 2, nullptr)),
            std::string("put_to_all: flags 3 to 5; this workspace has 4 a rank."));
  float out[4];
  EXPECT_EQ(refused(pyruntime_sum_copies(&group, multicast_of(group), out, 2, 4, PYRUNTIME_FP32, nullptr, 4,
                                         nullptr)),
            std::string("sum_copies: offset=2; it must be a multiple of an element's 4 bytes."));
  EXPECT_EQ(refused(pyruntime_sum_copies(&group, multicast_of(group), nullptr, 0, 4, PYRUNTIME_FP32, nullptr,
                                         4, nullptr)),
            std::string("sum_copies: the result is a null pointer."));
}

}  // namespace
