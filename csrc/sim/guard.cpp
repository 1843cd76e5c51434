// Answers torch's questions to a device: the current device and stream, events, generators, allocators.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "sim/generator.h"
#include "sim/memory.h"
#include "sim/streams.h"

namespace sim {
namespace {

Event& as_event(void* event) {
  return *static_cast<Event*>(event);
}

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    if (device.index() >= 0) set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kSim, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (0 <= device.index() && device.index() < settings().devices) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().devices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return pool_stream(index_of(device), urgent);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return pool_stream(index_of(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue(stream); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    raise_if_broken();
    if (*event == nullptr) *event = new Event();
    as_event(*event).record(queue(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    raise_if_broken();
    if (event != nullptr) as_event(event).block(queue(stream));
  }
  bool queryEvent(void* event) const override {
    raise_if_broken();
    return event == nullptr || as_event(event).has_happened();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    HostWaits::count("event.synchronize");
    if (!Faults::drops()) as_event(event).synchronize();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before their times.");
    return as_event(second).since(as_event(first));
  }

  bool queryStream(const c10::Stream& stream) const override {
    raise_if_broken();
    return queue(stream).is_empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    HostWaits::count("stream.synchronize");
    queue(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    HostWaits::count("synchronize");
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }

 private:
  static int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* memory) const override {
    return {kSim, static_cast<c10::DeviceIndex>(device_of(memory))};
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const int device = storage.device().index();
    const c10::OptionalDeviceGuard on(storage.device());
    c10::DataPtr made = device_allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      enqueue(device, "resize storage",
              [to = made.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); },
              {"memory", {2 * static_cast<int64_t>(kept)}});
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kSim, device_allocator());
}

}  // namespace sim
