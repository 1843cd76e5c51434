// The scattering engine: rows leave as their GEMM is done. What it promises: matmul_scatter.h.
#include "ops/matmul_scatter.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "ops/gemm.h"

namespace pyruntime {

MatmulScatter::MatmulScatter(Group& group, Parts parts, bool all, TierChoice choice)
    : parts_(std::move(parts)), choice_(std::move(choice)) {
  if (group.world_size() == 1) {
    sums_ = multiply_all(parts_.bias);
    return;
  }
  const Operand& rows = parts_.operands.front();
  flight_.emplace(group.transport(rows.data.device()), all ? Op::kMatmulAllReduce : Op::kMatmulReduceScatter,
                  rows, parts_.width(), parts_.bias.defined(), all, choice_.chunks);
  if (choice_.tier == Tier::kFused) {
    end_with(multiply_fused());
  } else if (choice_.tier == Tier::kUnfused) {
    flight_->publish_all(multiply_all({}));
    end_with(flight_->reduce(parts_.bias));
  } else {
    const std::vector<WeightGemm> own = parts_.products == nullptr ? gemms() : std::vector<WeightGemm>();
    const std::vector<WeightGemm>& products = parts_.products == nullptr ? own : *parts_.products;
    for (const Chunk& chunk : flight_->order()) {
      write(products, flight_->part(chunk), chunk, {});
      flight_->publish(chunk);
    }
  }
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
  for (size_t i = 0; i < gemms.size(); ++i) {
    gemms[i].write(out, parts_.operands[i].rows_of(chunk), bias, /*accumulate=*/i > 0);
  }
}

at::Tensor MatmulScatter::multiply_all(const at::Tensor& bias) const {
  const Operand& rows = parts_.operands.front();
  at::Tensor all = at::empty({rows.blocks, rows.rows * rows.inner, parts_.width()}, rows.data.options());
  write(gemms(), all, Chunk{0, 0, rows.rows}, bias);
  return all;
}

// One kernel sums one GEMM, so those of several weights are laid side by side:
// [a_1 .. a_n] @ [W_1; ..; W_n], summed in fp32 over all of them.
at::Tensor MatmulScatter::multiply_fused() {
  std::vector<at::Tensor> data;
  for (const Operand& operand : parts_.operands) data.push_back(operand.data);
  const bool single = data.size() == 1;
  return flight_->multiply(single ? data[0] : at::cat(data, -1),
                           single ? parts_.weights[0] : at::cat(parts_.weights, 0), parts_.transposed,
                           parts_.bias, choice_.tiles);
}

void MatmulScatter::end_with(at::Tensor sums) {
  sums_ = std::move(sums);
  flight_->finish();
  flight_.reset();  // its memory is free for what the op does next
}

void MatmulScatter::reduce() {
  if (sums_.defined() || reduced_) return;
  flight_->reduce_own(parts_.bias);
  reduced_ = true;
}

void MatmulScatter::reduce_if_come() {
  if (!sums_.defined() && !reduced_ && flight_->parts_have_come()) reduce();
}

at::Tensor MatmulScatter::finish() {
  reduce();
  if (!sums_.defined()) end_with(flight_->sums());
  return sums_;
}

void MatmulScatter::finish(const at::Tensor& out) {
  reduce();
  if (sums_.defined()) {
    out.copy_(sums_);
  } else {
    flight_->sums(out);
    end_with(out);
  }
}

}  // namespace pyruntime
