// The gathering engine: GEMMs on rows as they arrive. What it promises: gather_matmul.h.
#include "ops/gather_matmul.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "ops/gemm.h"

namespace pyruntime {

GatherMatmul::GatherMatmul(Group& group, Op op, const Operand& shard, int64_t rows, TierChoice choice,
                           bool keep_rows, cpu::Wire wire)
    : shard_(shard), choice_(std::move(choice)), keep_rows_(keep_rows) {
  if (group.world_size() == 1) {
    rows_ = shard.data;
    own_ = {0, 0, shard.rows};
    return;
  }
  flight_.emplace(group.transport(shard.data.device()), op, shard, rows, choice_.chunks, wire);
  own_ = flight_->order().front();
  if (choice_.tier != Tier::kUnfused) return;
  rows_ = flight_->collect();
  flight_->finish();
  flight_.reset();  // its memory is free for the GEMMs
}

void GatherMatmul::multiply(const std::vector<Gemm>& gemms, bool transposed) {
  if (gemms.empty()) return;
  if (choice_.tier == Tier::kChunked) return multiply_chunks(gemms, transposed);
  for (const Gemm& gemm : gemms) {
    if (choice_.tier == Tier::kFused) {
      flight_->multiply(gemm.out, gemm.weight, transposed, gemm.bias, choice_.tiles);
    } else {
      const int64_t count = gemm.out.size(0) * gemm.out.size(1);
      WeightGemm(gemm.weight, transposed, count).write(gemm.out, rows(), gemm.bias, /*accumulate=*/false);
    }
  }
}

void GatherMatmul::multiply_chunks(const std::vector<Gemm>& gemms, bool transposed) {
  std::vector<WeightGemm> products;
  for (const Gemm& gemm : gemms) {
    products.emplace_back(gemm.weight, transposed, gemm.out.size(0) * gemm.out.size(1));
  }
  for_each_chunk([&](const Chunk& chunk, const at::Tensor& rows) {
    for (size_t i = 0; i < gemms.size(); ++i) {
      products[i].write(shard_.rows_of(gemms[i].out, chunk), rows, gemms[i].bias, /*accumulate=*/false);
    }
  });
}

void GatherMatmul::for_each_chunk(
    const std::function<void(const Chunk& chunk, const at::Tensor& rows)>& use) {
  if (!flight_) return use({own_.owner, 0, rows_.size(1) / shard_.inner}, rows_);
  if (keep_rows_) rows_ = flight_->empty_rows();
  for (const Chunk& chunk : flight_->order()) {
    const at::Tensor rows = flight_->chunk(chunk);
    use(chunk, rows);
    if (keep_rows_) flight_->copy_chunk(rows_, chunk, rows);
  }
}

const at::Tensor& GatherMatmul::rows() {
  if (!rows_.defined()) rows_ = flight_->collect();
  return rows_;
}

}  // namespace pyruntime
