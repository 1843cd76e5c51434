// Launches of device kernels in virtual time, which compute nothing.
#pragma once

#include <cstdint>

#include "cuda/launchers.h"
#include "sim/streams.h"

namespace sim {

// Each returns PYRUNTIME_OK.
inline int launch(void* stream, const char* name, const Work& work) {
  static_cast<Queue*>(stream)->enqueue({name, [] {}, work});
  return PYRUNTIME_OK;
}

// `bytes`: of the device's memory, read and written.
inline int touch(void* stream, const char* name, int64_t bytes) {
  return launch(stream, name, {"memory", {bytes}});
}

inline int64_t size_of(int32_t dtype) {
  return dtype == PYRUNTIME_FP32 ? 4 : 2;
}

}  // namespace sim
