#include "grid.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pyruntime::host {

thread_local Thread* current = nullptr;

namespace {

constexpr size_t kStackBytes = size_t{1} << 18;  // reserved, and allocated when touched
constexpr long kIdleNs = 20'000;                 // ranks may outnumber cores

uint64_t schedule_seed = 0;
int claimed_multiprocessors = 3;

// Streams of whoever has some; nullptr: all happens at once.
void (*enqueue)(void* stream, void (*run)(void*), void* context) = nullptr;
void (*wait)(void* stream) = nullptr;
void* (*make)() = nullptr;

// ---- switching stacks ----

#if defined(__x86_64__)

// A context is its stack pointer; the registers that the calling convention preserves are on the stack.
using Context = void*;

extern "C" void pyruntime_switch_stacks(Context* save, Context load);
asm(R"(
.text
.globl pyruntime_switch_stacks
.type pyruntime_switch_stacks, @function
pyruntime_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pyruntime_switch_stacks, .-pyruntime_switch_stacks
)");

void switch_context(Context& save, Context& load) {
  pyruntime_switch_stacks(&save, load);
}

void make_context(Context& context, unsigned char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + kStackBytes);
  // As after a call: the return address is 8 bytes below a multiple of 16. An entry never returns.
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context = top;
}

#else

using Context = ucontext_t;

void switch_context(Context& save, Context& load) {
  swapcontext(&save, &load);
}

void make_context(Context& context, unsigned char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

// ---- the grid ----

struct Fiber;

// Threads of a block, or of a warp, that wait for each other.
struct Meeting {
  int members = 0;
  bool all_true = true;
  bool outcome = true;  // of the last meeting
  std::vector<Fiber*> waiting;
};

struct Warp {
  Meeting meeting;
  // Two tables: a thread that comes to an exchange has left the one before, but others may not have.
  unsigned char tables[2][kWarpSize * kMostExchangedBytes];
};

struct Block {
  Meeting meeting;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared_memory;
  int ended = 0;
};

struct Fiber {
  Thread thread;
  Context context;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  unsigned exchanges = 0;
  bool ended = false;
};

// Keeps stacks: mapping new ones costs more than a small grid. Each thread that runs grids has its own.
unsigned char* stack(size_t index) {
  static thread_local std::vector<unsigned char*> stacks;
  while (stacks.size() <= index) {
    void* made = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
      std::perror("the host dialect cannot map a stack for a thread");
      std::abort();
    }
    stacks.push_back(static_cast<unsigned char*>(made));
  }
  return stacks[index];
}

class Grid {
 public:
  Grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body);
  void run();

  void meet(Meeting& meeting, bool x);
  void give_way();
  [[noreturn]] void end();
  const std::function<void()>& body() const { return body_; }
  Fiber& running() { return *running_; }

 private:
  Fiber* next();
  void leave() { switch_context(running_->context, scheduler_); }
  [[noreturn]] void report_stuck() const;

  const std::function<void()>& body_;
  std::vector<Block> blocks_;
  std::vector<Fiber> fibers_;
  std::deque<Fiber*> ready_;
  Context scheduler_;
  Fiber* running_ = nullptr;
  size_t living_;
  size_t given_way_ = 0;  // consecutive yields, with no other progress
  uint64_t random_ = schedule_seed;
};

thread_local Grid* grid = nullptr;

void fiber_entry() {
  grid->body()();
  grid->end();
}

Grid::Grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body)
    : body_(body), blocks_(blocks), fibers_(static_cast<size_t>(blocks) * threads), living_(fibers_.size()) {
  const int warps = (threads + kWarpSize - 1) / kWarpSize;
  size_t index = 0;
  for (int b = 0; b < blocks; ++b) {
    Block& block = blocks_[b];
    block.meeting.members = threads;
    block.warps.resize(warps);
    block.shared_memory.reset(new unsigned char[shared_bytes + 128]);
    std::memset(block.shared_memory.get(), 0xff, shared_bytes + 128);  // NaNs of every type
    const auto start = reinterpret_cast<uintptr_t>(block.shared_memory.get());
    for (int t = 0; t < threads; ++t, ++index) {
      Fiber& fiber = fibers_[index];
      fiber.thread.thread = {static_cast<unsigned>(t), 0, 0};
      fiber.thread.block = {static_cast<unsigned>(b), 0, 0};
      fiber.thread.threads = {static_cast<unsigned>(threads), 1, 1};
      fiber.thread.blocks = {static_cast<unsigned>(blocks), 1, 1};
      fiber.thread.shared = block.shared_memory.get() + (128 - start % 128) % 128;
      fiber.block = &block;
      fiber.warp = &block.warps[t / kWarpSize];
      fiber.lane = t % kWarpSize;
      ++fiber.warp->meeting.members;
      make_context(fiber.context, stack(index), fiber_entry);
      ready_.push_back(&fiber);
    }
  }
}

Fiber* Grid::next() {
  if (schedule_seed % 2 != 0) {
    Fiber* fiber = ready_.back();
    ready_.pop_back();
    return fiber;
  }
  if (random_ != 0) {  // xorshift (Marsaglia 2003)
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    std::swap(ready_.front(), ready_[random_ % ready_.size()]);
  }
  Fiber* fiber = ready_.front();
  ready_.pop_front();
  return fiber;
}

void Grid::run() {
  while (living_ > 0) {
    if (ready_.empty()) report_stuck();
    if (given_way_ > ready_.size()) {  // all spin: another process must run
      given_way_ = 0;
      const timespec idle{0, kIdleNs};
      nanosleep(&idle, nullptr);
    }
    running_ = next();
    current = &running_->thread;
    switch_context(scheduler_, running_->context);
  }
  current = nullptr;
}

void Grid::meet(Meeting& meeting, bool x) {
  given_way_ = 0;
  meeting.all_true = meeting.all_true && x;
  if (static_cast<int>(meeting.waiting.size()) + 1 < meeting.members) {
    meeting.waiting.push_back(running_);
    leave();
    return;
  }
  meeting.outcome = meeting.all_true;
  meeting.all_true = true;
  for (Fiber* fiber : meeting.waiting) ready_.push_back(fiber);
  meeting.waiting.clear();
}

void Grid::give_way() {
  ++given_way_;
  if (schedule_seed % 2 != 0) {
    ready_.push_front(running_);  // behind all others, in that order too
  } else {
    ready_.push_back(running_);
  }
  leave();
}

void Grid::end() {
  given_way_ = 0;
  running_->ended = true;
  ++running_->block->ended;
  --living_;
  leave();
  std::abort();  // unreachable: an ended thread never runs again
}

void Grid::report_stuck() const {
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    if (block.ended == block.meeting.members) continue;
    std::fprintf(
        stderr,
        "host dialect: block %zu is stuck: of its %d threads %d have ended and %zu wait at a barrier "
        "of the block; the others wait for their warp. Every thread must reach every barrier.\n",
        b, block.meeting.members, block.ended, block.meeting.waiting.size());
  }
  std::abort();
}

}  // namespace

void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body) {
  Grid made(blocks, threads, shared_bytes, body);
  grid = &made;
  made.run();
  grid = nullptr;
}

void run_on(void* stream, std::function<void()> run) {
  if (enqueue == nullptr || stream == nullptr) return run();
  const auto call = [](void* context) {
    const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(context));
    (*own)();
  };
  enqueue(stream, call, new std::function<void()>(std::move(run)));
}

void* make_stream() {
  return make == nullptr ? nullptr : make();
}

void wait_for(void* stream) {
  if (enqueue != nullptr && stream != nullptr) wait(stream);
}

void set_schedule(uint64_t seed) {
  schedule_seed = seed;
}

void set_multiprocessors(int count) {
  claimed_multiprocessors = count;
}

int multiprocessors() {
  return claimed_multiprocessors;
}

bool barrier_and(bool x) {
  Meeting& meeting = grid->running().block->meeting;
  grid->meet(meeting, x);
  // The next meeting cannot complete before this thread comes to it, so the outcome is still valid.
  return meeting.outcome;
}

const unsigned char* warp_exchange(const void* mine, size_t bytes) {
  Fiber& fiber = grid->running();
  unsigned char* table = fiber.warp->tables[fiber.exchanges++ % 2];
  std::memcpy(table + fiber.lane * kMostExchangedBytes, mine, bytes);
  grid->meet(fiber.warp->meeting, true);
  return table;
}

void yield() {
  grid->give_way();
}

void copy_async(void* to, const void* from, int bytes) {
  current->uncommitted.push_back({to, from, bytes});
}

void copy_async_commit() {
  current->committed.push_back(std::move(current->uncommitted));
  current->uncommitted.clear();
}

void copy_async_wait(size_t groups_left) {
  auto& groups = current->committed;
  while (groups.size() > groups_left) {
    for (const PendingCopy& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace pyruntime::host

// From now on kernels run on the streams that their launchers are given: `enqueue` has run(context) called by
// the stream's thread, `wait` returns when the stream has nothing left, `make` returns a new stream.
extern "C" void pyruntime_host_use_streams(void (*enqueue)(void*, void (*)(void*), void*),
                                           void (*wait)(void*), void* (*make)()) {
  pyruntime::host::enqueue = enqueue;
  pyruntime::host::wait = wait;
  pyruntime::host::make = make;
}
