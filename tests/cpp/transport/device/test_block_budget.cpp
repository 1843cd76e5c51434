// Fused kernels that share a device, on one that is made up: its events have happened when a test says so.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/device/block_budget.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using pyruntime::BlockBudget;

constexpr DeviceType kType = DeviceType::PrivateUse1;

struct Happenings {
  std::set<const void*> ended;  // events
  std::vector<std::pair<const void*, c10::StreamId>> recorded, waited_for;
  int synchronized = 0;
  int asked = 0;  // whether an event has ended
};

Happenings& happenings() {
  static Happenings all;
  return all;
}

struct MadeUpGuard : c10::impl::NoOpDeviceGuardImpl<kType> {
  static Device device() { return Device(kType, 0); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, device()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, device()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new char;
    happenings().ended.erase(*event);
    happenings().recorded.emplace_back(*event, stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    happenings().waited_for.emplace_back(event, stream.id());
  }
  bool queryEvent(void* event) const override {
    ++happenings().asked;
    return happenings().ended.count(event) > 0;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<char*>(event);
  }
  void synchronizeDevice(const DeviceIndex) const override { ++happenings().synchronized; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, MadeUpGuard)

constexpr int kMultiprocessors = 132;
constexpr int kAll = kMultiprocessors - BlockBudget::kSpare;
// Beside others: multiprocessors that are left over where clusters of two have no pair of them.
constexpr int kLeftOver = 8;

struct Budget : BlockBudget {
  Budget() : BlockBudget(MadeUpGuard::device()) { happenings() = {}; }

  static Launch launch(int stream, int blocks, bool is_captured = false, const void* owner = nullptr) {
    return {Stream(Stream::UNSAFE, MadeUpGuard::device(), stream), kMultiprocessors, blocks, is_captured,
            owner};
  }
  // Blocks that it got.
  int put(const Launch& launch) {
    int got = 0;
    BlockBudget::put(launch, [&](int blocks) { got = blocks; });
    return got;
  }
  using BlockBudget::why_crowded;
};

// What the last launch has recorded, happens.
void end_last() {
  happenings().ended.insert(happenings().recorded.back().first);
}

TEST(one_stream_gives_every_launch_all_blocks_that_it_has_a_use_for) {
  Budget budget;
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll);
  EXPECT_EQ(budget.why_crowded(Budget::launch(1, 1000)), "");
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll);
  EXPECT_EQ(budget.put(Budget::launch(1, 7)), 7);
  EXPECT_EQ(happenings().waited_for.size(), 0U);
  EXPECT_EQ(happenings().recorded.size(), 3U);
}

TEST(beside_a_kernel_under_way_a_launch_gets_what_that_leaves_if_it_is_half_of_what_it_wants) {
  Budget budget;
  EXPECT_EQ(budget.put(Budget::launch(1, 60)), 60);
  EXPECT_EQ(budget.put(Budget::launch(2, 31)), 31);
  EXPECT_EQ(budget.why_crowded(Budget::launch(3, 64)), "");
  EXPECT(budget.why_crowded(Budget::launch(3, 65)) != "");
  EXPECT_EQ(budget.put(Budget::launch(3, 64)), kAll - 60 - 31 - kLeftOver);  // 32
  EXPECT(budget.why_crowded(Budget::launch(4, 1)) != "");
}

TEST(a_crowded_launch_says_why_and_waits_for_the_others_in_the_order_of_streams) {
  Budget budget;
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll);
  EXPECT_EQ(budget.why_crowded(Budget::launch(2, 1000)),
            "of the 131 blocks of fused kernels that privateuseone:0 has room for at one time, 131 are under "
            "way on other streams");
  EXPECT_EQ(budget.put(Budget::launch(2, 1000)), kAll);
  const auto event = happenings().recorded.front().first;
  EXPECT(happenings().waited_for == (decltype(Happenings::waited_for){{event, 2}}));
  EXPECT_EQ(happenings().synchronized, 0);
  // Which of the two is last is told by either.
  budget.put(Budget::launch(1, 1000));
  EXPECT_EQ(happenings().waited_for.back().second, 1);
}

TEST(a_kernel_that_has_ended_gives_its_blocks_back) {
  Budget budget;
  budget.put(Budget::launch(1, 1000));
  end_last();
  EXPECT_EQ(budget.why_crowded(Budget::launch(2, 1000)), "");
  EXPECT_EQ(budget.put(Budget::launch(2, 1000)), kAll);
  EXPECT_EQ(happenings().waited_for.size(), 0U);
}

TEST(the_largest_of_a_streams_launches_counts_until_all_have_ended) {
  Budget budget;
  budget.put(Budget::launch(1, 100));
  budget.put(Budget::launch(1, 10));
  EXPECT(budget.why_crowded(Budget::launch(2, 100)) != "");
  end_last();
  EXPECT_EQ(budget.why_crowded(Budget::launch(2, 100)), "");
}

TEST(what_is_captured_holds_its_blocks_until_its_group_is_gone_and_asks_no_event) {
  Budget budget;
  int group = 0, other = 0;
  EXPECT_EQ(budget.put(Budget::launch(1, 100, /*is_captured=*/true, &group)), 100);
  // In one graph, and in another that was captured on that stream, one comes after the other.
  EXPECT_EQ(budget.put(Budget::launch(1, 1000, /*is_captured=*/true, &other)), kAll);
  EXPECT_EQ(happenings().asked, 0);
  EXPECT_EQ(happenings().recorded.size(), 0U);
  // On the stream of the capture too: it may be replayed on any.
  for (const int stream : {1, 2}) {
    EXPECT_EQ(
        budget.why_crowded(Budget::launch(stream, 1000)),
        "of the 131 blocks of fused kernels that privateuseone:0 has room for at one time, 131 are held "
        "by captured graphs, which may be replayed at any time");
  }
  budget.forget(&other);
  EXPECT_EQ(budget.put(Budget::launch(2, 40)), kAll - 100 - kLeftOver);
  budget.forget(&group);
  EXPECT_EQ(budget.put(Budget::launch(2, 1000)), kAll);
}

TEST(a_launch_that_insists_beside_a_graph_waits_for_the_device) {
  Budget budget;
  budget.put(Budget::launch(1, 1000, /*is_captured=*/true));
  EXPECT_EQ(budget.put(Budget::launch(2, 1000)), kAll);
  EXPECT_EQ(happenings().synchronized, 1);
}

TEST(graphs_of_two_streams_are_refused_in_a_sentence_where_they_do_not_fit_side_by_side) {
  Budget budget;
  budget.put(Budget::launch(1, 100, /*is_captured=*/true));
  EXPECT_EQ(budget.put(Budget::launch(2, 31, /*is_captured=*/true)), 23);
  bool was_put = false;
  EXPECT_THROWS(budget.BlockBudget::put(Budget::launch(3, 1000, true), [&](int) { was_put = true; }),
                "A fused kernel cannot be captured now: of the 131 blocks of fused kernels that "
                "privateuseone:0 has room for at one time, 123 are held by captured graphs");
  EXPECT(!was_put);
  EXPECT_EQ(happenings().synchronized, 0);
}

TEST(what_runs_while_a_graph_is_captured_does_not_count_against_it) {
  Budget budget;
  budget.put(Budget::launch(1, 1000));
  EXPECT_EQ(budget.put(Budget::launch(2, 1000, /*is_captured=*/true)), kAll);
}

TEST(a_launch_that_fails_holds_nothing) {
  Budget budget;
  EXPECT_THROWS(budget.BlockBudget::put(Budget::launch(1, 1000), [](int) { throw std::runtime_error("no"); }),
                "no");
  EXPECT_EQ(budget.why_crowded(Budget::launch(2, 1000)), "");
}

// NCCL_MAX_CTAS within a scope.
struct Limit {
  explicit Limit(const char* value) { setenv("NCCL_MAX_CTAS", value, 1); }
  ~Limit() { unsetenv("NCCL_MAX_CTAS"); }
};

TEST(nccl_has_room_where_a_process_group_sends_beside_fused_kernels_or_its_limit_is_set) {
  unsetenv("NCCL_MAX_CTAS");
  Budget budget;
  int data = 0, pipeline = 0;
  budget.leave_room(&data);
  budget.leave_room(&data);  // two groups of one process group take turns
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll - BlockBudget::kBlocksOfNccl - kLeftOver);
  budget.leave_room(&pipeline);
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll - 2 * BlockBudget::kBlocksOfNccl - kLeftOver);
  {
    const Limit limit("8");
    EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll - 2 * 8 - kLeftOver);
    budget.no_room(&pipeline);
    budget.no_room(&data);
    EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll - 8 - kLeftOver);
    budget.no_room(&data);
    EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll - 8 - kLeftOver);
  }
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), kAll);
  const Limit more("500");
  EXPECT_EQ(budget.put(Budget::launch(1, 1000)), 1);  // which is resident in any case
}

TEST(without_streams_a_launch_has_ended_when_it_returns) {
  BlockBudget budget(Device(DeviceType::CPU));
  const Stream stream(Stream::DEFAULT, Device(DeviceType::CPU));
  int inner = 0;
  budget.put({stream, 3, 1000, false, nullptr}, [&](int) {
    // Nor does a second one wait for the first.
    budget.put({stream, 3, 1000, false, nullptr}, [&](int blocks) { inner = blocks; });
  });
  EXPECT_EQ(inner, 2);
  budget.put({stream, 3, 1000, true, nullptr}, [](int) {});
  EXPECT(budget.why_crowded({stream, 3, 1000, false, nullptr}) != "");
}

}  // namespace
