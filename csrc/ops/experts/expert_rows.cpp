#include "ops/experts/expert_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/layers/expert_kernels.h"

namespace pyruntime {

ExpertRows::ExpertRows(const at::Tensor& table, int64_t first, int64_t count) : begins_(count + 1, 0) {
  const int64_t rows = table.size(0), slots = table.size(1) / 2;
  const at::Tensor experts = table.narrow(1, 0, slots).to(at::kCPU, at::kLong).contiguous();
  const int64_t* const expert_of = experts.const_data_ptr<int64_t>();
  const auto here = [&](int64_t place) {
    const int64_t expert = expert_of[place] - first;
    return 0 <= expert && expert < count ? expert : -1;
  };
  for (int64_t place = 0; place < rows * slots; ++place) {
    if (const int64_t expert = here(place); expert >= 0) ++begins_[expert + 1];
  }
  for (int64_t expert = 0; expert < count; ++expert) begins_[expert + 1] += begins_[expert];
  in_order_.resize(size());
  at::Tensor places = at::empty({size()}, at::kLong);
  std::vector<int64_t> next(begins_.begin(), begins_.end() - 1);
  for (int64_t place = 0; place < rows * slots; ++place) {
    const int64_t expert = here(place);
    if (expert < 0) continue;
    const int64_t at = next[expert]++;
    in_order_[at] = place / slots;
    places.mutable_data_ptr<int64_t>()[at] = place;
  }
  row_begins_.assign(rows + 1, 0);
  for (const int64_t row : in_order_) ++row_begins_[row + 1];
  for (int64_t row = 0; row < rows; ++row) row_begins_[row + 1] += row_begins_[row];
  of_row_.resize(size());
  next.assign(row_begins_.begin(), row_begins_.end() - 1);
  for (int64_t at = 0; at < size(); ++at) of_row_[next[in_order_[at]]++] = at;
  at::Tensor numbers = at::empty({size()}, at::kLong);
  std::copy(in_order_.begin(), in_order_.end(), numbers.mutable_data_ptr<int64_t>());
  rows_ = numbers.to(table.device());
  places_ = places.to(table.device());
  weights_ = table.narrow(1, slots, slots).reshape({-1}).index_select(0, places_);
}

void ExpertRows::sum(const at::Tensor& values, const Chunk& chunk, const at::Tensor& out) const {
  if (values.is_cpu()) {
    layers::sum_rows(out, values, row_begins_.data() + chunk.begin, of_row_.data());
    return;
  }
  at::Tensor sums = at::zeros(out.sizes(), values.options().dtype(weights_.scalar_type()));
  for (int64_t expert = 0; expert < experts(); ++expert) {
    const Run run = of(expert, chunk);  // no row twice, so in no order
    if (run.is_empty()) continue;
    sums.index_add_(0, run.of(rows_) - chunk.begin, run.of(values).to(sums.scalar_type()));
  }
  out.copy_(sums);
}

ExpertRows::Run ExpertRows::of(int64_t expert) const {
  return {begins_[expert], begins_[expert + 1] - begins_[expert]};
}

ExpertRows::Run ExpertRows::of(int64_t expert, const Chunk& chunk) const {
  const auto begin = in_order_.begin() + begins_[expert], end = in_order_.begin() + begins_[expert + 1];
  const auto low = std::lower_bound(begin, end, chunk.begin);
  const auto high = std::lower_bound(low, end, chunk.begin + chunk.rows);
  return {low - in_order_.begin(), high - low};
}

}  // namespace pyruntime
