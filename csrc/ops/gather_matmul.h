// The first of the two engines: rows are gathered, and GEMMs take them as they come. It serves the forward of
// a column linear and the backward of a row linear.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "ops/operand.h"
#include "ops/row_exchange.h"
#include "ops/tier.h"

namespace pyruntime {

class GatherMatmul {
 public:
  // out [blocks, rows * inner, *] = rows @ weight^T (+ bias).
  struct Gemm {
    at::Tensor out;
    at::Tensor weight;
    at::Tensor bias = {};
  };

  // This rank's rows leave at once. `keep_rows`: all rows will be asked for. `wire`: what they travel as, of
  // which the GEMMs, and whoever asks for rows, get what is read.
  GatherMatmul(Group& group, Op op, const Operand& shard, int64_t rows, TierChoice choice, bool keep_rows,
               cpu::Wire wire = {});

  // The GEMMs of all rows, every one of them; rows @ weight where it is not `transposed`.
  void multiply(const std::vector<Gemm>& gemms, bool transposed);
  // Calls `use` with each chunk of all rows as it comes, [blocks, chunk.rows * inner, width].
  void for_each_chunk(const std::function<void(const Chunk& chunk, const at::Tensor& rows)>& use);
  // All rows in order, [blocks, rows * inner, width]; the shard itself in a group of one rank.
  const at::Tensor& rows();
  // This rank's rows among all.
  const Chunk& own() const { return own_; }
  // These, [blocks, own rows * inner, width]. Between ranks.
  at::Tensor own_rows() { return flight_->chunk(own_); }
  // All rows but this rank's, [blocks, (rows - own rows) * inner, width]. Between ranks.
  at::Tensor other_rows() { return flight_->collect_others(); }
  // The rows have been read; nothing may be asked afterwards.
  void finish() {
    if (flight_) flight_->finish();
  }

 private:
  void multiply_chunks(const std::vector<Gemm>& gemms, bool transposed);

  Operand shard_;
  TierChoice choice_;
  bool keep_rows_;
  Chunk own_;
  at::Tensor rows_;
  std::optional<RowGather> flight_;  // none in a group of one rank, and once all rows have been copied
};

}  // namespace pyruntime
