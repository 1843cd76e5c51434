#include "ops/experts/expert_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/layers/expert_kernels.h"

namespace pyruntime {

ExpertRows::ExpertRows(const at::Tensor& table, int64_t first, int64_t count, bool pads)
    : pads_(pads), begins_(count + 1, 0), counts_(count, 0) {
  const int64_t rows = table.size(0), slots = table.size(1) / 2;
  const at::Tensor experts = table.narrow(1, 0, slots).to(at::kCPU, at::kLong).contiguous();
  const int64_t* const expert_of = experts.const_data_ptr<int64_t>();
  const auto here = [&](int64_t place) {
    const int64_t expert = expert_of[place] - first;
    return 0 <= expert && expert < count ? expert : -1;
  };
  for (int64_t place = 0; place < rows * slots; ++place) {
    if (const int64_t expert = here(place); expert >= 0) ++counts_[expert];
  }
  for (int64_t expert = 0; expert < count; ++expert) {
    begins_[expert + 1] = begins_[expert] + padded(counts_[expert]);
  }
  in_order_.resize(size());
  at::Tensor places = at::zeros({size()}, at::kLong);
  std::vector<int64_t> next(begins_.begin(), begins_.end() - 1);
  row_begins_.assign(rows + 1, 0);
  for (int64_t place = 0; place < rows * slots; ++place) {
    const int64_t expert = here(place);
    if (expert < 0) continue;
    const int64_t at = next[expert]++;
    in_order_[at] = place / slots;
    places.mutable_data_ptr<int64_t>()[at] = place;
    ++row_begins_[place / slots + 1];
  }
  for (int64_t row = 0; row < rows; ++row) row_begins_[row + 1] += row_begins_[row];
  of_row_.resize(row_begins_.back());
  next.assign(row_begins_.begin(), row_begins_.end() - 1);
  for (int64_t expert = 0; expert < count; ++expert) {
    const Run run = of(expert);
    for (int64_t at = run.begin; at < run.begin + run.count; ++at) of_row_[next[in_order_[at]]++] = at;
  }
  at::Tensor numbers = at::empty({size()}, at::kLong);
  std::copy(in_order_.begin(), in_order_.end(), numbers.mutable_data_ptr<int64_t>());
  rows_ = numbers.to(table.device());
  places_ = places.to(table.device());
  weights_ = table.narrow(1, slots, slots).reshape({-1}).index_select(0, places_);
  clear_padding(weights_);
}

// Up to 256 rows in steps of 16, as many as a tile has; from then on in 16 steps to each doubling.
int64_t ExpertRows::padded(int64_t rows) const {
  if (!pads_) return rows;
  int64_t step = 16;
  while (rows >= 32 * step) step *= 2;
  return (rows + step - 1) / step * step;
}

void ExpertRows::clear_padding(const at::Tensor& values) const {
  for (int64_t expert = 0; expert < experts(); ++expert) {
    const int64_t end = begins_[expert] + counts_[expert], left = begins_[expert + 1] - end;
    if (left > 0) values.narrow(0, end, left).zero_();
  }
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

ExpertRows::Run ExpertRows::of(int64_t expert, const Chunk& chunk) const {
  const auto begin = in_order_.begin() + begins_[expert], end = begin + counts_[expert];
  const auto low = std::lower_bound(begin, end, chunk.begin);
  const auto high = std::lower_bound(low, end, chunk.begin + chunk.rows);
  return {low - in_order_.begin(), high - low};
}

}  // namespace pyruntime
