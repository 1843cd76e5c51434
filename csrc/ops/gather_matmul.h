// The gathering engine, the first of two: gathers rows, and GEMMs take them as they arrive. It serves the
// forward of a column linear and the backward of a row linear, and gathers without a GEMM.
//
// Every rank offers its rows, and any rank reads any other's in place, chunk by chunk. Several flights may be
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

// How long all rows will be read: not beyond their chunks; at any time; or only before finish(), by a caller
// that keeps nothing. Rows on devices that lie in order in the transport's memory are lent there.
enum class RowsAre { kPassing, kKept, kLent };

class GatherMatmul {
 public:
  // out [blocks, rows * inner, *] = rows @ weight^T (+ bias).
  struct Gemm {
    at::Tensor out;
    at::Tensor weight;
    at::Tensor bias = {};
  };
  // The GEMMs of all weights, with new outputs.
  static std::vector<Gemm> gemms(const Operand& like, int64_t rows, at::TensorList weights,
                                 at::TensorList biases);

  // Publishes this rank's rows at once. `rows`: how rows() will be read. If the wire rounds rows, the
  // GEMMs and rows() get the rounded values, also of this rank's own rows.
  GatherMatmul(Route route, Op op, const Operand& shard, RowsAre rows);

  // Multiplies all rows by every weight; without `transposed` rows @ weight.
  void multiply(const std::vector<Gemm>& gemms, bool transposed);
  // Calls `use` with each chunk of all rows as it arrives, [blocks, chunk.rows * inner, width].
  void for_each_chunk(const std::function<void(const Chunk& chunk, const at::Tensor& rows)>& use);
  // Calls `use` with the parts of one chunk, whatever the pieces in which they come.
  void for_each_in(const Chunk& wanted,
                   const std::function<void(const Chunk& part, const at::Tensor& rows)>& use);
  // All rows in order, [blocks, rows * inner, width]; the shard itself in a group of one rank.
  const at::Tensor& rows();
  // Lets rows() lie in that memory, if they need memory of their own; only before the first chunk is read.
  void keep_in(std::function<at::Tensor()> memory) { memory_ = std::move(memory); }
  // This rank's place among all rows.
  const Chunk& own() const { return own_; }
  // This rank's rows as all ranks read them, [blocks, own rows * inner, width].
  const at::Tensor& own_rows() const { return shard_.data; }
  // All rows but this rank's, in order, [blocks, (rows - own rows) * inner, width]; for several ranks.
  at::Tensor other_rows();
  // Ends the flight: the rows have been read, and nothing may be called afterwards.
  void finish();

 private:
  void publish();
  void multiply_chunks(const std::vector<Gemm>& gemms, bool transposed);
  // Multiplies in one kernel, which waits for the rows.
  void multiply_fused(const Gemm& gemm, bool transposed);
  // Another rank's chunk as it travelled, once it is here.
  at::Tensor arrived(const Chunk& chunk);
  // The rows of one chunk in the transport's memory or, if they were rounded, in new memory.
  at::Tensor chunk(const Chunk& chunk);
  // Reads the chunk's rows into `out`, which has their form.
  void read(const Chunk& chunk, const at::Tensor& out);
  at::Tensor empty_rows(int64_t rows) const;
  // All rows in the transport's memory, arrived or not; undefined if they do not lie there in order, or not
  // in their dtype.
  at::Tensor in_order() const;
  // The same, if they may be lent.
  at::Tensor lent() const;
  // Waits for all chunks of other ranks that have not been counted yet.
  void wait_for_all();
  at::Tensor collect();

  Route route_;
  Op op_;
  Operand shard_;  // as all ranks read it
  RowsAre rows_are_;
  Chunk own_;
  at::Tensor rows_;
  std::function<at::Tensor()> memory_;  // see keep_in()
  bool multiplied_ = false;
  std::set<int64_t> counted_;  // first rows of chunks already counted, so none counts twice
  // Empty in a group of one rank, and once all rows have been copied.
  GroupContext* context_ = nullptr;
  double begun_ = 0;
  std::optional<Inside> inside_;
  std::unique_ptr<GatherFlight> flight_;
};

}  // namespace pyruntime
