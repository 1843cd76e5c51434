// Overrides functions of the kernel library: reports a graph capture if told to, and counts the gathers of
// the fused tier. Everything else is the library's own.
#include <dlfcn.h>

#include "cuda/launchers.h"

namespace {

int capturing = 0, gathers = 0;

}  // namespace

extern "C" {

PYRUNTIME_API void pretend_capture(int on) {
  capturing = on;
}

PYRUNTIME_API int fused_gathers() {
  return gathers;
}

int pyruntime_is_capturing(void*) {
  return capturing;
}

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  ++gathers;
  static const auto real = reinterpret_cast<decltype(&pyruntime_all_gather_matmul)>(
      dlsym(RTLD_NEXT, "pyruntime_all_gather_matmul"));
  return real(group, matmul, stream);
}
}
