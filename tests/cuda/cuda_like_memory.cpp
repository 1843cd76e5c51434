// Symmetric memory for CPU tensors with the rendezvous of torch's symmetric memory on CUDA: a group is a
// process group registered under its name, the ranks exchange data through that group's store, and exchanges
// are counted in the process over all groups. csrc/cuda/README.md says how torch does it.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <torch/version.h>

#include <cstring>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

namespace symm = c10d::symmetric_memory;

struct Request {
  int pid;
  size_t bytes;
  char group[256];
};

size_t exchanges = 0;  // of this process

std::string key(size_t exchange, int rank) {
  return "CUDASymmetricMemory/" + std::to_string(exchange) + "/" + std::to_string(rank);
}

std::vector<Request> all_gather(c10d::Store& store, int rank, int ranks, const Request& own) {
  const size_t exchange = exchanges++;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
  store.set(key(exchange, rank), std::vector<uint8_t>(bytes, bytes + sizeof(own)));
  std::vector<std::vector<uint8_t>> said;
#if TORCH_VERSION_MINOR >= 13
  std::vector<std::string> keys;
  for (int peer = 0; peer < ranks; ++peer) keys.push_back(key(exchange, peer));
  said = store.multiGet(keys);
#else
  for (int peer = 0; peer < ranks; ++peer) {
    store.wait({key(exchange, peer)});
    said.push_back(store.get(key(exchange, peer)));
  }
#endif
  std::vector<Request> all(ranks);
  for (int peer = 0; peer < ranks; ++peer) {
    TORCH_CHECK(said[peer].size() == sizeof(Request), "rank ", peer, " said something else");
    std::memcpy(&all[peer], said[peer].data(), sizeof(Request));
  }
  return all;
}

void barrier(c10d::Store& store, int rank, int ranks) {
#if TORCH_VERSION_MINOR >= 13
  (void)rank;
  store.barrier("CUDASymmetricMemory/" + std::to_string(exchanges++), ranks);
#else
  all_gather(store, rank, ranks, {});
#endif
}

class CudaLikeAllocator : public symm::SymmetricMemoryAllocator {
 public:
  explicit CudaLikeAllocator(c10::intrusive_ptr<symm::SymmetricMemoryAllocator> memory)
      : memory_(std::move(memory)) {}

  void* alloc(size_t size, int device, const std::optional<std::string>& group) override {
    return memory_->alloc(size, device, group);
  }
  void free(void* pointer) override { memory_->free(pointer); }
  size_t get_alloc_size(void* pointer) override { return memory_->get_alloc_size(pointer); }
  bool has_multicast_support(int device) override { return memory_->has_multicast_support(device); }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "CUDA-like"; }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(void* pointer,
                                                       const std::optional<std::string>& name) override {
    const auto group = c10d::resolve_process_group(name.value());
    const auto store = group->getStore();
    Request own{getpid(), memory_->get_alloc_size(pointer), {}};
    std::strncpy(own.group, name->c_str(), sizeof(own.group) - 1);
    for (const Request& other : all_gather(*store, group->getRank(), group->getSize(), own)) {
      TORCH_CHECK(other.bytes == own.bytes && std::strcmp(other.group, own.group) == 0, "memory of ",
                  own.bytes, " bytes of group ", own.group, " met ", other.bytes, " of ", other.group);
    }
    barrier(*store, group->getRank(), group->getSize());
    return memory_->rendezvous(pointer, name);
  }

 private:
  c10::intrusive_ptr<symm::SymmetricMemoryAllocator> memory_;
};

c10::intrusive_ptr<symm::SymmetricMemoryAllocator> before;

}  // namespace

// Makes CPU symmetric memory such memory until cuda_like_end(), as if the process had had `so_far` exchanges.
extern "C" void cuda_like_begin(size_t so_far) {
  if (before == nullptr) before = symm::get_allocator(c10::kCPU);
  exchanges = so_far;
  symm::register_allocator(c10::kCPU, c10::make_intrusive<CudaLikeAllocator>(before));
}

extern "C" void cuda_like_end() {
  symm::register_allocator(c10::kCPU, before);
}

extern "C" size_t cuda_like_exchanges() {
  return exchanges;
}
