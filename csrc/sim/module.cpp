// What Python sees of the simulated devices.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <dlfcn.h>
#include <thread>

#include "sim/clock/mirrors.h"
#include "sim/clock/programs.h"
#include "sim/collectives.h"
#include "sim/generator.h"
#include "sim/memory.h"
#include "sim/operator_work.h"
#include "sim/places.h"
#include "sim/streams.h"
#include "sim/symmetric.h"

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

// (stream, begin, end, how it was spent, what, where) of each span.
using SpanOfPython = std::tuple<int64_t, double, double, int, std::string, std::string>;

std::vector<SpanOfPython> take_spans() {
  Clock& clock = Clock::instance();
  std::vector<SpanOfPython> found;
  for (const Span& each : clock.take_spans()) {
    found.emplace_back(each.stream, each.begin, each.end, static_cast<int>(each.spent), clock.text(each.name),
                       clock.text(each.place));
  }
  return found;
}

void bind_clock(pybind11::module& m) {
  // The model may be asked by threads without Python's lock, until the process ends.
  m.def("begin_clock", [](const pybind11::function& model) {
    auto* const kept = new pybind11::function(model);
    Clock::instance().begin([kept](const std::string& kind, const std::vector<int64_t>& sizes) {
      const pybind11::gil_scoped_acquire gil;
      return (*kept)(kind, sizes).cast<double>();
    });
    watch_places();
  });
  m.def("host_time", [] { return Clock::instance().host(); });
  m.def("set_place", [](std::string place) { Clock::instance().set_place(std::move(place)); });
  m.def("set_integers_of", [](std::vector<int64_t> sizes, int64_t value) {
    Clock::instance().set_integers_of(std::move(sizes), value);
  });
  m.def("set_experts", [](int64_t experts) { Clock::instance().set_experts(experts); });
  m.def("keep_spans", [](bool keep) { Clock::instance().keep_spans(keep); });
  m.def("take_spans", &take_spans);
  // Seconds at which the last of so many bytes has left, on a link that a stream shares with all others.
  m.def("transfer", [](const c10::Stream& stream, int64_t bytes) {
    return queue(stream).timeline().transfer("a transfer", {"put", {bytes}}, "inside a host");
  });
  // A launch that reads or writes so many bytes.
  m.def("touch", [](const std::string& name, int64_t bytes) {
    enqueue(current_device(), name, [] {}, memory_work(bytes));
  });
  m.def("stream_time", [](const c10::Stream& stream) { return queue(stream).timeline().done(); });
  m.def("begin_programs", [](int own, std::vector<int> of_rank, int gpus_per_host,
                             const c10::intrusive_ptr<c10d::Store>& board) {
    Programs::instance().begin(own, std::move(of_rank), gpus_per_host, board);
  });
  m.def("know_group", [](const std::string& name, std::vector<int> job_ranks) {
    Programs::instance().know(name, std::move(job_ranks));
  });
  m.def("meet_on_host", &meet_on_host, pybind11::call_guard<pybind11::gil_scoped_release>());
  pybind11::class_<MirrorStore, c10d::Store, c10::intrusive_ptr<MirrorStore>>(m, "MirrorStore")
      .def(pybind11::init([] { return c10::make_intrusive<MirrorStore>(); }));
  pybind11::class_<MirrorGroup, c10d::Backend, c10::intrusive_ptr<MirrorGroup>>(m, "MirrorGroup")
      .def(pybind11::init<std::string, int, std::vector<int>>());
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
    sim::Clock::is_on() ? sim::register_mirrored_memory() : sim::register_symmetric_memory();
  });
  sim::bind_clock(m);
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
