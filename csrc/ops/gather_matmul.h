// The first of the two engines: rows are gathered, and GEMMs take them as they come. It serves the forward of
// a column linear and the backward of a row linear, and gathers without a GEMM.
//
// Every rank shows its rows; any rank reads any other's, chunk by chunk, in place. Several flights may be
// under way at once: the backward of a column linear runs one of each engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "ops/operand.h"
#include "ops/tier/route.h"
#include "transport/inside.h"

namespace pyruntime {

class GatherMatmul {
 public:
  // out [blocks, rows * inner, *] = rows @ weight^T (+ bias).
  struct Gemm {
    at::Tensor out;
    at::Tensor weight;
    at::Tensor bias = {};
  };
  // Those of all weights, whose results are new.
  static std::vector<Gemm> gemms(const Operand& like, int64_t rows, at::TensorList weights,
                                 at::TensorList biases);

  // This rank's rows leave at once. `keep_rows`: all rows will be asked for. Where the wire rounds them, the
  // GEMMs, and whoever asks for rows, get what is read, this rank's own too.
  GatherMatmul(Route route, Op op, const Operand& shard, bool keep_rows);

  // The GEMMs of all rows, every one of them; rows @ weight where it is not `transposed`.
  void multiply(const std::vector<Gemm>& gemms, bool transposed);
  // Calls `use` with each chunk of all rows as it comes, [blocks, chunk.rows * inner, width].
  void for_each_chunk(const std::function<void(const Chunk& chunk, const at::Tensor& rows)>& use);
  // All rows in order, [blocks, rows * inner, width]; the shard itself in a group of one rank.
  const at::Tensor& rows();
  // This rank's rows among all.
  const Chunk& own() const { return own_; }
  // These as all ranks read them, [blocks, own rows * inner, width].
  const at::Tensor& own_rows() const { return shard_.data; }
  // All rows but this rank's, in order, [blocks, (rows - own rows) * inner, width]. Between ranks.
  at::Tensor other_rows();
  // The rows have been read; nothing may be asked afterwards.
  void finish();

 private:
  void publish();
  void multiply_chunks(const std::vector<Gemm>& gemms, bool transposed);
  // One kernel, which waits for the rows.
  void multiply_fused(const Gemm& gemm, bool transposed);
  // Another rank's chunk as it travelled, once it is here.
  at::Tensor arrived(const Chunk& chunk);
  // The rows of one chunk where the transport has them, or, where they were rounded, in new memory.
  at::Tensor chunk(const Chunk& chunk);
  // out, in the form of the chunk's rows, = these.
  void read(const Chunk& chunk, const at::Tensor& out);
  at::Tensor empty_rows(int64_t rows) const;
  at::Tensor collect();

  Route route_;
  Op op_;
  Operand shard_;  // as all ranks read it
  bool keep_rows_;
  Chunk own_;
  at::Tensor rows_;
  bool multiplied_ = false;
  std::set<int64_t> counted_;  // where the chunks begin that have come: they are read again, and come once
  // None of these in a group of one rank, and once all rows have been copied.
  GroupContext* context_ = nullptr;
  double begun_ = 0;
  std::optional<Inside> inside_;
  std::unique_ptr<GatherFlight> flight_;
};

}  // namespace pyruntime
