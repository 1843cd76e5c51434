#include "ops/gemm/gemm_rule.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace pyruntime {

namespace {

constexpr size_t kProducts = 3;

// The index of the nearest grid point, in logarithms.
size_t nearest(const std::vector<int64_t>& grid, int64_t value) {
  size_t place = 0;
  const auto squared = static_cast<double>(value) * static_cast<double>(value);
  while (place + 1 < grid.size() &&
         squared > static_cast<double>(grid[place]) * static_cast<double>(grid[place + 1])) {
    ++place;
  }
  return place;
}

// A table of one class gives the same answer for all shapes.
GemmTable always(bool ours) {
  return {{1}, {1}, std::vector<std::vector<bool>>(kProducts, {ours})};
}

std::atomic<std::shared_ptr<const GemmTable>>& table() {
  static auto* held =
      new std::atomic<std::shared_ptr<const GemmTable>>(std::make_shared<const GemmTable>(always(false)));
  return *held;  // never destroyed: threads may outlive static destructors
}

}  // namespace

std::string processor_key() {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return "";
  char vendor[13] = {};
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return "";
  constexpr unsigned kExtended = 0xf;
  unsigned family = (a >> 8) & 0xf, model = (a >> 4) & 0xf;
  if (family == kExtended || family == 6) model |= (a >> 12) & 0xf0;
  if (family == kExtended) family += (a >> 20) & 0xff;
  return std::string(vendor) + " family " + std::to_string(family) + " model " + std::to_string(model);
#else
  return "";
#endif
}

void use_gemm_table(GemmTable given) {
  const size_t classes = given.rows.size() * given.features.size() * given.features.size();
  TORCH_CHECK_VALUE(classes > 0 && given.is_ours.size() == kProducts,
                    "A table of GEMMs has rows, features, and three products; found ", given.rows.size(),
                    " rows, ", given.features.size(), " features and ", given.is_ours.size(), " products.");
  for (const std::vector<bool>& product : given.is_ours) {
    TORCH_CHECK_VALUE(product.size() == classes, "A table of GEMMs with ", given.rows.size(), " rows and ",
                      given.features.size(), " features has ", classes, " classes for each product; found ",
                      product.size(), ".");
  }
  table().store(std::make_shared<const GemmTable>(std::move(given)));
}

void use_gemm(bool ours) {
  table().store(std::make_shared<const GemmTable>(always(ours)));
}

Product product_named(const std::string& name) {
  if (name == "forward") return Product::kForward;
  if (name == "dX") return Product::kInputGradient;
  if (name == "dW") return Product::kWeightGradient;
  TORCH_CHECK_VALUE(false, "product='", name, "' is no product; use forward, dX or dW.");
}

bool takes_ours(Product product, int64_t rows, int64_t k, int64_t n) {
  const std::shared_ptr<const GemmTable> used = table().load();
  const size_t features = used->features.size();
  const size_t place = (nearest(used->rows, rows) * features + nearest(used->features, k)) * features +
                       nearest(used->features, n);
  return used->is_ours[static_cast<size_t>(product)][place];
}

}  // namespace pyruntime
