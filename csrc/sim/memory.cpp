#include "sim/memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "sim/streams.h"

namespace sim {

namespace {

constexpr size_t kGranule = 512;

size_t round_up(size_t bytes) {
  return std::max(kGranule, (bytes + kGranule - 1) / kGranule * kGranule);
}

// ------------------------------------------------------------------------------------------- protection

struct sigaction handler_before;

void explain_fault(int signal, siginfo_t* info, void* context) {
  if (info->si_code == SEGV_PKUERR) {
    constexpr char kText[] =
        "sim: the host touched memory of a device; copy it to the host, or let a stream read it.\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof(kText) - 1);
  }
  sigaction(SIGSEGV, &handler_before, nullptr);  // the fault comes again, and is handled as before
  (void)signal;
  (void)context;
}

struct Protection {
  int key = -1;
  std::string why_not;

  Protection() {
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (key < 0) {
      why_not = std::string("the processor or kernel gives no protection keys: ") + std::strerror(errno);
      return;
    }
    struct sigaction action{};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &handler_before);
  }
};

const Protection& protection() {
  static const auto* instance = new Protection();
  return *instance;
}

// -------------------------------------------------------------------------------------------- regions

// Memory of one kind, by its address.
struct Regions {
  struct Region {
    size_t bytes;
    int device;
  };
  std::mutex mutex;
  std::map<const char*, Region> all;

  // The device whose memory it is; -1: it is in no region.
  int find(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = all.upper_bound(static_cast<const char*>(memory));
    if (after == all.begin()) return -1;
    --after;
    return memory < after->first + after->second.bytes ? after->second.device : -1;
  }
};

Regions& regions() {
  static auto* instance = new Regions();
  return *instance;
}

// --------------------------------------------------------------------------------------------- blocks

struct Block {
  char* memory;
  size_t bytes;
  Queue* stream;
  int device;
  size_t asked;                   // bytes
  std::set<Queue*> also_used_by;  // other streams
};

// A block that waits for other streams' use of it.
struct Waiting {
  Block* block;
  std::vector<Event> events;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device), limit_(settings().bytes) {
    const int access = Clock::is_on() ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* mapped = mmap(nullptr, limit_, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "The memory of sim:", device, " cannot be mapped.");
    begin_ = static_cast<char*>(mapped);
    add_device_memory(begin_, limit_, device);
    free_ranges_[begin_] = limit_;
  }

  Block* allocate(size_t asked, Queue& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t bytes = round_up(asked);
    take_back();
    Block* block = reuse(bytes, stream);
    if (block == nullptr) block = carve(bytes, stream);
    if (block == nullptr) {
      give_up_cached();
      block = carve(bytes, stream);
    }
    if (block == nullptr) ++stats_.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "sim:", device_, " is out of memory: ", asked,
                     " bytes were asked for, and of ", limit_, " bytes ", stats_.allocated_bytes[0].current,
                     " are in use.");
    block->asked = asked;
    for (auto* stat : {&stats_.allocated_bytes[0], &stats_.active_bytes[0], &stats_.requested_bytes[0]}) {
      stat->increase(block->bytes);
    }
    stats_.allocation[0].increase(1);
    return block;
  }

  void free(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocated_bytes[0], &stats_.active_bytes[0], &stats_.requested_bytes[0]}) {
      stat->decrease(block->bytes);
    }
    stats_.allocation[0].decrease(1);
    if (block->also_used_by.empty()) {
      make_free(block);
      return;
    }
    Waiting waiting{block, {}};
    for (Queue* user : block->also_used_by) {
      waiting.events.emplace_back();
      waiting.events.back().record(*user);
    }
    block->also_used_by.clear();
    waiting_.push_back(std::move(waiting));
  }

  // Only here the host waits with the lock: of what streams run, nothing allocates.
  void give_up_cached() {
    HostWaits::count("cached memory given up");
    for (Waiting& each : waiting_) {
      for (Event& event : each.events) event.synchronize();
    }
    take_back();
    while (!free_.empty()) {
      Block* block = free_.begin()->second;
      block->stream->synchronize();
      free_.erase(free_.begin());
      give_up(block);
    }
  }

  void note_use(Block* block, Queue& user) {
    const std::lock_guard<std::mutex> lock(mutex_);
    block->also_used_by.insert(&user);
  }

  template <class Function>
  auto with_stats(const Function& function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return function(stats_);
  }

  void empty_cache() {
    const std::lock_guard<std::mutex> lock(mutex_);
    give_up_cached();
  }

  int64_t unused() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(limit_) - stats_.allocated_bytes[0].current;
  }

 private:
  // Puts NaNs there. In virtual time memory is only addresses.
  static void forget(Queue& stream, const char* name, char* memory, size_t bytes) {
    if (!Clock::is_on()) stream.enqueue({name, [memory, bytes] { std::memset(memory, 0xff, bytes); }});
  }

  void make_free(Block* block) {
    forget(*block->stream, "(free)", block->memory, block->bytes);
    free_.emplace(std::pair(block->stream, block->bytes), block);
  }

  void take_back() {
    const auto is_over = [&](Waiting& each) {
      const bool over = std::all_of(each.events.begin(), each.events.end(),
                                    [](Event& event) { return event.has_happened(); });
      if (over) make_free(each.block);
      return over;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_over), waiting_.end());
  }

  Block* reuse(size_t bytes, Queue& stream) {
    const auto found = free_.lower_bound(std::pair(&stream, bytes));
    if (found == free_.end() || found->first.first != &stream) return nullptr;
    Block* block = found->second;
    // CUDA's allocator splits larger blocks. In virtual time its figures count, so sizes must be the same.
    const size_t spare = Clock::is_on() ? 0 : bytes / 4 + kGranule;
    if (block->bytes > bytes + spare) return nullptr;
    free_.erase(found);
    return block;
  }

  // Memory that no block has, of the first range that has room.
  Block* carve(size_t bytes, Queue& stream) {
    for (auto range = free_ranges_.begin(); range != free_ranges_.end(); ++range) {
      auto [memory, size] = *range;
      if (size < bytes) continue;
      free_ranges_.erase(range);
      if (size > bytes) free_ranges_[memory + bytes] = size - bytes;
      stats_.reserved_bytes[0].increase(bytes);
      forget(stream, "(new)", memory, bytes);
      return new Block{memory, bytes, &stream, device_, 0, {}};
    }
    return nullptr;
  }

  void give_up(Block* block) {
    char* memory = block->memory;
    size_t bytes = block->bytes;
    stats_.reserved_bytes[0].decrease(bytes);
    delete block;
    auto after = free_ranges_.lower_bound(memory);
    if (after != free_ranges_.end() && memory + bytes == after->first) {
      bytes += after->second;
      after = free_ranges_.erase(after);
    }
    if (after != free_ranges_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == memory) {
        before->second += bytes;
        return;
      }
    }
    free_ranges_[memory] = bytes;
  }

  const int device_;
  const size_t limit_;
  char* begin_ = nullptr;
  std::mutex mutex_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  std::map<char*, size_t> free_ranges_;
  std::multimap<std::pair<Queue*, size_t>, Block*> free_;
  std::vector<Waiting> waiting_;
};

DeviceMemory& memory_of(int device) {
  static auto* mutex = new std::mutex();
  static auto* all = new std::map<int, std::unique_ptr<DeviceMemory>>();
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& found = (*all)[device];
  if (!found) found = std::make_unique<DeviceMemory>(device);
  return *found;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block != nullptr) memory_of(block->device).free(block);
}

class Allocator : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, c10::Device(kSim, device)};
    raise_if_broken();
    Block* block = memory_of(device).allocate(bytes, current_queue(device));
    return {block->memory, block, &free_block, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_device(), "copy_data", [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < settings().devices; ++device) memory_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &free_block) return;  // memory that is not of this allocator
    auto* block = static_cast<Block*>(pointer.get_context());
    Queue& user = queue(stream);
    if (&user == block->stream) return;
    if (Faults::drops()) return;
    memory_of(block->device).note_use(block, user);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return memory_of(device).with_stats([](auto& stats) { return stats; });
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    memory_of(device).with_stats([](auto& stats) {
      stats.allocated_bytes[0].reset_accumulated();
      stats.reserved_bytes[0].reset_accumulated();
    });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    memory_of(device).with_stats([](auto& stats) {
      for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]})
        stat->reset_peak();
    });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memory_of(device).unused(), settings().bytes};
  }
};

// --------------------------------------------------------------------------------------------- pinned

Regions& pinned() {
  static auto* instance = new Regions();
  return *instance;
}

void free_pinned(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    const auto found = pinned().all.find(static_cast<const char*>(memory));
    std::memset(memory, 0xff, found->second.bytes);  // for whoever still reads it
    pinned().all.erase(found);
  }
  std::free(memory);
}

class PinnedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "The host has no ", bytes, " bytes left to pin.");
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().all[static_cast<const char*>(memory)] = {std::max<size_t>(bytes, 1), 0};
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void open_device_memory() {
  if (protection().key >= 0) pkey_set(protection().key, 0);
}

OpenMemory::OpenMemory() {
  if (protection().key < 0) return;
  before_ = pkey_get(protection().key);
  pkey_set(protection().key, 0);
}

OpenMemory::~OpenMemory() {
  if (protection().key >= 0) pkey_set(protection().key, before_);
}

std::string why_not_protected() {
  return protection().why_not;
}

void add_device_memory(void* memory, size_t bytes, int device) {
  if (protection().key >= 0 && !Clock::is_on()) {
    TORCH_CHECK(pkey_mprotect(memory, bytes, PROT_READ | PROT_WRITE, protection().key) == 0,
                "Device memory cannot be protected: ", std::strerror(errno));
  }
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().all[static_cast<const char*>(memory)] = {bytes, device};
}

void remove_device_memory(void* memory) {
  const std::lock_guard<std::mutex> lock(regions().mutex);
  regions().all.erase(static_cast<const char*>(memory));
}

c10::DeviceAllocator* device_allocator() {
  static auto* instance = new Allocator();
  return instance;
}

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

bool is_pinned(const void* memory) {
  return pinned().find(memory) >= 0;
}

int device_of(const void* memory) {
  return regions().find(memory);
}

}  // namespace sim
