// The workspace of a rank that is the only one on its host: plain memory, and flags for its own threads.
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "transport/host/host_workspace.h"
#include "transport/host/scratch.h"

namespace pyruntime {

namespace {

struct Slot {
  Scratch memory;
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
  const FlightDescriptor& rendezvous(int /*peer*/) override { return descriptor_; }
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
    for (Slot& slot : slots_) slot.ready = std::vector<std::atomic<uint64_t>>(flags);
  }

  std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) override {
    const uint64_t number = ++last_number_;
    Slot& slot = slots_[number % kSlots];
    slot.memory.claim(bytes);
    ++context_.stats.ops;
    return std::make_unique<PrivateFlight>(slot, number, descriptor);
  }

  int64_t bytes() const override {
    int64_t total = 0;
    for (const Slot& slot : slots_) total += slot.memory.bytes();
    return total;
  }

 private:
  GroupContext& context_;
  std::array<Slot, kSlots> slots_;
  uint64_t last_number_ = 0;
};

}  // namespace

std::unique_ptr<HostWorkspace> make_private_workspace(GroupContext& context, int flags) {
  return std::make_unique<PrivateWorkspace>(context, flags);
}

}  // namespace pyruntime
