// What Python sees of the simulated devices.
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <dlfcn.h>
#include <thread>

#include "collectives.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "symmetric.h"

namespace sim {

void register_hooks();

namespace {

void enqueue_kernel(void* stream, void (*run)(void*), void* context) {
  static_cast<Queue*>(stream)->enqueue({"kernel", [run, context] { run(context); }});
}

void wait_for(void* stream) {
  HostWaits::count("read of a kernel's result");
  static_cast<Queue*>(stream)->synchronize();
}

void* make_stream() {
  return &queue(own_stream(current_device()));
}

// The kernels of the library, in the host dialect, run on the streams that their launchers are given.
void launch_on_streams(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  using Use = void (*)(decltype(&enqueue_kernel), decltype(&wait_for), decltype(&make_stream));
  const auto use = reinterpret_cast<Use>(dlsym(library, "pyruntime_host_use_streams"));
  TORCH_CHECK(use != nullptr, path, " is no library of the host dialect.");
  use(&enqueue_kernel, &wait_for, &make_stream);
}

}  // namespace

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("begin", [](int devices, int64_t bytes, uint64_t delays) {
    auto& settings = sim::settings();
    settings.devices = devices;
    settings.bytes = bytes;
    settings.delays = delays;
    sim::register_hooks();
    sim::register_symmetric_memory();
  });
  m.def("launch_on_streams", &sim::launch_on_streams);
  pybind11::class_<sim::DeviceGroup, c10d::Backend, c10::intrusive_ptr<sim::DeviceGroup>>(m, "DeviceGroup")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>());
  m.def("device_count", [] { return sim::settings().devices; });
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("synchronize", &sim::synchronize_device, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("default_generator", [](int device) { return sim::default_generator(device); });
  m.def("why_not_protected", &sim::why_not_protected);
  m.def("set_delays", [](uint64_t seed, int64_t longest_us) {
    sim::settings().delays = seed;
    sim::settings().longest_delay_us = longest_us;
  });
  m.def("block_stream", [](int device, double seconds) {
    sim::enqueue(device, "busy",
                 [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  m.def("host_waits", &sim::HostWaits::counted);
  m.def("reset_host_waits", &sim::HostWaits::reset);
  m.def("launches", &sim::launches);
  m.def("reset_launches", &sim::reset_launches);
  m.def("drop", &sim::Faults::drop);
  m.def("counted", &sim::Faults::counted);
}
