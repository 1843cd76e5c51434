// The simulated devices under the thread sanitizer: what streams and events order is ordered between threads
// too, so that a race that it finds in a test of the product is the product's.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "sim/memory.h"
#include "sim/streams.h"

namespace sim {

bool Faults::drops() {
  return false;
}

}  // namespace sim

namespace {

using namespace sim;

constexpr int kRounds = 200;

TEST(events_order_what_streams_write) {
  std::vector<Queue*> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(&queue(own_stream(0)));
  int64_t value = 0;  // not atomic: events alone order its writers
  for (int round = 0; round < kRounds; ++round) {
    Queue& now = *streams[round % 3];
    now.enqueue({"add", [&] { value += 1; }});
    Event event;
    event.record(now);
    event.block(*streams[(round + 1) % 3]);
  }
  Event last;
  last.record(*streams[kRounds % 3]);
  last.synchronize();
  EXPECT_EQ(value, kRounds);
}

TEST(host_threads_fill_the_same_streams_and_wait_for_their_own) {
  Queue& shared = queue(own_stream(0));
  int64_t value = 0;
  std::vector<std::thread> hosts;
  for (int host = 0; host < 3; ++host) {
    hosts.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        std::atomic<bool> done = false;
        shared.enqueue({"add", [&] {
                          ++value;
                          done = true;
                        }});
        Event event;
        event.record(shared);
        if (round % 2 == 0) {
          event.synchronize();
        } else {
          shared.synchronize();
        }
        EXPECT(event.has_happened() && done);
      }
    });
  }
  for (std::thread& host : hosts) host.join();
  shared.synchronize();
  EXPECT_EQ(value, 3 * kRounds);
}

// A block goes from hand to hand: written by one stream, read by another, freed by the host meanwhile.
TEST(a_block_that_two_streams_use_is_reused_after_both) {
  const c10::Stream side = own_stream(0);
  std::atomic<int> wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    c10::DataPtr block = device_allocator()->allocate(4096);
    auto* words = static_cast<int64_t*>(block.get());
    Queue& own = current_queue(0);
    own.enqueue({"write", [=] { std::fill_n(words, 512, round); }});
    Event written;
    written.record(own);
    written.block(queue(side));
    queue(side).enqueue({"read", [=, &wrong] { wrong += std::count(words, words + 512, round) != 512; }});
    device_allocator()->recordStream(block, side);
  }
  synchronize_device(0);
  EXPECT_EQ(wrong, 0);
}

// The last test: the devices of this process are broken after it.
TEST(what_fails_on_a_stream_is_raised_by_the_next_wait_and_streams_go_on) {
  Queue& stream = queue(own_stream(0));
  stream.enqueue({"fails", [] { throw std::runtime_error("on purpose"); }});
  Event event;
  event.record(stream);
  EXPECT_THROWS(event.synchronize(), "on purpose");
  EXPECT_THROWS(stream.synchronize(), "on purpose");
}

}  // namespace
