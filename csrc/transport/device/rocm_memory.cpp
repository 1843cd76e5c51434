#include "transport/device/rocm_memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/job/job_ranks.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

constexpr unsigned kUncached = 3;          // hipDeviceMallocUncached
constexpr unsigned kEnablePeerAccess = 1;  // hipIpcMemLazyEnablePeerAccess

// The data about an allocation that ranks exchange, in CPU symmetric memory. The owner writes the first two
// fields before the rendezvous.
struct Page {
  HipIpcHandle handle;
  uint64_t bytes;
  std::atomic<uint32_t> closed;  // peers that no longer need the memory
};

void check(const HipRuntime& hip, int error, const std::string& doing) {
  TORCH_CHECK(error == 0, "Symmetric memory on a GPU of AMD: ", doing,
              " failed: ", hip.hipGetErrorName(error), ".");
}

// One allocation of this rank, and its page.
struct Block {
  Block(const HipRuntime& hip, c10::Device device, size_t bytes)
      : hip(hip),
        device(device),
        page_memory(
            symm::empty_strided_p2p({sizeof(Page)}, {1}, c10::kByte, c10::kCPU, std::nullopt, std::nullopt)),
        page(new (page_memory.data_ptr()) Page{{}, bytes, {0}}) {
    const c10::DeviceGuard guard(device);
    check(hip, hip.hipExtMallocWithFlags(&data, bytes, kUncached),
          "hipExtMallocWithFlags of " + std::to_string(bytes) + " uncached bytes");
    const int error = hip.hipIpcGetMemHandle(&page->handle, data);
    if (error != 0) static_cast<void>(hip.hipFree(data));
    check(hip, error, "hipIpcGetMemHandle");
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    const c10::DeviceGuard guard(device);
    static_cast<void>(hip.hipFree(data));  // waits for the device
  }

  bool all_closed() const { return page->closed.load(std::memory_order_acquire) >= peers; }

  HipRuntime hip;
  c10::Device device;
  at::Tensor page_memory;
  Page* page;
  void* data = nullptr;
  std::atomic<uint32_t> peers{0};  // peers that may have opened it
  c10::intrusive_ptr<symm::SymmetricMemory> handle;
};

// Blocks that are free here and open elsewhere; never destroyed, because the runtime may end before static
// objects do.
struct Leaving {
  std::mutex mutex;
  std::list<std::shared_ptr<Block>> blocks;

  static Leaving& instance() {
    static auto* leaving = new Leaving();
    return *leaving;
  }
  void sweep(std::shared_ptr<Block> another = nullptr) {
    std::list<std::shared_ptr<Block>> gone;  // freed without the lock
    const std::lock_guard<std::mutex> lock(mutex);
    if (another) blocks.push_back(std::move(another));
    for (auto it = blocks.begin(); it != blocks.end();) {
      const auto next = std::next(it);
      if ((*it)->all_closed()) gone.splice(gone.end(), blocks, it);
      it = next;
    }
  }
};

// The memory of all ranks, as this rank maps it.
class RocmSymmetricMemory : public symm::SymmetricMemory {
 public:
  // `pages` are those of all ranks, `job_ranks` their numbers in the job. Raises if a peer's memory cannot be
  // opened, and then closes the others'.
  RocmSymmetricMemory(const HipRuntime& hip, c10::Device device, void* own, size_t bytes,
                      c10::intrusive_ptr<symm::SymmetricMemory> pages, std::vector<int> job_ranks)
      : hip_(hip),
        device_(device),
        bytes_(bytes),
        pages_(std::move(pages)),
        job_ranks_(std::move(job_ranks)) {
    for (void* page : pages_->get_buffer_ptrs()) page_of_.push_back(static_cast<Page*>(page));
    buffers_.resize(page_of_.size());
    buffers_[get_rank()] = own;
    try {
      for (int peer = 0; peer < get_world_size(); ++peer) {
        if (peer != get_rank()) open(peer);
      }
    } catch (...) {
      close();
      throw;
    }
  }
  ~RocmSymmetricMemory() override { close(); }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return pages_->get_rank(); }
  int get_world_size() override { return static_cast<int>(page_of_.size()); }
  c10::Device get_device() override { return device_; }
  bool world_within_direct_access() override { return true; }

  // Signals are words in our own workspaces (csrc/cuda/README.md); torch's own memory has torch's.
  std::vector<void*> get_signal_pad_ptrs() override { no_signals(); }
  void** get_signal_pad_ptrs_dev() override { no_signals(); }
  void** get_buffer_ptrs_dev() override { no_signals(); }
  void barrier(int, size_t) override { no_signals(); }
  void put_signal(int, int, size_t) override { no_signals(); }
  void wait_signal(int, int, size_t) override { no_signals(); }

 private:
  [[noreturn]] static void no_signals() {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "The workspaces of pyruntime on GPUs of AMD have neither signal pads nor "
                                "addresses on the device; use torch.distributed._symmetric_memory.");
  }

  std::string name_of(int rank) const { return JobRanks::instance().name_and_place(job_ranks_.at(rank)); }

  void open(int peer) {
    const Page& page = *page_of_[peer];
    TORCH_CHECK_VALUE(page.bytes == bytes_, "rendezvous: ", name_of(peer), " brings ", page.bytes,
                      " bytes of GPU memory and ", name_of(get_rank()), " brings ", bytes_,
                      "; symmetric memory has the same size on every rank.");
    const c10::DeviceGuard guard(device_);
    check(hip_, hip_.hipIpcOpenMemHandle(&buffers_[peer], page.handle, kEnablePeerAccess),
          "hipIpcOpenMemHandle of the memory of " + name_of(peer));
  }

  // Waits for this device's work there first. A peer is told even if nothing was opened.
  void close() {
    const c10::DeviceGuard guard(device_);
    static_cast<void>(hip_.hipDeviceSynchronize());
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer == get_rank()) continue;
      if (buffers_[peer] != nullptr) static_cast<void>(hip_.hipIpcCloseMemHandle(buffers_[peer]));
      page_of_[peer]->closed.fetch_add(1, std::memory_order_release);
    }
  }

  HipRuntime hip_;
  c10::Device device_;
  size_t bytes_;
  c10::intrusive_ptr<symm::SymmetricMemory> pages_;  // keeps them mapped
  std::vector<int> job_ranks_;
  std::vector<Page*> page_of_;
  std::vector<void*> buffers_;
};

class RocmAllocator : public symm::SymmetricMemoryAllocator {
 public:
  RocmAllocator(c10::DeviceType type, const HipRuntime& hip) : type_(type), hip_(hip) {}

  void* alloc(size_t size, int device_idx, const std::optional<std::string>& /*group_name*/) override {
    Leaving::instance().sweep();
    auto block =
        std::make_shared<Block>(hip_, c10::Device(type_, static_cast<c10::DeviceIndex>(device_idx)), size);
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.emplace(block->data, block).first->first;
  }

  void free(void* pointer) override {
    std::shared_ptr<Block> block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = blocks_.find(pointer);
      if (found == blocks_.end()) return;
      block = std::move(found->second);
      blocks_.erase(found);
    }
    block->handle.reset();
    Leaving::instance().sweep(std::move(block));
  }

  size_t get_alloc_size(void* pointer) override { return find(pointer)->page->bytes; }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* pointer, const std::optional<std::string>& group_name) override {
    const auto block = find(pointer);
    // If this fails, some peer may have opened it all the same.
    if (!block->handle) block->peers = std::numeric_limits<uint32_t>::max();
    // The same group gets the same pages again; another group is refused.
    auto pages = symm::rendezvous(block->page_memory, group_name);
    if (!block->handle) {
      block->peers = static_cast<uint32_t>(pages->get_world_size()) - 1;
      std::vector<int> job_ranks = JobRanks::instance().of(group_name.value_or(""), pages->get_world_size());
      block->handle = c10::make_intrusive<RocmSymmetricMemory>(
          hip_, block->device, block->data, block->page->bytes, std::move(pages), std::move(job_ranks));
    }
    return block->handle;
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return type_; }
  std::string name() override { return "ROCm"; }
  // No `override`: torch 2.11 does not declare it.
  // NOLINTNEXTLINE
  bool has_allocation(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.count(pointer) != 0;
  }

 private:
  std::shared_ptr<Block> find(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(pointer);
    TORCH_CHECK(found != blocks_.end(),
                "This pointer is not the start of live symmetric memory of pyruntime "
                "on a GPU of AMD.");
    return found->second;
  }

  c10::DeviceType type_;
  HipRuntime hip_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Block>> blocks_;
};

}  // namespace

c10::intrusive_ptr<symm::SymmetricMemoryAllocator> rocm_memory(c10::DeviceType type, const HipRuntime& hip) {
  return c10::make_intrusive<RocmAllocator>(type, hip);
}

}  // namespace pyruntime
