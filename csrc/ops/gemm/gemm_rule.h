// Chooses the GEMM for bf16 on the CPU: ours (cpu/packed_matrix.h) or the library's. A table of this
// processor decides, by the product and the class of its shape. It was measured before (`python -m
// bench.gemm`); nothing is measured in a run. A processor without a table uses the library's, or ours if the
// library has no bf16 for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pyruntime {

// A product of a linear layer with x [rows, k] and a weight [n, k].
enum class Product {
  kForward,         // x W^T
  kInputGradient,   // dY W
  kWeightGradient,  // dY^T x
};

// The classes are the points of a grid: a shape belongs to the nearest point, in logarithms.
struct GemmTable {
  std::vector<int64_t> rows, features;  // of the grid, ascending
  // By product, then rows, k and n: whether ours is used.
  std::vector<std::vector<bool>> is_ours;
};

// "AuthenticAMD family 26 model 2"; empty if unknown.
std::string processor_key();

// Chooses, for products that begin from now on, by that table, or the same GEMM for all.
void use_gemm_table(GemmTable table);
void use_gemm(bool ours);

// Raises ValueError for a name that is none of "forward", "dX" and "dW".
Product product_named(const std::string& name);

bool takes_ours(Product product, int64_t rows, int64_t k, int64_t n);

}  // namespace pyruntime
