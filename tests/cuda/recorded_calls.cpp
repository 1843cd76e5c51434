// Overrides functions of the kernel library and records the requested tiles of each op, and all puts.
// Everything else is the library's own: dlsym() finds it through the dependency.
#include <dlfcn.h>
#include <vector>

#include "cuda/launchers.h"

namespace {

int asked[2] = {-1, -1};
std::vector<int64_t> puts;

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// The tiles of the last gather (0) or scatter (1); -1 if there was none.
PYRUNTIME_API int recorded_tiles(int op) {
  return asked[op];
}

// Returns the number of puts. If `out` is not nullptr, writes them there in order and forgets them, five
// numbers each: the rows' owner, the destination, the first flag, the first byte, bytes.
PYRUNTIME_API int64_t recorded_puts(int64_t* out) {
  const auto count = static_cast<int64_t>(puts.size() / 5);
  if (out == nullptr) return count;
  for (size_t i = 0; i < puts.size(); ++i) out[i] = puts[i];
  puts.clear();
  return count;
}

int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t first, int32_t flags, void* stream) {
  puts.insert(puts.end(), {group->rank, peer, first, offset, bytes});
  static const auto real = next(&pyruntime_put, "pyruntime_put");
  return real(group, from, bytes, peer, offset, first, flags, stream);
}

int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                      int64_t offset, int32_t first, int32_t flags, void* stream) {
  puts.insert(puts.end(), {origin, peer, first, offset, bytes});
  static const auto real = next(&pyruntime_pass_on, "pyruntime_pass_on");
  return real(group, origin, bytes, peer, offset, first, flags, stream);
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
