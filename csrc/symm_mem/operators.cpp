#include "symm_mem/operators.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/operators.h"
#include "transport/group.h"

namespace pyruntime {

namespace {

// --- checks

// A [.., K'] and B [K, N]; `dim` of A is gathered or scattered.
void check_operands(const char* op, const char* dim_name, const at::Tensor& a, at::TensorList bs,
                    int64_t dim) {
  TORCH_CHECK_VALUE(a.dim() >= 2, op, ": A has shape ", a.sym_sizes(),
                    "; it must be a matrix, or have more dimensions before its rows.");
  TORCH_CHECK_VALUE(dim >= 0 && dim < a.dim(), op, ": ", dim_name, "=", dim,
                    " is not a dimension of A with shape ", a.sym_sizes(), "; pass 0 to ", a.dim() - 1, ".");
  for (const at::Tensor& b : bs) {
    TORCH_CHECK_VALUE(b.dim() == 2, op, ": B has shape ", b.sym_sizes(), "; it must be a matrix [K, N].");
  }
}

void check_product(const char* op, const at::Tensor& a, const c10::SymInt& features, const at::Tensor& b) {
  TORCH_CHECK_VALUE(features == b.sym_size(0), op, ": A of shape ", a.sym_sizes(), " has ", features,
                    " features over the ranks that are multiplied, and B of shape ", b.sym_sizes(), " takes ",
                    b.sym_size(0), ".");
}

void check_even(const char* op, const at::Tensor& x, const char* what, const c10::SymInt& size,
                int64_t ranks) {
  TORCH_CHECK_VALUE(size % ranks == 0, op, ": ", what, " of shape ", x.sym_sizes(), " has ", size,
                    " to scatter, which ", ranks,
                    " ranks do not divide; pad it, or call pyruntime.matmul_reduce_scatter, which takes any "
                    "number of rows.");
}

void check_reduce_op(const char* op, c10::string_view reduce_op) {
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "avg", op, ": reduce_op '", reduce_op,
                    "' is not computed; use 'sum' or 'avg'.");
}

// --- helpers

int64_t ranks_of(c10::string_view group) {
  return Group::get(std::string(group)).world_size();
}

// Without autograd nothing is kept for a backward pass; with it the primitive decides.
std::optional<bool> keep_gathered(const at::Tensor& a, at::TensorList bs) {
  const auto differentiates = [](const at::Tensor& t) { return t.requires_grad(); };
  if (at::GradMode::is_enabled() && (differentiates(a) || std::any_of(bs.begin(), bs.end(), differentiates)))
    return std::nullopt;
  return false;
}

at::Tensor reduced(const at::Tensor& sums, c10::string_view reduce_op, int64_t ranks) {
  return reduce_op == "avg" ? sums / ranks : sums;
}

// x as rows, for the collectives; any shape but a scalar's.
at::Tensor as_rows(const char* op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": a scalar has no rows; pass a tensor of at least one dimension.");
  return x.dim() == 1 ? x.unsqueeze(1) : x.flatten(1);
}

std::vector<c10::SymInt> sizes_with_rows(const at::Tensor& x, const c10::SymInt& rows) {
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes[0] = rows;
  return sizes;
}

// --- kernels

// Returns [gather(A_shard)] + [Y_i], Y_i = gather(A_shard) @ B_i, gathered along the features. Every GEMM
// needs whole rows, so none can begin before all features have arrived.
Tensors multiply_gathered_features(const at::Tensor& a_shard, at::TensorList bs, c10::string_view group,
                                   int64_t ranks) {
  const at::Tensor shard = a_shard.flatten(0, -2);  // [M, K / P]
  const at::Tensor gathered = call_all_gather(shard, group, 0, shard.sym_size(0) * ranks);
  const std::vector<c10::SymInt> by_rank{ranks, shard.sym_size(0), shard.sym_size(1)};
  std::vector<c10::SymInt> sizes = a_shard.sym_sizes().vec();
  sizes.back() = sizes.back() * ranks;
  Tensors result{gathered.view_symint(by_rank).transpose(0, 1).reshape_symint(sizes)};
  for (const at::Tensor& b : bs) result.push_back(call_linear(result[0], b.t()));
  return result;
}

// Gathered or scattered rows travel as dimension 0. Torch's results have that layout too, and so do the
// operands that inductor's pass makes, so nothing is copied for it.
std::tuple<std::optional<at::Tensor>, Tensors> fused_all_gather_matmul(const at::Tensor& a_shard,
                                                                       at::TensorList bs, int64_t gather_dim,
                                                                       c10::string_view group,
                                                                       bool return_a) {
  constexpr const char* kOp = "fused_all_gather_matmul";
  check_operands(kOp, "gather_dim", a_shard, bs, gather_dim);
  const int64_t ranks = ranks_of(group);
  const bool of_features = gather_dim == a_shard.dim() - 1;
  for (const at::Tensor& b : bs)
    check_product(kOp, a_shard, of_features ? a_shard.sym_size(-1) * ranks : a_shard.sym_size(-1), b);
  if (of_features) {
    Tensors products = multiply_gathered_features(a_shard, bs, group, ranks);
    std::optional<at::Tensor> a;
    if (return_a) a = std::move(products.front());
    products.erase(products.begin());
    return {a, products};
  }
  Tensors weights;
  for (const at::Tensor& b : bs) weights.push_back(b.t());
  const at::Tensor rows = a_shard.movedim(gather_dim, 0);
  const c10::SymInt all_rows = rows.sym_size(0) * ranks;
  Tensors outputs = weights.empty() ? Tensors{call_all_gather(rows, group, 0, all_rows)}
                                    : call_all_gather_matmul(rows, weights, group, 0, all_rows, return_a,
                                                             keep_gathered(a_shard, bs));
  for (at::Tensor& output : outputs) output = output.movedim(0, gather_dim);
  std::optional<at::Tensor> a;
  if (return_a) a = outputs.back();
  outputs.resize(bs.size());
  return {a, outputs};
}

at::Tensor fused_matmul_reduce_scatter(const at::Tensor& a, const at::Tensor& b, c10::string_view reduce_op,
                                       int64_t scatter_dim, c10::string_view group) {
  constexpr const char* kOp = "fused_matmul_reduce_scatter";
  check_operands(kOp, "scatter_dim", a, {b}, scatter_dim);
  check_product(kOp, a, a.sym_size(-1), b);
  check_reduce_op(kOp, reduce_op);
  const int64_t ranks = ranks_of(group);
  if (scatter_dim == a.dim() - 1) {
    // Y^T [N, M] = B^T [N, K] @ A^T: its rows are scattered.
    check_even(kOp, b, "B", b.sym_size(1), ranks);
    const at::Tensor sums = call_matmul_reduce_scatter(b.t(), a.flatten(0, -2), group, 0);
    std::vector<c10::SymInt> sizes = a.sym_sizes().vec();
    sizes.back() = sums.sym_size(0);
    return reduced(sums, reduce_op, ranks).t().contiguous().view_symint(sizes);
  }
  check_even(kOp, a, "A", a.sym_size(scatter_dim), ranks);
  const at::Tensor sums = call_matmul_reduce_scatter(a.movedim(scatter_dim, 0), b.t(), group, 0);
  return reduced(sums, reduce_op, ranks).movedim(0, scatter_dim).contiguous();
}

at::Tensor low_contention_all_gather(const at::Tensor& x, c10::string_view group) {
  const at::Tensor rows = as_rows("_low_contention_all_gather", x);
  const c10::SymInt all_rows = rows.sym_size(0) * ranks_of(group);
  return call_all_gather(rows, group, 0, all_rows).view_symint(sizes_with_rows(x, all_rows));
}

at::Tensor low_contention_reduce_scatter(const at::Tensor& x, c10::string_view reduce_op,
                                         c10::string_view group) {
  constexpr const char* kOp = "_low_contention_reduce_scatter";
  check_reduce_op(kOp, reduce_op);
  const at::Tensor rows = as_rows(kOp, x);
  const int64_t ranks = ranks_of(group);
  check_even(kOp, x, "a tensor", rows.sym_size(0), ranks);
  const at::Tensor sums = call_reduce_scatter(rows, group, 0);
  return reduced(sums, reduce_op, ranks).view_symint(sizes_with_rows(x, sums.sym_size(0)));
}

Tensors get_remote_tensors(const at::Tensor& x, c10::string_view group) {
  TORCH_CHECK_VALUE(x.is_contiguous(), "get_remote_tensors: x of shape ", x.sizes(), " has strides ",
                    x.strides(), "; pass a contiguous tensor.");
  const auto memory = c10d::symmetric_memory::rendezvous(x, std::string(group));
  Tensors result;
  for (int peer = 0; peer < memory->get_world_size(); ++peer)
    result.push_back(memory->get_buffer(peer, x.sizes(), x.scalar_type(), x.storage_offset()));
  return result;
}

void refuse_scaled(const c10::OperatorHandle& op, c10::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " was called with tensors on the CPU, where pyruntime multiplies no scaled "
                              "operands (fp8); cast them to bfloat16 and call the operator without scales.");
}

// --- registration

// The same functions serve autograd, because they only call differentiable operators.
void implement(torch::Library& library) {
  library.impl("fused_all_gather_matmul", TORCH_FN(fused_all_gather_matmul));
  library.impl("fused_matmul_reduce_scatter", TORCH_FN(fused_matmul_reduce_scatter));
  library.impl("_low_contention_all_gather", TORCH_FN(low_contention_all_gather));
  library.impl("_low_contention_reduce_scatter", TORCH_FN(low_contention_reduce_scatter));
}

// Silences torch's warning about a kernel that replaces another, which is intended here.
struct NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

void use_symm_mem_operators(c10::DeviceType device) {
  static std::mutex mutex;
  static auto* libraries = new std::vector<torch::Library>();  // never destroyed, as torch's own are not
  static std::set<c10::DeviceType> used;
  const std::lock_guard<std::mutex> lock(mutex);
  if (used.count(device) > 0) return;
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard quiet(&no_warnings);
  const c10::DispatchKey key = c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(device));
  const c10::DispatchKey autograd = c10::getAutogradKeyFromBackend(c10::toBackendComponent(key));
  for (const c10::DispatchKey each : {key, autograd}) {
    libraries->emplace_back(torch::Library::IMPL, "symm_mem", each, __FILE__, __LINE__);
    implement(libraries->back());
  }
  if (device == c10::kCPU) {  // elsewhere torch has its own
    libraries->emplace_back(torch::Library::IMPL, "symm_mem", key, __FILE__, __LINE__);
    libraries->back().impl("get_remote_tensors", TORCH_FN(get_remote_tensors));
    for (const char* name : {"fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"})
      libraries->back().impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_scaled>());
  }
  used.insert(device);
}

}  // namespace pyruntime
