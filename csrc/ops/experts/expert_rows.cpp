#include "ops/experts/expert_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_embedding_bag_forward_only.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <tuple>
#include <utility>

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
    : pads_(pads), experts_(count) {
  const DeviceLibrary* const kernels = count > 0 ? kernels_for(table.device(), table.scalar_type()) : nullptr;
  kernels == nullptr ? sort_on_host(table, first) : sort_on_device(*kernels, table, first);
}

void ExpertRows::sort_on_device(const DeviceLibrary& kernels, const at::Tensor& table, int64_t first) {
  sorted_.emplace(kernels, table, first, /*per=*/1, experts_);
  rows_ = sorted_->rows;
  places_ = sorted_->places;
  weights_ = sorted_->weights;
  counts_on_host_ = at::empty({experts_}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  counts_on_host_.copy_(sorted_->counts, /*non_blocking=*/true);
  is_here_ = std::make_unique<c10::Event>(table.device().type());
  is_here_->record(c10::impl::VirtualGuardImpl(table.device().type()).getStream(table.device()));
}

void ExpertRows::set(std::vector<int64_t> counts) const {
  counts_ = std::move(counts);
  begins_.assign(1, 0);
  for (const int64_t rows : counts_) begins_.push_back(begins_.back() + padded(rows));
}

const std::vector<int64_t>& ExpertRows::begins() const {
  if (begins_.empty()) {
    is_here_->synchronize();
    const int64_t* const counts = counts_on_host_.const_data_ptr<int64_t>();
    set({counts, counts + experts_});
  }
  return begins_;
}

const at::Tensor& ExpertRows::ends_on_device() const {
  if (!ends_on_device_.defined()) ends_on_device_ = ends_on(rows_.device(), ends());
  return ends_on_device_;
}

void ExpertRows::sort_on_host(const at::Tensor& table, int64_t first) {
  const int64_t rows = table.size(0), slots = table.size(1) / 2;
  const at::Tensor experts = table.narrow(1, 0, slots).to(at::kCPU, at::kLong).contiguous();
  const int64_t* const expert_of = experts.const_data_ptr<int64_t>();
  const auto here = [&](int64_t place) {
    const int64_t expert = expert_of[place] - first;
    return 0 <= expert && expert < experts_ ? expert : -1;
  };
  std::vector<int64_t> counts(experts_);
  for (int64_t place = 0; place < rows * slots; ++place) {
    if (const int64_t expert = here(place); expert >= 0) ++counts[expert];
  }
  set(std::move(counts));
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
  for (int64_t expert = 0; expert < experts_; ++expert) {
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
  if (!pads_) return;
  for (int64_t expert = 0; expert < experts(); ++expert) {
    const int64_t end = begins_[expert] + counts_[expert], left = begins_[expert + 1] - end;
    if (left > 0) values.narrow(0, end, left).zero_();
  }
}

void ExpertRows::sum(const at::Tensor& values, const Chunk& chunk, const at::Tensor& out) const {
  if (sorted_) {
    const at::Tensor positions = sorted_->positions.narrow(0, chunk.begin, chunk.rows);
    return sorted_->sum(values.contiguous(), positions, out);
  }
  if (values.is_cpu()) {
    return layers::sum_rows(out, values, row_begins_.const_data_ptr<int64_t>() + chunk.begin,
                            of_row_.const_data_ptr<int64_t>());
  }
  if (size() == 0) {
    out.zero_();
    return;
  }
  constexpr int64_t kSum = 0;
  const at::Tensor all = std::get<0>(at::_embedding_bag_forward_only(values, of_row_, row_begins_,
                                                                     /*scale_grad_by_freq=*/false, kSum,
                                                                     /*sparse=*/false,
                                                                     /*per_sample_weights=*/{},
                                                                     /*include_last_offset=*/true));
  out.copy_(all.narrow(0, chunk.begin, chunk.rows));
}

void ExpertRows::sum(const at::Tensor& values, const at::Tensor& rows, const at::Tensor& out) const {
  if (rows.numel() == 0) return;
  sorted_->sum(values.contiguous(), sorted_->positions.index_select(0, rows), out);
}

ExpertRows::Run ExpertRows::of(int64_t expert, const Chunk& chunk) const {
  const auto begin = in_order_.begin() + begins_[expert], end = begin + counts_[expert];
  const auto low = std::lower_bound(begin, end, chunk.begin);
  const auto high = std::lower_bound(low, end, chunk.begin + chunk.rows);
  return {low - in_order_.begin(), high - low};
}

}  // namespace pyruntime
