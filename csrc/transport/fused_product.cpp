#include "transport/fused_product.h"

#include "core/chunk_plan.h"

namespace pyruntime {

namespace {

// From row to row; a matrix of one row has any.
int64_t pitch(const at::Tensor& matrix) {
  return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
}

// The kernels take matrices whose rows are contiguous, which all but transposed views are.
at::Tensor with_contiguous_rows(const at::Tensor& matrix) {
  const bool rows_are_whole = matrix.size(1) <= 1 || matrix.stride(1) == 1;
  return rows_are_whole && pitch(matrix) >= matrix.size(1) ? matrix : matrix.contiguous();
}

const void* address(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.const_data_ptr() : nullptr;
}

// The quickest tiles of a product, the one place where they are chosen. They are this rank's own affair: what
// ranks signal to each other is the same for all.
int32_t choose_tiles(const DeviceLibrary& library, bool hopper, const PyruntimeMatmul& matmul,
                     int world_size) {
  const int64_t chunk_rows = rows_of_rank(matmul.m, world_size, 0);
  return hopper ? library.sm90_choose_tiles(chunk_rows, matmul.m, matmul.n, matmul.k, /*multiprocessors=*/0)
                : library.choose_tiles(chunk_rows, matmul.m, matmul.n);
}

// Calls `launch(matmul, hopper)` with the product as the launchers take it: for Hopper, unless that kernel
// refuses, else the portable one.
template <class Launch>
void launch_one_of_two(const DeviceLibrary& library, int world_size, int64_t rows,
                       const FusedProduct& product, const Launch& launch) {
  const at::Tensor a = with_contiguous_rows(product.a), b = with_contiguous_rows(product.weight);
  const at::Tensor bias = product.bias.defined() ? product.bias.contiguous() : product.bias;
  PyruntimeMatmul matmul{};
  matmul.dtype = a.scalar_type() == c10::ScalarType::BFloat16 ? PYRUNTIME_BF16 : PYRUNTIME_FP16;
  matmul.layout = product.transposed ? PYRUNTIME_NT : PYRUNTIME_NN;
  matmul.m = rows;
  matmul.n = product.out.size(1);
  matmul.k = a.size(1);
  matmul.a = address(a);
  matmul.b = address(b);
  matmul.bias = address(bias);
  matmul.c = product.out.numel() > 0 ? product.out.data_ptr() : nullptr;
  matmul.lda = pitch(a);
  matmul.ldb = pitch(b);
  matmul.ldc = pitch(product.out);
  // Room for the waits and signals of other flights: blocks of this one may wait for ranks that wait for
  // those.
  matmul.spare_blocks = 1;
  if (library.sm90_choose_tiles != nullptr) {
    matmul.tiles = choose_tiles(library, /*hopper=*/true, matmul, world_size);
    const int code = launch(matmul, /*hopper=*/true);
    if (code != PYRUNTIME_REFUSED) return library.check(code);
  }
  matmul.tiles = choose_tiles(library, /*hopper=*/false, matmul, world_size);
  library.check(launch(matmul, /*hopper=*/false));
}

}  // namespace

void gather_and_multiply(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                         const FusedProduct& product, void* stream) {
  launch_one_of_two(library, group.shape.world_size, rows, product,
                    [&](const PyruntimeMatmul& matmul, bool hopper) {
                      const auto kernel = hopper ? library.sm90_all_gather_matmul : library.all_gather_matmul;
                      return kernel(&group, &matmul, /*hold=*/1, stream);
                    });
}

void multiply_and_scatter(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                          const FusedProduct& product, void* stream) {
  launch_one_of_two(
      library, group.shape.world_size, rows, product, [&](const PyruntimeMatmul& matmul, bool hopper) {
        const auto kernel = hopper ? library.sm90_matmul_reduce_scatter : library.matmul_reduce_scatter;
        return kernel(&group, &matmul, stream);
      });
}

}  // namespace pyruntime
