#include "ops/line_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace pyruntime {

namespace {

Transport& transport_of(const std::string& name, c10::Device device) {
  Group& group = Group::get(name);
  Transport* transport = group.transport(device);
  TORCH_CHECK(transport != nullptr, "Lines of ", device.str(), " tensors cannot be exchanged over group '",
              name, "': ", group.why_no_transport(device));
  return *transport;
}

Operand lines_like(const at::Tensor& data, int64_t lines, int64_t width) {
  Operand operand;
  operand.data = data;
  operand.blocks = 1;
  operand.rows = lines;
  operand.inner = 1;
  operand.width = width;
  operand.sizes = {lines, width};
  operand.dim = 0;
  return operand;
}

std::vector<LineRange> ranges(const std::vector<Chunk>& chunks) {
  std::vector<LineRange> result;
  for (const Chunk& chunk : chunks) result.push_back({chunk.begin, chunk.rows});
  return result;
}

}  // namespace

LineScatter::LineScatter(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                         c10::Device device, bool all)
    : all_(all) {
  const at::Tensor like = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  scatter_ =
      std::make_unique<RowScatter>(transport_of(group, device), all ? Op::kAllReduce : Op::kReduceScatter,
                                   lines_like(like, lines, width), width, /*with_bias=*/false, all);
}

std::vector<LineRange> LineScatter::chunks() const {
  return ranges(scatter_->order());
}

at::Tensor LineScatter::part(size_t chunk) {
  return scatter_->part(scatter_->order().at(chunk)).select(0, 0);
}

void LineScatter::publish(size_t chunk) {
  scatter_->publish(scatter_->order().at(chunk));
}

void LineScatter::reduce() {
  if (reduced_) return;
  if (all_) {
    scatter_->reduce_for_all({});
  } else {
    own_sums_ = scatter_->reduce({});
  }
  reduced_ = true;
}

at::Tensor LineScatter::finish() {
  reduce();
  const at::Tensor sums = all_ ? scatter_->collect_sums() : own_sums_;
  scatter_->finish();
  return sums.select(0, 0);
}

LineGather::LineGather(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                       c10::Device device)
    : transport_(transport_of(group, device)) {
  const int64_t own = rows_of_rank(lines, transport_.world_size(), transport_.rank());
  flight_ = transport_.gather({Op::kAllGather, static_cast<int32_t>(dtype), lines, /*row_blocks=*/1,
                               /*inner=*/1, width,
                               /*with_bias=*/false, own});
}

std::vector<LineRange> LineGather::own_chunks() const {
  return ranges(flight_->own());
}

at::Tensor LineGather::own(size_t chunk) {
  return flight_->memory(flight_->own().at(chunk)).select(0, 0);
}

void LineGather::publish(size_t chunk) {
  flight_->publish(flight_->own().at(chunk));
}

LineSend::LineSend(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                   c10::Device device, int source, int64_t agreement)
    : transport_(transport_of(group, device)), all_{source, /*begin=*/0, lines} {
  const int64_t own = rows_of_rank(lines, transport_.world_size(), transport_.rank(), source);
  flight_ = transport_.gather({Op::kSend, static_cast<int32_t>(dtype), lines, /*row_blocks=*/1, /*inner=*/1,
                               width, /*with_bias=*/false, own, source, agreement});
}

GatherFlight& LineSend::flight() {
  TORCH_CHECK(flight_ != nullptr, "The group of this send has been closed.");
  return *flight_;
}

at::Tensor LineSend::memory() {
  return flight().memory(all_).select(0, 0);
}

void LineSend::publish() {
  for (const Chunk& chunk : flight().own()) flight_->publish(chunk);
}

void LineSend::wait() {
  for (const Chunk& chunk : flight().order()) {
    if (chunk.owner == all_.owner) flight_->wait(chunk);
  }
  transport_.stats().bytes += static_cast<int64_t>(memory().nbytes());
}

// The first chunk of the order is this rank's.
std::vector<LineRange> LineGather::chunks() const {
  std::vector<LineRange> all = ranges(flight_->order());
  all.erase(all.begin());
  return all;
}

bool LineGather::has_come() const {
  const std::vector<Chunk>& order = flight_->order();
  return std::all_of(order.begin() + 1, order.end(),
                     [&](const Chunk& chunk) { return flight_->has_come(chunk); });
}

at::Tensor LineGather::chunk(size_t chunk) {
  const Chunk& wanted = flight_->order().at(chunk + 1);
  flight_->wait(wanted);
  at::Tensor lines = flight_->memory(wanted);
  transport_.stats().bytes += static_cast<int64_t>(lines.nbytes());
  return lines.select(0, 0);
}

}  // namespace pyruntime
