// Stands before the library of kernels and writes down which tiles it is asked for, by op. Everything else is
// the library's own: dlsym() finds it through the dependency.
#include <dlfcn.h>

#include "cuda/launchers.h"

namespace {

int asked[2] = {-1, -1};

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// Of the last gather (0) or scatter (1); -1 where there was none.
PYRUNTIME_API int recorded_tiles(int op) {
  return asked[op];
}

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  asked[0] = matmul->tiles;
  static const auto real = next(&pyruntime_all_gather_matmul, "pyruntime_all_gather_matmul");
  return real(group, matmul, stream);
}

int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                    void* stream) {
  asked[1] = matmul->tiles;
  static const auto real = next(&pyruntime_matmul_reduce_scatter, "pyruntime_matmul_reduce_scatter");
  return real(group, matmul, stream);
}
}
