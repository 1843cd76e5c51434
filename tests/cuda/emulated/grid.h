// Runs a grid on the host: every thread of every block is a fiber of the calling thread, and all blocks are
// resident at once. A fiber runs until it waits for others (a barrier, a warp operation) or yields, so a run
// is deterministic, and blocks that spin on another rank's flag do not block those that have work.
//
// It is stricter than a GPU: shared memory starts as NaNs, asynchronous copies arrive as late as possible,
// and a barrier that a thread of the block never reaches ends the process with a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#ifndef PYRUNTIME_HOST_WARP
#define PYRUNTIME_HOST_WARP 32
#endif

namespace pyruntime::host {

constexpr int kWarpSize = PYRUNTIME_HOST_WARP;
constexpr int kMostExchangedBytes = 64;  // by a thread in one warp operation

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// An asynchronous copy into shared memory that has not arrived.
struct PendingCopy {
  void* to;
  const void* from;
  int bytes;
};

struct Thread {
  Index thread, block, threads, blocks;
  unsigned char* shared = nullptr;
  std::vector<std::vector<PendingCopy>> committed;
  std::vector<PendingCopy> uncommitted;
};

// The running thread.
extern thread_local Thread* current;

// Runs body() in every thread of the grid and returns when all have ended.
void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body);

// Runs it on the stream, later; at once where there are no streams (pyruntime_host_use_streams()).
void run_on(void* stream, std::function<void()> run);
// A stream of its own; nullptr where there are no streams.
void* make_stream();
// Waits until the stream has run all that it was given.
void wait_for(void* stream);

// Launches a grid on the stream, with parameters as they are now.
template <class Kernel, class... Parameters>
void launch(int blocks, int threads, size_t shared_bytes, void* stream, const Kernel& kernel,
            const Parameters&... parameters) {
  run_on(stream, [=] { run_grid(blocks, threads, shared_bytes, [&] { kernel(parameters...); }); });
}

// Sets the order of runnable threads: 0, the default, is first come, first served. With odd seeds the latest
// comes first, so that a warp runs as far ahead as barriers allow; other seeds draw at random. A kernel's
// result must not depend on it.
void set_schedule(uint64_t seed);

// Sets the number of multiprocessors that the host claims to have, so that small problems have many blocks.
void set_multiprocessors(int count);
int multiprocessors();

// Waits for all threads of the block; returns whether x was true in each.
bool barrier_and(bool x);

// Exchanges some bytes of every thread of the warp. Returns all of them, lane i's at kMostExchangedBytes * i;
// valid until the next exchange but one.
const unsigned char* warp_exchange(const void* mine, size_t bytes);

// Lets other threads run, or other processes if no thread here can.
void yield();

void copy_async(void* to, const void* from, int bytes);
void copy_async_commit();
void copy_async_wait(size_t groups_left);

}  // namespace pyruntime::host
