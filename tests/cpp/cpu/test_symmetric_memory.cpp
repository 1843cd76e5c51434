// Symmetric memory between forked processes, without Python: the store is a file.
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "core/deadline.h"
#include "cpu/symmetric_memory.h"

namespace {

namespace symm = c10d::symmetric_memory;
using Handle = c10::intrusive_ptr<symm::SymmetricMemory>;

[[maybe_unused]] const bool registered = [] {
  pyruntime::cpu::register_symmetric_memory();
  return true;
}();

// A file that the ranks of one test meet in; it goes away with the object.
class MeetingPoint {
 public:
  MeetingPoint() {
    char path[] = "/tmp/symmetric-memory-XXXXXX";
    close(mkstemp(path));
    path_ = path;
  }
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;
  ~MeetingPoint() {
    for (const char* name : kGroups) c10d::unregister_process_group(name);
    std::filesystem::remove(path_);
  }

  // Makes this process rank `rank` of group "group" and of group "other".
  c10::intrusive_ptr<c10d::Store> join(int rank, int ranks) const {
    const auto store = c10::make_intrusive<c10d::FileStore>(path_, ranks);
    for (const char* name : kGroups) {
      groups_.push_back(c10::make_intrusive<c10d::ProcessGroup>(store, rank, ranks));
      c10d::register_process_group(name, groups_.back());  // which holds no reference
    }
    return store;
  }

 private:
  std::string path_;
  static constexpr std::array<const char*, 2> kGroups{"group", "other"};
  mutable std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

at::Tensor symmetric_floats(int64_t count) {
  return symm::empty_strided_p2p({count}, {1}, at::kFloat, at::kCPU, std::nullopt, std::nullopt);
}

void say(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  store->set(key, std::vector<uint8_t>{1});
}

void hear(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  store->wait({key}, std::chrono::seconds(20));
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(descriptors), end(descriptors)));
}

// True when all `count` floats of a rank's buffer are `value`.
bool holds(const Handle& handle, int rank, int64_t count, float value) {
  const at::Tensor buffer = handle->get_buffer(rank, {count}, at::kFloat, 0);
  const float* data = buffer.const_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    if (data[i] != value) return false;
  }
  return true;
}

void fill(const Handle& handle, int rank, int64_t count, float value) {
  float* data = handle->get_buffer(rank, {count}, at::kFloat, 0).mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) data[i] = value;
}

// 3 floats lie in one page with their signal pad; 1.5 million begin on a huge page.
TEST(ranks_read_and_write_each_others_memory) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t count : {int64_t{3}, int64_t{5000}, int64_t{1500000}}) {
      const MeetingPoint point;
      check::in_ranks(ranks, [&](int rank) {
        point.join(rank, ranks);
        const at::Tensor mine = symmetric_floats(count);
        const Handle handle = symm::rendezvous(mine, "group");
        EXPECT_EQ(handle->get_rank(), rank);
        EXPECT_EQ(handle->get_world_size(), ranks);
        EXPECT(handle->get_buffer_ptrs()[rank] == mine.data_ptr());
        fill(handle, rank, count, static_cast<float>(rank + 1));
        handle->barrier(0, 0);
        for (int peer = 0; peer < ranks; ++peer)
          EXPECT(holds(handle, peer, count, static_cast<float>(peer + 1)));
        handle->barrier(0, 0);
        const int next = (rank + 1) % ranks;
        fill(handle, next, count, static_cast<float>(100 * (rank + 1)));
        handle->barrier(0, 0);
        EXPECT(holds(handle, rank, count, static_cast<float>(100 * ((rank + ranks - 1) % ranks + 1))));
        handle->barrier(0, 0);  // a rank that ends frees its tensor, which ends the use of every handle
      });
    }
  }
}

TEST(what_is_written_before_a_signal_is_seen_after_it) {
  constexpr int kRounds = 300;
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    point.join(rank, 2);
    const at::Tensor mine = symmetric_floats(64);
    const Handle handle = symm::rendezvous(mine, "group");
    std::mt19937 generator(std::random_device{}());
    for (int round = 0; round < kRounds; ++round) {
      // Either side is late now and then.
      if (generator() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(generator() % 500));
      if (rank == 0) {
        fill(handle, 0, 64, static_cast<float>(round));
        handle->put_signal(1, 3, 0);
        handle->wait_signal(1, 5, 0);
      } else {
        handle->wait_signal(0, 3, 0);
        EXPECT(holds(handle, 0, 64, static_cast<float>(round)));
        handle->put_signal(0, 5, 0);
      }
    }
    handle->barrier(0, 0);
    // All taken. Channel 0, the first two words, is left out: rank 0 may be in the next barrier already.
    const at::Tensor pad = handle->get_signal_pad(rank, {}, at::kInt);
    const int* words = pad.const_data_ptr<int>();
    EXPECT_EQ(std::accumulate(words + 2, words + pad.numel(), 0), 0);
    handle->barrier(0, 0);
  });
}

TEST(a_second_rendezvous_gives_the_same_handle_and_another_group_is_refused) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    point.join(rank, 2);
    const at::Tensor mine = symmetric_floats(8);
    const Handle handle = symm::rendezvous(mine, "group");
    EXPECT(symm::rendezvous(mine, "group") == handle);
    EXPECT_THROWS(symm::rendezvous(mine, "other"), "double rendezvous");
    handle->barrier(0, 0);
  });
}

TEST(sizes_that_differ_are_refused_on_every_rank) {
  const MeetingPoint point;
  check::in_ranks(3, [&](int rank) {
    const auto store = point.join(rank, 3);
    const at::Tensor mine = symmetric_floats(rank == 1 ? 9 : 8);
    EXPECT_THROWS(symm::rendezvous(mine, "group"), "the same size on every rank");
    say(store, "refused " + std::to_string(rank));
    for (int peer = 0; peer < 3; ++peer) hear(store, "refused " + std::to_string(peer));
  });
}

TEST(use_after_free_is_named_with_its_rank) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    const auto store = point.join(rank, 2);
    at::Tensor mine = symmetric_floats(8);
    const Handle handle = symm::rendezvous(mine, "group");
    handle->barrier(0, 0);
    if (rank == 1) {
      mine.reset();
      say(store, "freed");
    } else {
      hear(store, "freed");
      EXPECT_THROWS(handle->get_buffer_ptrs(), ") has been freed; keep the tensor of every rank");
      EXPECT_THROWS(handle->put_signal(1, 0, 0), ") has been freed; keep the tensor of every rank");
      EXPECT_THROWS(handle->barrier(0, 0), ") has been freed; keep the tensor of every rank");
    }
  });
}

TEST(a_wait_for_a_peer_that_ended_raises_long_before_its_deadline) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    point.join(rank, 2);
    const at::Tensor mine = symmetric_floats(8);
    const Handle handle = symm::rendezvous(mine, "group");
    handle->barrier(0, 0);
    if (rank == 1) _exit(0);
    const double start = pyruntime::monotonic_seconds();
    EXPECT_THROWS(handle->wait_signal(1, 2, 60000), "has ended");
    EXPECT_THROWS(handle->barrier(1, 60000), "has ended");
    EXPECT(pyruntime::monotonic_seconds() - start < 10.0);
  });
}

TEST(a_wait_ends_at_its_deadline_and_names_the_peer) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    const auto store = point.join(rank, 2);
    const at::Tensor mine = symmetric_floats(8);
    const Handle handle = symm::rendezvous(mine, "group");
    if (rank == 0) {
      EXPECT_THROWS(handle->wait_signal(1, 2, 100), ", channel 2: no answer");
      handle->put_signal(1, 2, 100);
      EXPECT_THROWS(handle->put_signal(1, 2, 100), "put_signal");  // the first has not been taken
      say(store, "done");
    } else {
      hear(store, "done");
    }
  });
}

TEST(a_rendezvous_that_nobody_joins_ends_at_its_deadline) {
  const MeetingPoint point;
  check::in_ranks(1, [&](int rank) {
    point.join(rank, 2);
    pyruntime::cpu::set_symmetric_memory_deadline(0.2);
    const at::Tensor mine = symmetric_floats(8);
    EXPECT_THROWS(symm::rendezvous(mine, "group"), "rank 1 did not come");
  });
}

TEST(channels_and_peers_out_of_range_are_refused) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    point.join(rank, 2);
    const at::Tensor mine = symmetric_floats(8);
    const Handle handle = symm::rendezvous(mine, "group");
    const int channels = static_cast<int>(symm::get_signal_pad_size() / sizeof(uint32_t) / 2);
    EXPECT_THROWS(handle->put_signal(1 - rank, channels, 0), "does not fit in the signal pad");
    EXPECT_THROWS(handle->wait_signal(1 - rank, -1, 0), "channel -1");
    EXPECT_THROWS(handle->put_signal(2, 0, 0), "rank 2 is not in group");
    EXPECT_THROWS(handle->wait_signal(-1, 0, 0), "rank -1 is not in group");
    handle->barrier(channels - 1, 0);  // the last one that fits
  });
}

TEST(freed_memory_leaves_no_bytes_and_no_descriptors) {
  const MeetingPoint point;
  check::in_ranks(2, [&](int rank) {
    const auto store = point.join(rank, 2);
    say(store, "warm " + std::to_string(rank));  // what the store itself opens, it has opened now
    size_t before = 0;
    for (int round = 0; round < 6; ++round) {
      at::Tensor mine = symmetric_floats(1000);
      EXPECT_EQ(pyruntime::cpu::symmetric_memory_bytes(), size_t{4000});
      {
        const Handle handle = symm::rendezvous(mine, "group");
        handle->barrier(0, 0);
      }
      hear(store, "warm 0");
      mine.reset();
      EXPECT_EQ(pyruntime::cpu::symmetric_memory_bytes(), size_t{0});
      if (round == 0) before = open_descriptors();
    }
    EXPECT_EQ(open_descriptors(), before);
  });
}

TEST(a_pointer_that_is_no_symmetric_memory_is_refused) {
  const auto allocator = symm::get_allocator(at::kCPU);
  int word = 0;
  EXPECT_THROWS(allocator->get_alloc_size(&word), "not the start of live CPU symmetric memory");
  const MeetingPoint point;
  point.join(0, 1);
  EXPECT_THROWS(allocator->rendezvous(&word, "group"), "not the start of live CPU symmetric memory");
}

}  // namespace
