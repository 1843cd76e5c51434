#include "sum_rows.h"

#include <algorithm>

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {

namespace {

constexpr int64_t kSummedAtOnce = 128;  // features, in registers

struct SumRows {
  template <typename T>
  static PYRUNTIME_INLINE void run(T* out, const int64_t* begins, int64_t rows, int64_t features,
                                   const T* values, const int64_t* places) {
    for (int64_t row = 0; row < rows; ++row, out += features) {
      for (int64_t first = 0; first < features; first += kSummedAtOnce) {
        const int64_t count = std::min(kSummedAtOnce, features - first);
        acc_t<T> sums[kSummedAtOnce] = {};
        for (int64_t j = begins[row]; j < begins[row + 1]; ++j) {
          const T* value = values + places[j] * features + first;
          PYRUNTIME_SIMD
          for (int64_t f = 0; f < count; ++f) sums[f] += load(value[f]);
        }
        PYRUNTIME_SIMD
        for (int64_t f = 0; f < count; ++f) store(out[first + f], sums[f]);
      }
    }
  }
};

}  // namespace

void sum_rows(const Tensor& out, const Tensor& values, const int64_t* begins, const int64_t* places) {
  const int64_t rows = out.size(0), features = out.size(1);
  PYRUNTIME_DISPATCH_FLOAT(values.scalar_type(), "sum_rows", [&] {
    run_rows<SumRows>(rows, features,
                      std::tuple(write<scalar_t>(out, features), RowsOf<const int64_t>{begins, 1}),
                      values.const_data_ptr<scalar_t>(), places);
  });
}

}  // namespace pyruntime::layers
