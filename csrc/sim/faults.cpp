// Places of the product whose waits tests drop.
#include <pybind11/pybind11.h>
#include <pybind11/pytypes.h>

#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>

#include "sim/streams.h"

namespace sim {

namespace {

struct Places {
  std::mutex mutex;
  std::atomic<bool> counts = false;
  std::map<std::string, int64_t> counted;
  std::optional<std::string> dropped;
};

Places& places() {
  static auto* instance = new Places();
  return *instance;
}

// The innermost return address of this call in the product's core; empty outside of it.
std::string place_in_core() {
  void* frames[24];
  const int depth = backtrace(frames, 24);
  for (int i = 0; i < depth; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || std::strstr(info.dli_fname, "/pyruntime/_C.") == nullptr) continue;
    return "core+" + std::to_string(static_cast<char*>(frames[i]) - static_cast<char*>(info.dli_fbase));
  }
  return "";
}

// The innermost line of this thread's Python code, if it is the product's; else empty.
std::string place_in_python() {
  const pybind11::gil_scoped_acquire gil;
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame == nullptr) return "";
  const auto code =
      pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const auto file = code.attr("co_filename").cast<std::string>();
  const size_t begin = file.rfind("/pyruntime/");
  if (begin == std::string::npos || file.find("/tests/", begin) != std::string::npos ||
      file.find("/pyruntime/clock/", begin) != std::string::npos) {
    return "";
  }
  return file.substr(begin + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

}  // namespace

bool Faults::drops() {
  if (!places().counts) return false;
  std::string place = place_in_core();
  if (place.empty()) place = place_in_python();
  if (place.empty()) return false;
  Places& all = places();
  const std::lock_guard<std::mutex> lock(all.mutex);
  ++all.counted[place];
  return all.dropped == place;
}

std::map<std::string, int64_t> Faults::counted() {
  Places& all = places();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.counted;
}

void Faults::drop(std::optional<std::string> place) {
  Places& all = places();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.dropped = std::move(place);
  all.counts = true;
  all.counted.clear();
}

}  // namespace sim
