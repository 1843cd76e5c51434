// The sum of squares of all elements of a list of tensors, in float64, for gradient norms. The order of
// summation depends only on the sizes.

#include <vector>

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

struct SquareElements {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, int64_t count, double* result) {
    double sum = 0;
    PYRUNTIME_SIMD_REDUCE(+, sum)
    for (int64_t i = 0; i < count; ++i) {
      const double value = load(values[i]);
      sum += value * value;
    }
    *result = sum;
  }
};

void check_list(at::TensorList tensors) {
  for (const Tensor& tensor : tensors) check_floating(tensor, "sum_of_squares", "a tensor");
}

double sum_of_squares_tensor(const Tensor& tensor_in) {
  const Tensor tensor = tensor_in.contiguous();
  const int64_t count = tensor.numel(), tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  std::vector<double> partial(tasks);
  PYRUNTIME_DISPATCH_FLOAT(tensor.scalar_type(), "sum_of_squares", [&] {
    const scalar_t* values = tensor.const_data_ptr<scalar_t>();
    at::parallel_for(0, tasks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task * kElementsPerTask;
        simd_run<SquareElements>(values + first, std::min(kElementsPerTask, count - first), &partial[task]);
      }
    });
  });
  double sum = 0;
  for (const double part : partial) sum += part;
  return sum;
}

Tensor sum_of_squares_cpu(at::TensorList tensors) {
  check_list(tensors);
  double sum = 0;
  for (const Tensor& tensor : tensors) sum += sum_of_squares_tensor(tensor);
  return at::scalar_tensor(sum, at::TensorOptions().dtype(at::kDouble));
}

Tensor sum_of_squares_composite(at::TensorList tensors) {
  check_list(tensors);
  if (tensors.empty()) return at::zeros({}, at::TensorOptions().dtype(at::kDouble));
  // Takes few launches for all tensors, and no wide copy.
  return at::stack(at::_foreach_norm(tensors, 2, at::kDouble)).square().sum();
}

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  Operator<sum_of_squares_composite, sum_of_squares_cpu>::define_without_gradient(
      m, "sum_of_squares(Tensor[] tensors) -> Tensor");
}

}  // namespace

}  // namespace pyruntime::layers
