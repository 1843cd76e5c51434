// Runs a grid on the host: every thread of every block is a fiber of the calling thread, and all blocks are
// resident at once. A fiber runs until it waits for others (a barrier, a warp operation) or gives way
// (yield()), so a run is deterministic, and blocks that spin on another rank's flag do not stop those that
// have work.
//
// It is stricter than a GPU: shared memory starts as NaNs, asynchronous copies arrive as late as they may,
// and a barrier that some thread of the block never reaches ends the process with a sentence.
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

// A copy into shared memory that has been asked for and has not arrived.
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

// The one that is running.
extern thread_local Thread* current;

// Runs body() in every thread of the grid and returns when all have ended.
void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body);

// The order in which threads that can run do so: 0, the default, is first come, first served; with odd seeds
// the latest comes first, so that a warp runs ahead of the others as far as barriers let it; other seeds
// draw. What a kernel computes must not depend on it.
void set_schedule(uint64_t seed);

// How many multiprocessors the host claims to have, so that small problems have several blocks.
void set_multiprocessors(int count);
int multiprocessors();

// Waits for all threads of the block; returns whether x was true in each.
bool barrier_and(bool x);

// Every thread of the warp gives some bytes, and receives all of them: lane i's lie at
// kMostExchangedBytes * i, until the next exchange but one.
const unsigned char* warp_exchange(const void* mine, size_t bytes);

// Lets others run, other processes too where nobody here can.
void yield();

void copy_async(void* to, const void* from, int bytes);
void copy_async_commit();
void copy_async_wait(size_t groups_left);

}  // namespace pyruntime::host
