// Preloaded before the kernel library (LD_PRELOAD), breaks the function that BREAK names: a test checks that
// tests/hip/run_kernels.cpp finds it. Only for memory that the CPU can read.
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <vector>

#include "cuda/launchers.h"

namespace {

bool broken(const char* name) {
  const char* named = std::getenv("BREAK");
  return named != nullptr && std::strcmp(named, name) == 0;
}

template <class Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define REAL(name) real(&name, #name)

// Writes one byte past its result.
int pyruntime_reduce(void* out, const void* const* parts, int32_t count_of_parts, int64_t count,
                     int32_t dtype, const void* bias, int64_t width, int32_t most_blocks, void* stream) {
  const int code =
      REAL(pyruntime_reduce)(out, parts, count_of_parts, count, dtype, bias, width, most_blocks, stream);
  if (broken("reduce")) static_cast<char*>(out)[count * (dtype == PYRUNTIME_FP32 ? 4 : 2)] = 0;
  return code;
}

// Changes one element of the result.
int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  const int code = REAL(pyruntime_all_gather_matmul)(group, matmul, stream);
  if (broken("all_gather_matmul") && matmul->m * matmul->n > 1) {
    static_cast<uint16_t*>(matmul->c)[matmul->n - 1] ^= 0x0400;
  }
  return code;
}

// Raises flags and copies nothing.
int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t first, int32_t flags, void* stream) {
  return REAL(pyruntime_put)(group, from, broken("put") ? 0 : bytes, peer, offset, first, flags, stream);
}

// The same for a piece that is passed on.
int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                      int64_t offset, int32_t first, int32_t flags, void* stream) {
  const int64_t copied = broken("pass_on") ? 0 : bytes;
  return REAL(pyruntime_pass_on)(group, origin, copied, peer, offset, first, flags, stream);
}

// Hides that a deadline has passed.
int pyruntime_failure(const PyruntimeGroup* group, PyruntimeFailure* out, void* stream) {
  const int code = REAL(pyruntime_failure)(group, out, stream);
  if (broken("failure")) out->state = PYRUNTIME_NO_FAILURE;
  return code;
}

// Writes to the operand of the forward.
int pyruntime_rope(const PyruntimeRope* rope, void* stream) {
  const int code = REAL(pyruntime_rope)(rope, stream);
  if (broken("rope") && rope->inverse == 0) static_cast<char*>(rope->from[0].data)[0] ^= 1;
  return code;
}

// Sums the weight's gradient over one row less.
int pyruntime_rms_norm_backward(const PyruntimeRmsNorm* norm, void* stream) {
  PyruntimeRmsNorm changed = *norm;
  if (broken("rms_norm")) --changed.rows;
  return REAL(pyruntime_rms_norm_backward)(&changed, stream);
}

// Ends the process.
int pyruntime_swiglu(const PyruntimeSwiglu* swiglu, void* stream) {
  if (broken("swiglu")) std::abort();
  return REAL(pyruntime_swiglu)(swiglu, stream);
}

// Does not write the parameters rounded from their masters.
int pyruntime_adamw(const PyruntimeAdamwTensor* tensors, int32_t count_of_tensors, int32_t param_dtype,
                    int32_t grad_dtype, const PyruntimeAdamwOptions* options,
                    const PyruntimeAdamwOptions* device_options, const float* grad_scale, void* stream) {
  std::vector<PyruntimeAdamwTensor> list(tensors, tensors + count_of_tensors);
  for (PyruntimeAdamwTensor& tensor : list) {
    if (broken("adamw")) tensor.param = nullptr;
  }
  return REAL(pyruntime_adamw)(list.data(), count_of_tensors, param_dtype, grad_dtype, options,
                               device_options, grad_scale, stream);
}

// Changes the exponent of one logit's gradient.
int pyruntime_cross_entropy_gradient(const PyruntimeLogits* logits, const float* lse, const float* grad,
                                     void* dlogits, int64_t dpitch, void* stream) {
  const int code = REAL(pyruntime_cross_entropy_gradient)(logits, lse, grad, dlogits, dpitch, stream);
  if (broken("cross_entropy")) {
    static_cast<char*>(dlogits)[logits->dtype == PYRUNTIME_FP32 ? 3 : 1] ^= 0x40;
  }
  return code;
}
