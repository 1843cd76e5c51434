// The host dialect itself: what runs kernels in all other tests.
#include "cuda/compat.h"
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

TEST(a_barrier_separates_writes_from_reads) {
  std::vector<int> seen(2 * 100);
  for (const uint64_t seed : {0, 1, 2}) {
    host::set_schedule(seed);
    std::fill(seen.begin(), seen.end(), -1);
    host::run_grid(2, 100, 100 * sizeof(int), [&] {
      auto* shared = reinterpret_cast<int*>(host::current->shared);
      shared[threadIdx.x] = static_cast<int>(threadIdx.x);
      __syncthreads();
      seen[blockIdx.x * 100 + threadIdx.x] = shared[99 - threadIdx.x];
    });
    for (int i = 0; i < 200; ++i) EXPECT_EQ(seen[i], 99 - i % 100);
  }
  host::set_schedule(0);
}

TEST(a_barrier_tells_all_threads_whether_all_agree) {
  int said_yes = 0, said_no = 0;
  host::run_grid(1, 64, 0, [&] {
    said_yes += device::barrier_and(true);
    said_no += !device::barrier_and(threadIdx.x != 17);
    said_yes += device::barrier_and(true);
  });
  EXPECT_EQ(said_yes, 128);
  EXPECT_EQ(said_no, 64);
}

TEST(a_shuffle_exchanges_within_the_warp) {
  std::vector<float> seen(128);
  host::run_grid(1, 128, 0, [&] {
    float sum = static_cast<float>(threadIdx.x);
    for (int mask = device::kWarpSize / 2; mask > 0; mask /= 2) sum += device::shuffle_xor(sum, mask);
    seen[threadIdx.x] = sum;
  });
  for (int i = 0; i < 128; ++i) {
    const int first = i / device::kWarpSize * device::kWarpSize;
    float sum = 0;
    for (int lane = 0; lane < device::kWarpSize; ++lane) sum += static_cast<float>(first + lane);
    EXPECT_EQ(seen[i], sum);
  }
}

TEST(blocks_that_spin_let_others_run) {
  uint64_t flag = 0;
  int arrived = 0;
  host::run_grid(3, 32, 0, [&] {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 2) {
      device::store_release_system(&flag, 1);
    } else {
      while (device::load_acquire_system(&flag) < 1) device::nap();
      ++arrived;
    }
  });
  EXPECT_EQ(arrived, 2);
}

TEST(an_asynchronous_copy_arrives_when_it_is_waited_for_and_not_before) {
  const std::vector<uint16_t> source{1, 2, 3, 4, 5, 6, 7, 8};
  uint16_t before = 0, after = 0, beyond = 7;
  host::run_grid(1, 1, 64, [&] {
    auto* shared = reinterpret_cast<uint16_t*>(host::current->shared);
    device::copy_async(shared, source.data(), 6);
    device::copy_async_commit();
    before = shared[2];
    device::copy_async_wait<0>();
    after = shared[2];
    beyond = shared[3];
  });
  EXPECT_EQ(before, 0xffff);
  EXPECT_EQ(after, 3);
  EXPECT_EQ(beyond, 0);
}

TEST(a_barrier_that_some_threads_never_reach_ends_the_process_with_a_sentence) {
  int streams[2];
  EXPECT_EQ(pipe(streams), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(streams[1], STDERR_FILENO);
    host::run_grid(1, 64, 0, [] {
      if (threadIdx.x < 32) __syncthreads();
    });
    _exit(0);
  }
  close(streams[1]);
  std::string text;
  char buffer[256];
  for (ssize_t got; (got = read(streams[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, got);
  close(streams[0]);
  EXPECT(text.find("block 0 is stuck: of its 64 threads 32 have ended and 32 wait at a barrier") !=
         std::string::npos);
}

TEST(every_half_converts_to_float_and_back) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = device::half_to_float(static_cast<uint16_t>(bits));
    const bool is_nan = (bits & 0x7c00) == 0x7c00 && (bits & 1023) != 0;
    EXPECT_EQ(std::isnan(value), is_nan);
    if (!is_nan) EXPECT_EQ(device::float_to_half(value), bits);
  }
}

// Between two neighbours, everything below the middle goes down, everything above it up, the middle to even.
template <class T>
void expect_rounding_to_nearest_even(uint32_t first, uint32_t last) {
  for (uint32_t bits = first; bits < last; ++bits) {
    const T low{static_cast<uint16_t>(bits)}, high{static_cast<uint16_t>(bits + 1)};
    const float middle = (to_float(low) + to_float(high)) / 2;
    EXPECT_EQ(portable::round_to<T>(std::nextafter(middle, 0.0f)).bits, low.bits);
    EXPECT_EQ(portable::round_to<T>(std::nextafter(middle, INFINITY)).bits, high.bits);
    EXPECT_EQ(portable::round_to<T>(middle).bits, (bits % 2 == 0 ? low : high).bits);
  }
}

TEST(floats_are_rounded_to_the_nearest_and_ties_to_even) {
  expect_rounding_to_nearest_even<Fp16>(0, 0x7bff);
  expect_rounding_to_nearest_even<Bf16>(0x0080, 0x7f00);
  EXPECT_EQ(portable::round_to<Fp16>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(portable::round_to<Fp16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(portable::round_to<Bf16>(NAN).bits, 0x7fc0);
  EXPECT_EQ(portable::round_to<Bf16>(INFINITY).bits, 0x7f80);
}

}  // namespace
