// Shows a torch for CPUs one CUDA device, on which nothing can run: enough for fake tensors "on cuda" to go
// through autograd. Must be preloaded, because torch asks only once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
namespace {

struct PretendedGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

}  // namespace
}  // namespace c10::impl

namespace at {
namespace {

struct PretendedHooks : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendedHooks)

}  // namespace
}  // namespace at
