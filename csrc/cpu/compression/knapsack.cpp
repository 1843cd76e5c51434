#include "cpu/compression/knapsack.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

namespace {

// found[i] = min(found[i], before[i] + size)
struct TakeLesser {
  static PYRUNTIME_INLINE void run(const double* before, double size, double* found, int64_t count) {
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) {
      const double with_it = before[i] + size;
      found[i] = with_it < found[i] ? with_it : found[i];
    }
  }
};

}  // namespace

std::vector<int64_t> least_choices(const std::vector<std::vector<double>>& sizes,
                                   const std::vector<std::vector<int64_t>>& steps, int64_t levels) {
  const size_t number = sizes.size();
  TORCH_CHECK_VALUE(levels >= 0 && steps.size() == number, "least_choices: levels=", levels, ", sizes of ",
                    number, " layers and steps of ", steps.size(), "; give each layer both.");
  const size_t width = static_cast<size_t>(levels) + 1;
  // Row l: the least size of the first l layers, for each number of steps that they may use.
  std::vector<double> least((number + 1) * width, std::numeric_limits<double>::infinity());
  std::fill_n(least.begin(), width, 0.0);
  const auto row = [&](size_t layer) { return least.data() + layer * width; };
  for (size_t layer = 0; layer < number; ++layer) {
    TORCH_CHECK_VALUE(steps[layer].size() == sizes[layer].size(), "least_choices: layer ", layer, " has ",
                      sizes[layer].size(), " sizes and ", steps[layer].size(),
                      " steps; give each choice both.");
    for (size_t choice = 0; choice < sizes[layer].size(); ++choice) {
      const int64_t used = steps[layer][choice];
      TORCH_CHECK_VALUE(used >= 0, "least_choices: steps[", layer, "][", choice, "]=", used,
                        "; they must not be negative.");
      if (used > levels) continue;
      layers::simd_run<TakeLesser>(static_cast<const double*>(row(layer)), sizes[layer][choice],
                                   row(layer + 1) + used, levels + 1 - used);
    }
  }
  if (!std::isfinite(row(number)[levels])) return {};
  std::vector<int64_t> result(number);
  int64_t left = levels;
  for (size_t layer = number; layer-- > 0;) {
    double best = std::numeric_limits<double>::infinity();
    int64_t used = 0;
    for (size_t choice = 0; choice < sizes[layer].size(); ++choice) {
      const int64_t here = steps[layer][choice];
      if (here > left) continue;
      const double total = row(layer)[left - here] + sizes[layer][choice];
      if (total >= best) continue;
      best = total;
      used = here;
      result[layer] = static_cast<int64_t>(choice);
    }
    left -= used;
  }
  return result;
}

}  // namespace pyruntime::cpu
