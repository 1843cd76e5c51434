#include "ops/experts/expert_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_embedding_bag_forward_only.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "cpu/layers/sum_rows.h"

namespace pyruntime {

namespace {

// Tensors of these numbers, which reach a device in one copy.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> on_device(c10::Device device,
                                                                     const std::vector<int64_t>& a,
                                                                     const std::vector<int64_t>& b,
                                                                     const std::vector<int64_t>& c,
                                                                     const std::vector<int64_t>& d) {
  const std::vector<int64_t> sizes{static_cast<int64_t>(a.size()), static_cast<int64_t>(b.size()),
                                   static_cast<int64_t>(c.size()), static_cast<int64_t>(d.size())};
  const at::Tensor all = at::empty({sizes[0] + sizes[1] + sizes[2] + sizes[3]}, at::kLong);
  int64_t* end = all.mutable_data_ptr<int64_t>();
  for (const std::vector<int64_t>* each : {&a, &b, &c, &d}) end = std::copy(each->begin(), each->end(), end);
  const std::vector<at::Tensor> parts = all.to(device).split_with_sizes(sizes);
  return {parts[0], parts[1], parts[2], parts[3]};
}

}  // namespace

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
  std::vector<int64_t> places(size()), row_begins(rows + 1);
  std::vector<int64_t> next(begins_.begin(), begins_.end() - 1);
  for (int64_t place = 0; place < rows * slots; ++place) {
    const int64_t expert = here(place);
    if (expert < 0) continue;
    const int64_t at = next[expert]++;
    in_order_[at] = place / slots;
    places[at] = place;
    ++row_begins[place / slots + 1];
  }
  for (int64_t row = 0; row < rows; ++row) row_begins[row + 1] += row_begins[row];
  std::vector<int64_t> of_row(row_begins.back());
  next.assign(row_begins.begin(), row_begins.end() - 1);
  for (int64_t expert = 0; expert < count; ++expert) {
    const Run run = of(expert);
    for (int64_t at = run.begin; at < run.begin + run.count; ++at) of_row[next[in_order_[at]]++] = at;
  }
  std::tie(rows_, places_, of_row_, row_begins_) =
      on_device(table.device(), in_order_, places, of_row, row_begins);
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
  layers::sum_rows(out, values, row_begins_.const_data_ptr<int64_t>() + chunk.begin,
                   of_row_.const_data_ptr<int64_t>());
}

at::Tensor ExpertRows::sums(const at::Tensor& values) const {
  if (size() == 0) return at::zeros({row_begins_.numel() - 1, values.size(1)}, values.options());
  constexpr int64_t kSum = 0;
  return std::get<0>(at::_embedding_bag_forward_only(values, of_row_, row_begins_,
                                                     /*scale_grad_by_freq=*/false, kSum, /*sparse=*/false,
                                                     /*per_sample_weights=*/{},
                                                     /*include_last_offset=*/true));
}

ExpertRows::Run ExpertRows::of(int64_t expert, const Chunk& chunk) const {
  const auto begin = in_order_.begin() + begins_[expert], end = begin + counts_[expert];
  const auto low = std::lower_bound(begin, end, chunk.begin);
  const auto high = std::lower_bound(low, end, chunk.begin + chunk.rows);
  return {low - in_order_.begin(), high - low};
}

}  // namespace pyruntime
