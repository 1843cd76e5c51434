// Checks the launchers' arguments. A launcher's body throws; guarded() turns exceptions into a code and a
// sentence, so that none crosses the C interface.
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

// An error that the device reported.
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

// Stores the sentence for pyruntime_error() and returns `code`.
int remember_error(int code, const std::string& sentence);

// Throws DeviceError if the last launch or runtime call failed.
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
// Checks the group and returns the kernels' view of it.
Group checked_group(const PyruntimeGroup* group, PyruntimeOp op);

// Checks everything that does not depend on which rows of a and c this rank has.
void check_matmul(const PyruntimeMatmul* matmul);
// Accepts bf16, fp16 and, with `with_fp32`, fp32.
void check_dtype(int32_t dtype, bool with_fp32);
void check_pitch(const char* name, int64_t pitch, int64_t width);

inline int64_t element_bytes(int32_t dtype) {
  return dtype == PYRUNTIME_FP32 ? 4 : 2;
}

// Calls use(T{}) with the element type of a checked dtype.
template <class Use>
void with_element(int32_t dtype, const Use& use) {
  if (dtype == PYRUNTIME_BF16) return use(Bf16{});
  if (dtype == PYRUNTIME_FP16) return use(Fp16{});
  use(0.0f);
}
// The same for bf16 and fp16 only.
template <class Use>
void with_half(int32_t dtype, const Use& use) {
  if (dtype == PYRUNTIME_BF16) return use(Bf16{});
  use(Fp16{});
}

// Returns the size of a grid for work that any number of blocks can share.
int blocks_for(int64_t pieces_of_work, int32_t most_blocks, int per_multiprocessor);

}  // namespace pyruntime::portable
