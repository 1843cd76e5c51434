// Symmetric memory of the devices. Ranks meet as they do on CUDA: through the store of the process group that
// is registered under the group's name, by exchanges that are counted in the process, whichever group they
// are of. Each rank's memory is a file without a name, which the others open through /proc.
#include "sim/symmetric.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "sim/memory.h"
#include "sim/streams.h"

namespace sim {
namespace {

namespace symm = c10d::symmetric_memory;

struct Mapping {
  void* memory = nullptr;
  size_t bytes = 0;

  Mapping(int file, size_t bytes, int device) : bytes(bytes) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(memory != MAP_FAILED, "Symmetric memory cannot be mapped: ", std::strerror(errno));
    add_device_memory(memory, bytes, device);
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    remove_device_memory(memory);
    munmap(memory, bytes);
  }
};

struct Own {
  std::unique_ptr<Mapping> mapping;
  int file, device;
  size_t asked, pads;  // bytes; signal pads lie behind what was asked for
};

struct Said {
  int pid, file;
  size_t bytes;
};

class Memory : public symm::SymmetricMemory {
 public:
  Memory(std::vector<void*> buffers, std::vector<std::unique_ptr<Mapping>> peers, size_t bytes,
         size_t pads_at, int rank, int device)
      : buffers_(std::move(buffers)),
        peers_(std::move(peers)),
        bytes_(bytes),
        pads_at_(pads_at),
        rank_(rank),
        device_(device) {}

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override {
    std::vector<void*> pads;
    for (void* each : buffers_) pads.push_back(static_cast<char*>(each) + pads_at_);
    return pads;
  }
  void** get_buffer_ptrs_dev() override { TORCH_CHECK(false, "sim has no array of buffers on the device."); }
  void** get_signal_pad_ptrs_dev() override { TORCH_CHECK(false, "sim has no array of pads on the device."); }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int, size_t) override { TORCH_CHECK(false, "sim has no barrier of symmetric memory."); }
  void put_signal(int, int, size_t) override {
    TORCH_CHECK(false, "sim has no signals of symmetric memory.");
  }
  void wait_signal(int, int, size_t) override {
    TORCH_CHECK(false, "sim has no signals of symmetric memory.");
  }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return {kSim, static_cast<c10::DeviceIndex>(device_)}; }
  bool world_within_direct_access() override { return true; }

 private:
  const std::vector<void*> buffers_;
  const std::vector<std::unique_ptr<Mapping>> peers_;
  const size_t bytes_, pads_at_;
  const int rank_, device_;
};

class Allocator : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t bytes, int device, const std::optional<std::string>&) override {
    const size_t aligned = (bytes + 4095) / 4096 * 4096, pads = symm::get_signal_pad_size();
    const int file = memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, aligned + pads) == 0, "Symmetric memory of ", bytes,
                " bytes cannot be had: ", std::strerror(errno));
    auto mapping = std::make_unique<Mapping>(file, aligned + pads, device);
    void* memory = mapping->memory;
    {
      const OpenMemory open;
      std::memset(memory, 0xff, aligned);  // only the signal pads are zero
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    own_[memory] = {std::move(mapping), file, device, bytes, aligned};
    return memory;
  }

  void free(void* memory) override {
    synchronize_device(device_of(memory));  // as CUDA's: kernels may be running on it
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = own_.find(memory);
    if (found == own_.end()) return;
    close(found->second.file);
    own_.erase(found);
    met_.erase(memory);
  }

  size_t get_alloc_size(void* memory) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return own_.at(memory).asked;
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* memory,
                                                       const std::optional<std::string>& group) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = met_.find(memory); found != met_.end()) return found->second;
    }
    const auto process_group = c10d::resolve_process_group(group.value());
    const int rank = process_group->getRank(), ranks = process_group->getSize();
    const auto store = process_group->getStore();
    const Own& own = own_of(memory);
    const Said said{getpid(), own.file, own.asked};
    std::vector<void*> buffers;
    std::vector<std::unique_ptr<Mapping>> peers;
    const std::string exchange = "sim symmetric memory/" + std::to_string(exchanges_++) + "/";
    const auto* bytes = reinterpret_cast<const uint8_t*>(&said);
    store->set(exchange + std::to_string(rank), std::vector<uint8_t>(bytes, bytes + sizeof(said)));
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) {
        buffers.push_back(memory);
        continue;
      }
      const auto given = store->get(exchange + std::to_string(peer));
      Said other{};
      TORCH_CHECK(given.size() == sizeof(other), "rank ", peer, " said something else.");
      std::memcpy(&other, given.data(), sizeof(other));
      TORCH_CHECK(other.bytes == said.bytes, "Symmetric memory of ", said.bytes, " bytes met ", other.bytes,
                  " bytes of rank ", peer, " of group ", *group, ".");
      const std::string path = "/proc/" + std::to_string(other.pid) + "/fd/" + std::to_string(other.file);
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      TORCH_CHECK(file >= 0, "The memory of rank ", peer, " cannot be opened: ", std::strerror(errno));
      peers.push_back(std::make_unique<Mapping>(file, own.mapping->bytes, own.device));
      close(file);
      buffers.push_back(peers.back()->memory);
    }
    store->add(exchange + "mapped", 1);
    while (store->add(exchange + "mapped", 0) < ranks) usleep(1000);
    auto met = c10::make_intrusive<Memory>(std::move(buffers), std::move(peers), own.asked, own.pads, rank,
                                           own.device);
    const std::lock_guard<std::mutex> lock(mutex_);
    return met_[memory] = met;
  }

  bool has_multicast_support(int) override { return false; }
  const Own& own_of(void* memory) {  // which stays where it is
    const std::lock_guard<std::mutex> lock(mutex_);
    return own_.at(memory);
  }
  c10::DeviceType supported_device_type() override { return kSim; }
  std::string name() override { return "sim"; }

 private:
  std::mutex mutex_;
  std::map<void*, Own> own_;
  std::map<void*, c10::intrusive_ptr<symm::SymmetricMemory>> met_;
  std::atomic<int64_t> exchanges_{0};
};

}  // namespace

void register_symmetric_memory() {
  symm::register_allocator(kSim, c10::make_intrusive<Allocator>());
}

}  // namespace sim
