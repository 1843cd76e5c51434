// Checks of launchers' arguments. A launcher is a body that throws; guarded() turns what it throws into a
// code and a sentence, so that nothing crosses the C interface.
#pragma once

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/chunk_plan.h"
#include "cuda/compat.h"
#include "cuda/launchers.h"
#include "numbers.cuh"
#include "workspace.cuh"

namespace pyruntime::portable {

// What the device said.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::invalid_argument(sentence.str());
}

// Keeps the sentence for pyruntime_error() and returns `code`.
int remember_error(int code, const std::string& sentence);

// Throws DeviceError where the last launch or call of the runtime failed.
void check_device(const char* op);

template <class Body>
int guarded(const char* op, const Body& body) {
  try {
    body();
    check_device(op);
    return PYRUNTIME_OK;
  } catch (const DeviceError& error) {
    return remember_error(PYRUNTIME_DEVICE_ERROR, error.what());
  } catch (const std::exception& error) {
    return remember_error(PYRUNTIME_INVALID, std::string(op) + ": " + error.what());
  }
}

void check_workspace(const PyruntimeWorkspace* shape);
// Checks the group and returns it as kernels see it.
Group checked_group(const PyruntimeGroup* group, PyruntimeOp op);

// Checks all but what depends on which rows of a and c this rank holds.
void check_matmul(const PyruntimeMatmul* matmul);
// bf16 or fp16; also fp32 where that is allowed.
void check_dtype(int32_t dtype, bool with_fp32);
void check_pitch(const char* name, int64_t pitch, int64_t width);

inline int64_t element_bytes(int32_t dtype) {
  return dtype == PYRUNTIME_FP32 ? 4 : 2;
}

// Calls use(T{}) with the element that a checked dtype names.
template <class Use>
void with_element(int32_t dtype, const Use& use) {
  if (dtype == PYRUNTIME_BF16) return use(Bf16{});
  if (dtype == PYRUNTIME_FP16) return use(Fp16{});
  use(0.0f);
}
// The same where it is bf16 or fp16.
template <class Use>
void with_half(int32_t dtype, const Use& use) {
  if (dtype == PYRUNTIME_BF16) return use(Bf16{});
  use(Fp16{});
}

// A grid for work that any number of blocks can share.
int blocks_for(int64_t pieces_of_work, int32_t most_blocks, int per_multiprocessor);

}  // namespace pyruntime::portable
