// The workspace of a rank that shares its host with no other: plain memory, and flags for its own threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/deadline.h"
#include "transport/host_workspace.h"

namespace pyruntime {

namespace {

constexpr size_t kAlignment = 4096;

struct Slot {
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
  int64_t bytes = 0;
  std::vector<std::atomic<uint64_t>> ready;  // numbers of the flights that set them
};

class PrivateFlight : public HostFlight {
 public:
  PrivateFlight(Slot& slot, uint64_t number, const FlightDescriptor& descriptor)
      : slot_(slot), number_(number), descriptor_(descriptor) {}

  uint64_t number() const override { return number_; }
  char* memory(int /*peer*/) override { return slot_.memory.get(); }
  void publish(int chunk) override { slot_.ready[chunk].store(number_, std::memory_order_release); }
  bool ready(int /*peer*/, int chunk) const override {
    return slot_.ready[chunk].load(std::memory_order_acquire) >= number_;
  }
  const FlightDescriptor& meet(int /*peer*/) override { return descriptor_; }
  void wait(int /*peer*/, int /*chunk*/) override {}  // there is no other rank on this host
  void finish() override {}

 private:
  Slot& slot_;
  uint64_t number_;
  FlightDescriptor descriptor_;
};

class PrivateWorkspace : public HostWorkspace {
 public:
  PrivateWorkspace(GroupContext& context, int flags) : context_(context) {
    for (int i = 0; i < kSlots; ++i) {
      slots_.emplace_back();
      slots_.back().ready = std::vector<std::atomic<uint64_t>>(flags);
    }
  }

  std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) override {
    const uint64_t number = ++last_number_;
    Slot& slot = slots_[number % kSlots];
    if (slot.bytes < bytes) {
      const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
      slot.memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, size)));
      TORCH_CHECK(slot.memory != nullptr, "There is no memory for a workspace of ", size, " bytes.");
      slot.bytes = static_cast<int64_t>(size);
    }
    ++context_.stats.ops;
    return std::make_unique<PrivateFlight>(slot, number, descriptor);
  }

  int64_t bytes() const override {
    int64_t total = 0;
    for (const Slot& slot : slots_) total += slot.bytes;
    return total;
  }

 private:
  GroupContext& context_;
  std::vector<Slot> slots_;
  uint64_t last_number_ = 0;
};

}  // namespace

std::unique_ptr<HostWorkspace> make_private_workspace(GroupContext& context, int flags) {
  return std::make_unique<PrivateWorkspace>(context, flags);
}

}  // namespace pyruntime
