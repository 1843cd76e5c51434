// The scattering engine: rows leave as their GEMM is done. See matmul_scatter.h.
#include "ops/matmul_scatter.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <string>
#include <utility>

#include "transport/device_sharing.h"

namespace pyruntime {

MatmulScatter::MatmulScatter(const Route& route, Parts parts, bool all)
    : parts_(std::move(parts)), all_(all), own_rows_(route.own_rows()) {
  if (route.group.world_size() == 1) {
    sums_ = multiply_all(parts_.bias);
    return;
  }
  begin(route.group.transport(parts_.operands.front().data.device()), route.tier.chunks);
  if (route.tier.tier == Tier::kFused) {
    end_with(multiply_fused(route.tier.tiles));
  } else if (route.tier.tier == Tier::kUnfused) {
    publish_all(multiply_all({}), route.together);
    finish();
  } else {
    publish_chunks(route.together);
  }
}

void MatmulScatter::begin(Transport& transport, int pieces) {
  const Operand& rows = parts_.operands.front();
  if (parts_.is_given()) {
    op_ = all_ ? Op::kAllReduce : Op::kReduceScatter;
  } else {
    op_ = all_ ? Op::kMatmulAllReduce : Op::kMatmulReduceScatter;
  }
  context_ = &transport.context();
  begun_ = begin_of_op(rows.data.device());
  inside_.emplace(*context_, op_);
  FlightDescriptor descriptor = rows.flight(op_, rows.rows, parts_.width());
  descriptor.own_rows = own_rows_;
  descriptor.with_bias = parts_.bias.defined();
  descriptor.pieces = pieces;
  descriptor.pass = context_->passes.now();
  descriptor.failed_passes = context_->failed_passes;
  flight_ = transport.scatter(descriptor, all_);
}

std::vector<WeightGemm> MatmulScatter::gemms() const {
  const Operand& rows = parts_.operands.front();
  std::vector<WeightGemm> gemms;
  for (const at::Tensor& weight : parts_.weights) {
    gemms.emplace_back(weight, parts_.transposed, rows.blocks * rows.rows * rows.inner);
  }
  return gemms;
}

void MatmulScatter::write(const std::vector<WeightGemm>& gemms, const at::Tensor& out, const Chunk& chunk,
                          const at::Tensor& bias) const {
  if (parts_.compute) return parts_.compute(out, chunk);
  for (size_t i = 0; i < gemms.size(); ++i) {
    gemms[i].write(out, parts_.operands[i].rows_of(chunk), bias, /*accumulate=*/i > 0);
  }
}

at::Tensor MatmulScatter::multiply_all(const at::Tensor& bias) const {
  const Operand& rows = parts_.operands.front();
  if (parts_.is_given()) return rows.data;
  at::Tensor all = empty(rows.rows);
  write(gemms(), all, Chunk{0, 0, rows.rows}, bias);
  return all;
}

std::vector<JoinedChunk> MatmulScatter::runs(bool together) const {
  const c10::Device device = parts_.operands.front().data.device();
  return joined_on(together ? device : c10::kCPU, flight_->order(),
                   [&](const Chunk& chunk) { return flight_->part(chunk); });
}

void MatmulScatter::publish_all(const at::Tensor& parts, bool together) {
  for (const JoinedChunk& run : runs(together)) {
    {
      const Spending copying(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, parts.device());
      flight_->part(run.lines).copy_(parts_.operands.front().rows_of(parts, run.lines));
    }
    flight_->publish_together(run.chunks);
  }
}

void MatmulScatter::publish_chunks(bool together) {
  const std::vector<WeightGemm> own = parts_.products == nullptr ? gemms() : std::vector<WeightGemm>();
  const std::vector<WeightGemm>& products = parts_.products == nullptr ? own : *parts_.products;
  if (parts_.prepare) parts_.prepare(flight_->order());
  for (const JoinedChunk& run : runs(together)) {
    write(products, flight_->part(run.lines), run.lines, {});
    flight_->publish_together(run.chunks);
  }
}

// One kernel sums one GEMM, so the GEMMs of several weights are joined: [a_1 .. a_n] @ [W_1; ..; W_n], summed
// in fp32 over all of them.
at::Tensor MatmulScatter::multiply_fused(const std::string& tiles) {
  std::vector<at::Tensor> data;
  for (const Operand& operand : parts_.operands) data.push_back(operand.data);
  const bool single = data.size() == 1;
  at::Tensor out = empty(own_rows_);
  flight_->multiply({(single ? data[0] : at::cat(data, -1)).select(0, 0),
                     single ? parts_.weights[0] : at::cat(parts_.weights, 0), parts_.transposed, parts_.bias,
                     out.select(0, 0), tiles});
  return out;
}

at::Tensor MatmulScatter::empty(int64_t rows) const {
  const Operand& like = parts_.operands.front();
  return at::empty({like.blocks, rows * like.inner, parts_.width()}, like.data.options());
}

void MatmulScatter::end_with(at::Tensor sums) {
  sums_ = std::move(sums);
  inside_->check();
  flight_->finish();
  flight_.reset();  // its memory is free for the rest of the op
  inside_.reset();
}

void MatmulScatter::reduce() {
  if (sums_.defined() || std::exchange(reduced_, true)) return;
  if (!all_) own_sums_ = empty(own_rows_);
  flight_->reduce(own_sums_, parts_.bias);
}

void MatmulScatter::reduce_beside() {
  if (sums_.defined() || reduced_ || !flight_->can_reduce_beside()) return;
  reduced_ = true;
  own_sums_ = empty(own_rows_);
  flight_->reduce_beside(own_sums_, parts_.bias);
}

void MatmulScatter::reduce_if_come() {
  if (!sums_.defined() && !reduced_ && flight_->parts_have_come()) reduce();
}

at::Tensor MatmulScatter::finish() {
  reduce();
  if (!sums_.defined() && all_) {
    finish(empty(parts_.operands.front().rows));
  } else if (!sums_.defined()) {
    end_with(own_sums_);
  }
  return sums_;
}

void MatmulScatter::finish(const at::Tensor& out) {
  reduce();
  if (sums_.defined()) {
    out.copy_(sums_);
  } else {
    take_sums(*flight_, *context_, op_, begun_, out, parts_.operands.front().inner);
    end_with(out);
  }
}

}  // namespace pyruntime
