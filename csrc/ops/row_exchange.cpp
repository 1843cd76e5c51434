#include "ops/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

namespace pyruntime {

namespace {

// What is told of a flight of such rows, [blocks, rows * inner, width].
FlightDescriptor flight_of(Op op, const Operand& operand, int64_t rows, int64_t width) {
  const auto dtype = static_cast<int32_t>(operand.data.scalar_type());
  return {op, dtype, rows, operand.blocks, operand.inner, width, /*with_bias=*/false, operand.rows};
}

}  // namespace

int64_t agreed_rows(Group& group, const Operand& x_shard, int64_t rows) {
  if (rows != kUnknownRows) return rows;
  if (group.world_size() == 1) return x_shard.rows;
  Transport& transport = group.transport(x_shard.data.device());
  const std::vector<int64_t> held =
      transport.rows_held(flight_of(Op::kAllGather, x_shard, kUnknownRows, x_shard.width));
  int64_t total = 0;
  for (const int64_t count : held) total += count;
  for (int peer = 0; peer < transport.world_size(); ++peer) {
    const int64_t share = rows_of_rank(total, transport.world_size(), peer);
    TORCH_CHECK_VALUE(held[peer] == share, "The ranks of group '", group.name(), "' hold ",
                      at::IntArrayRef(held), " rows, ", total, " in all; ", transport.context().name_of(peer),
                      " should hold ", share, " of them, as torch.tensor_split cuts rows.");
  }
  return total;
}

cpu::Wire wire_named(c10::string_view format, const Operand& rows, const Group& group) {
  const cpu::Wire wire = cpu::Wire::named(format, rows.data);
  TORCH_CHECK_VALUE(!wire.rounds() || group.world_size() > 1, "wire='", format,
                    "' was asked for, and one rank alone gathers nothing; leave it out.");
  return wire;
}

RowGather::RowGather(Transport& transport, Op op, const Operand& x_shard, int64_t rows, int pieces,
                     cpu::Wire wire)
    : inside_(transport.context(), op),
      transport_(transport),
      op_(op),
      shard_(x_shard),
      rows_(rows),
      wire_(wire) {
  FlightDescriptor descriptor = flight_of(op, x_shard, rows, wire.travelling_width(x_shard.width));
  descriptor.dtype = static_cast<int32_t>(wire.travels_as(x_shard.data.scalar_type()));
  descriptor.pieces = pieces;
  descriptor.pass = transport.context().passes.now();
  descriptor.failed_passes = transport.context().failed_passes;
  flight_ = transport.gather(descriptor);
  const int64_t first = flight_->order().front().begin;
  const auto own_rows = [&](const at::Tensor& all, const Chunk& chunk) {
    return all.narrow(1, (chunk.begin - first) * shard_.inner, chunk.rows * shard_.inner);
  };
  for (const Chunk& chunk : flight_->own()) {
    {
      const Spending copying(transport.context(), Entered::kCopy, name_of(op));
      wire.write(own_rows(shard_.data, chunk), flight_->memory(chunk));
    }
    flight_->publish(chunk);
  }
  if (!wire.rounds()) return;
  // When all of it has left.
  const Spending rounding(transport.context(), Entered::kCopy, name_of(op));
  shard_.data = at::empty_like(shard_.data);
  for (const Chunk& chunk : flight_->own()) wire.read(flight_->memory(chunk), own_rows(shard_.data, chunk));
}

at::Tensor RowGather::arrived(const Chunk& chunk) {
  Reading reading(transport_.context(), op_, chunk.owner, begun_);
  flight_->wait(chunk);
  at::Tensor rows = flight_->memory(chunk);
  const bool is_new = counted_.insert(chunk.begin).second;
  reading.came(is_new ? static_cast<int64_t>(rows.nbytes()) : 0, flight_->travelled(chunk));
  return rows;
}

at::Tensor RowGather::chunk(const Chunk& chunk) {
  if (chunk.owner == transport_.rank()) return shard_.data;
  if (!wire_.rounds()) return arrived(chunk);
  at::Tensor rows =
      at::empty({shard_.blocks, chunk.rows * shard_.inner, shard_.width}, shard_.data.options());
  read(chunk, rows);
  return rows;
}

void RowGather::read(const Chunk& chunk, const at::Tensor& out) {
  const bool is_own = chunk.owner == transport_.rank();
  const at::Tensor rows = is_own ? shard_.data : arrived(chunk);
  const Spending copying(transport_.context(), Entered::kCopy, name_of(op_));
  if (is_own) {
    out.copy_(rows);
  } else {
    wire_.read(rows, out);
  }
}

at::Tensor RowGather::empty_rows() const {
  return at::empty({shard_.blocks, rows_ * shard_.inner, shard_.width}, shard_.data.options());
}

void RowGather::copy_chunk(const at::Tensor& all, const Chunk& chunk, const at::Tensor& rows) const {
  const Spending copying(transport_.context(), Entered::kCopy, name_of(op_));
  shard_.rows_of(all, chunk).copy_(rows);
}

at::Tensor RowGather::collect() {
  at::Tensor all = empty_rows();
  for (const Chunk& part : order()) read(part, shard_.rows_of(all, part));
  return all;
}

at::Tensor RowGather::collect_others() {
  const Chunk& own = order().front();
  at::Tensor others =
      at::empty({shard_.blocks, (rows_ - own.rows) * shard_.inner, shard_.width}, shard_.data.options());
  for (const Chunk& part : order()) {
    if (part.owner == transport_.rank()) continue;
    Chunk place = part;
    if (part.begin > own.begin) place.begin -= own.rows;
    read(part, shard_.rows_of(others, place));
  }
  return others;
}

void RowGather::multiply(const at::Tensor& out, const at::Tensor& weight, bool transposed,
                         const at::Tensor& bias, const std::string& tiles) {
  Reading reading(transport_.context(), op_, /*peer=*/-1, begun_);
  flight_->multiply({shard_.data.select(0, 0), weight, transposed, bias, out.select(0, 0), tiles});
  const int64_t others = multiplied_ ? 0 : rows_ - order().front().rows;  // they come once
  multiplied_ = true;
  reading.came(others * shard_.inner * shard_.width * shard_.data.element_size());
}

RowScatter::RowScatter(Transport& transport, Op op, const Operand& like, int64_t width, bool with_bias,
                       bool all, int pieces, const std::vector<int64_t>* some, bool stays_open)
    : transport_(transport), op_(op), like_(like), width_(width), all_(all) {
  FlightDescriptor descriptor = flight_of(op, like, like.rows, width);
  descriptor.failed_passes = transport.context().failed_passes;
  if (!stays_open) {
    inside_.emplace(transport.context(), op);
    descriptor.pass = transport.context().passes.now();
  }
  own_rows_ = rows_of_rank(like.rows, transport.world_size(), transport.rank());
  descriptor.own_rows = own_rows_;
  descriptor.with_bias = with_bias;
  descriptor.pieces = pieces;
  if (some == nullptr) {
    flight_ = transport.scatter(descriptor, all);
    return;
  }
  flight_ = transport.scatter_some(descriptor, all, *some);
  like_.rows = static_cast<int64_t>(some->size());
  own_rows_ = 0;
  for (const Chunk& chunk : order()) own_rows_ += chunk.owner == transport.rank() ? chunk.rows : 0;
}

void RowScatter::publish_all(const at::Tensor& parts) {
  for (const Chunk& chunk : order()) {
    {
      const Spending copying(transport_.context(), Entered::kCopy, name_of(op_));
      part(chunk).copy_(like_.rows_of(parts, chunk));
    }
    publish(chunk);
  }
}

at::Tensor RowScatter::empty(int64_t rows) const {
  return at::empty({like_.blocks, rows * like_.inner, width_}, like_.data.options());
}

void RowScatter::reduce_own(const at::Tensor& bias) {
  if (!all_) own_sums_ = empty(own_rows_);
  flight_->reduce(own_sums_, bias);
}

at::Tensor RowScatter::multiply(const at::Tensor& x, const at::Tensor& weight, bool transposed,
                                const at::Tensor& bias, const std::string& tiles) {
  at::Tensor out = empty(own_rows_);
  flight_->multiply({x.select(0, 0), weight, transposed, bias, out.select(0, 0), tiles});
  return out;
}

bool RowScatter::sums_have_come() const {
  const auto has_come = [&](const Chunk& chunk) { return flight_->sum_has_come(chunk); };
  return !all_ || std::ranges::all_of(flight_->sums_order(), has_come);
}

at::Tensor RowScatter::sums() {
  if (!all_) return own_sums_;
  at::Tensor all = empty(like_.rows);
  sums(all);
  return all;
}

void RowScatter::sums(const at::Tensor& out) {
  for (const Chunk& chunk : flight_->sums_order()) {
    Reading reading(transport_.context(), op_, chunk.owner, begun_);
    flight_->wait_for_sum(chunk);
    const at::Tensor sums = flight_->sum(chunk);
    if (chunk.owner != transport_.rank()) {
      reading.came(static_cast<int64_t>(sums.nbytes()), flight_->travelled(chunk));
    }
    const Spending copying(transport_.context(), Entered::kCopy, name_of(op_));
    like_.rows_of(out, chunk).copy_(sums);
  }
}

}  // namespace pyruntime
