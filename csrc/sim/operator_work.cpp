#include "sim/operator_work.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <set>
#include <string>

namespace sim {

namespace {

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  if (value.isTensor() && value.toTensor().defined()) found.push_back(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) {
      if (each.defined()) found.push_back(each);
    }
  }
  if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector()) {
      if (each && each->defined()) found.push_back(*each);
    }
  }
  return found;
}

int64_t bytes_of(const c10::IValue& value) {
  int64_t bytes = 0;
  for (const at::Tensor& each : tensors_in(value)) {
    if (each.device().is_cpu()) continue;
    bytes += std::min<int64_t>(each.numel() * each.element_size(), each.storage().nbytes());
  }
  return bytes;
}

// The operands of a matrix product that adds to `self` come one later. The last size: the bytes that are
// written, and read where a whole matrix is added to, for an element of the result.
std::optional<Work> gemm_of(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  static const std::set<std::string> kPlain = {"aten::mm", "aten::bmm"};
  static const std::set<std::string> kAdding = {"aten::addmm", "aten::addmm_", "aten::baddbmm",
                                                "aten::baddbmm_"};
  const bool adds = kAdding.count(name) > 0;
  if (!adds && kPlain.count(name) == 0) return std::nullopt;
  const at::Tensor a = arguments[adds ? 1 : 0].toTensor(), b = arguments[adds ? 2 : 1].toTensor();
  const at::Tensor first = arguments[0].toTensor();
  const int64_t batches = a.dim() == 3 ? a.size(0) : 1;
  const bool reads = adds && first.dim() == a.dim() && arguments[3].toScalar().toDouble() != 0;  // beta
  const int64_t moved = (adds ? first : a).element_size() * (reads ? 2 : 1);
  return Work{"gemm", {a.size(-2), b.size(-1), a.size(-1), batches, a.element_size(), moved}};
}

// torch's grouped GEMM: rows times the matrix that they belong to, or sums over the rows of each. The sizes:
// matrices, rows, n and k of a matrix [n, k] or [k, n], or of a sum [n, k].
std::optional<Work> grouped_gemm_of(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  if (name != "aten::_grouped_mm") return std::nullopt;
  const at::Tensor a = arguments[0].toTensor(), b = arguments[1].toTensor();
  if (b.dim() == 3) return Work{"grouped gemm", {b.size(0), a.size(0), b.size(2), b.size(1)}};
  return Work{"grouped gradients", {arguments[2].toTensor().numel(), a.size(1), a.size(0), b.size(1)}};
}

}  // namespace

Work memory_work(int64_t bytes) {
  return {"memory", {bytes}};
}

Work work_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments,
             const std::vector<c10::IValue>& results) {
  // These read as much of their first argument as they give.
  static const std::set<std::string> kPicking = {"aten::embedding", "aten::index", "aten::index_select",
                                                 "aten::gather"};
  // These do not read what they write.
  static const std::set<std::string> kWriting = {"aten::zero_",    "aten::fill_",  "aten::normal_",
                                                 "aten::uniform_", "aten::arange", "aten::random_"};
  const std::string& name = schema.name();
  if (auto gemm = gemm_of(name, arguments)) return *gemm;
  if (auto gemm = grouped_gemm_of(name, arguments)) return *gemm;
  int64_t given = 0, read = 0;
  for (const c10::IValue& each : results) given += bytes_of(each);
  if (kPicking.count(name) > 0) {
    for (size_t i = 1; i < arguments.size(); ++i) {
      if (!schema.arguments()[i].is_out()) read += bytes_of(arguments[i]);
    }
    return memory_work(2 * given + read);
  }
  if (kWriting.count(name) > 0) return memory_work(given);
  for (size_t i = 0; i < arguments.size(); ++i) {
    // `out=` is only written, and given.
    if (!schema.arguments()[i].is_out()) read += bytes_of(arguments[i]);
  }
  if (results.empty()) {  // _foreach_: what it writes, it has read
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) given += bytes_of(arguments[i]);
    }
  }
  return memory_work(given + read);
}

}  // namespace sim
