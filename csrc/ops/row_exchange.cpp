#include "ops/row_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace pyruntime {

namespace {

FlightDescriptor descriptor_of(Op op, const Operand& operand, int64_t rows, int64_t width) {
  return {op,
          static_cast<int32_t>(operand.data.scalar_type()),
          rows,
          operand.blocks,
          operand.inner,
          width,
          false,
          operand.rows};
}

}  // namespace

int64_t agreed_rows(Group& group, Transport& transport, const Operand& x_shard, int64_t rows) {
  if (rows != kUnknownRows) return rows;
  const std::vector<int64_t> held =
      transport.rows_held(descriptor_of(Op::kAllGather, x_shard, kUnknownRows, x_shard.width));
  int64_t total = 0;
  for (const int64_t count : held) total += count;
  for (int peer = 0; peer < transport.world_size(); ++peer) {
    const int64_t share = rows_of_rank(total, transport.world_size(), peer);
    TORCH_CHECK_VALUE(held[peer] == share, "The ranks of group '", group.name(), "' hold ",
                      at::IntArrayRef(held), " rows, ", total, " in all; rank ", peer, " should hold ", share,
                      " of them, as torch.tensor_split cuts rows.");
  }
  return total;
}

std::string why_not_fused(const Transport& transport, Op op, const Operand& operand, int64_t rows,
                          int64_t width) {
  return transport.why_not_fused(descriptor_of(op, operand, rows, width));
}

RowGather::RowGather(Transport& transport, Op op, const Operand& x_shard, int64_t rows, int pieces)
    : transport_(transport), shard_(x_shard), rows_(rows) {
  FlightDescriptor descriptor = descriptor_of(op, x_shard, rows, x_shard.width);
  descriptor.pieces = pieces;
  flight_ = transport.gather(descriptor);
  const int64_t first = flight_->order().front().begin;
  for (const Chunk& chunk : flight_->own()) {
    {
      const ScopedSeconds moving(transport.stats().moving_s);
      flight_->memory(chunk).copy_(
          shard_.data.narrow(1, (chunk.begin - first) * shard_.inner, chunk.rows * shard_.inner));
    }
    flight_->publish(chunk);
  }
}

at::Tensor RowGather::chunk(const Chunk& chunk) {
  if (chunk.owner == transport_.rank()) return shard_.data;
  flight_->wait(chunk);
  at::Tensor rows = flight_->memory(chunk);
  transport_.stats().bytes += static_cast<int64_t>(rows.nbytes());
  return rows;
}

at::Tensor RowGather::collect() {
  at::Tensor all = at::empty({shard_.blocks, rows_ * shard_.inner, shard_.width}, shard_.data.options());
  for (const Chunk& part : order()) {
    const at::Tensor rows = chunk(part);
    const ScopedSeconds moving(transport_.stats().moving_s);
    shard_.rows_of(all, part).copy_(rows);
  }
  return all;
}

at::Tensor RowGather::collect_others() {
  const Chunk& own = order().front();
  at::Tensor others =
      at::empty({shard_.blocks, (rows_ - own.rows) * shard_.inner, shard_.width}, shard_.data.options());
  for (const Chunk& part : order()) {
    if (part.owner == transport_.rank()) continue;
    const at::Tensor rows = chunk(part);
    const ScopedSeconds moving(transport_.stats().moving_s);
    Chunk place = part;
    if (part.begin > own.begin) place.begin -= own.rows;
    shard_.rows_of(others, place).copy_(rows);
  }
  return others;
}

at::Tensor RowGather::others_of(const at::Tensor& all) const {
  const Chunk& own = flight_->order().front();
  const int64_t end = own.begin + own.rows;
  const at::Tensor before = all.narrow(1, 0, own.begin * shard_.inner);
  const at::Tensor after = all.narrow(1, end * shard_.inner, (rows_ - end) * shard_.inner);
  if (own.begin == 0) return after;
  if (end == rows_) return before;
  return at::cat({before, after}, 1);
}

void RowGather::multiply(const at::Tensor& out, const at::Tensor& weight, bool transposed,
                         const at::Tensor& bias, const std::string& tiles) {
  flight_->multiply({shard_.data.select(0, 0), weight, transposed, bias, out.select(0, 0), tiles});
  const int64_t others = multiplied_ ? 0 : rows_ - order().front().rows;  // they come once
  multiplied_ = true;
  transport_.stats().bytes += others * shard_.inner * shard_.width * shard_.data.element_size();
}

RowScatter::RowScatter(Transport& transport, Op op, const Operand& like, int64_t width, bool with_bias,
                       bool all, int pieces)
    : transport_(transport),
      blocks_(like.blocks),
      inner_(like.inner),
      width_(width),
      rows_(like.rows),
      own_rows_(rows_of_rank(like.rows, transport.world_size(), transport.rank())),
      options_(like.data.options()) {
  FlightDescriptor descriptor = descriptor_of(op, like, like.rows, width);
  descriptor.own_rows = own_rows_;
  descriptor.with_bias = with_bias;
  descriptor.pieces = pieces;
  flight_ = transport.scatter(descriptor, all);
}

at::Tensor RowScatter::reduce(const at::Tensor& bias) {
  at::Tensor out = at::empty({blocks_, own_rows_ * inner_, width_}, options_);
  flight_->reduce(out, bias);
  return out;
}

at::Tensor RowScatter::multiply(const at::Tensor& x, const at::Tensor& weight, bool transposed,
                                const at::Tensor& bias, const std::string& tiles) {
  at::Tensor out = at::empty({1, own_rows_ * inner_, width_}, options_);
  flight_->multiply({x.select(0, 0), weight, transposed, bias, out.select(0, 0), tiles});
  return out;
}

at::Tensor RowScatter::reduce_all(const at::Tensor& bias) {
  reduce_for_all(bias);
  return collect_sums();
}

bool RowScatter::sums_have_come() const {
  return std::ranges::all_of(flight_->sums_order(),
                             [&](const Chunk& chunk) { return flight_->sum_has_come(chunk); });
}

at::Tensor RowScatter::collect_sums() {
  at::Tensor all = at::empty({blocks_, rows_ * inner_, width_}, options_);
  for (const Chunk& chunk : flight_->sums_order()) {
    flight_->wait_for_sum(chunk);
    const ScopedSeconds moving(transport_.stats().moving_s);
    const at::Tensor sums = flight_->sum(chunk);
    all.narrow(1, chunk.begin * inner_, chunk.rows * inner_).copy_(sums);
    if (chunk.owner != transport_.rank()) transport_.stats().bytes += static_cast<int64_t>(sums.nbytes());
  }
  return all;
}

}  // namespace pyruntime
