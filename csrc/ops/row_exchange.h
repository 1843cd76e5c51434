// The two movements of rows on which every primitive stands, one flight each.
//
// RowGather: every rank shows its rows; any rank reads any other's, chunk by chunk, in place.
// RowScatter: every rank writes its part of all rows; each owner sums its own rows over the ranks.
//
// Both may be in flight at once, several times over: the backward of a column linear runs one of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "core/chunk_plan.h"
#include "ops/operand.h"
#include "transport/group.h"

namespace pyruntime {

// `rows` as given, or, where it is kUnknownRows, the sum of what the ranks hold. Raises ValueError on every
// rank when the ranks' shares are not those of torch.tensor_split.
int64_t agreed_rows(Group& group, Transport& transport, const Operand& x_shard, int64_t rows);

// Why no fused kernel can be asked for such rows, as RowGather or RowScatter take them; empty where one can.
// The same on all ranks.
std::string why_not_fused(const Transport& transport, Op op, const Operand& operand, int64_t rows,
                          int64_t width);

class RowGather {
 public:
  // Copies this rank's rows into its workspace and publishes them. `pieces`: FlightDescriptor::pieces.
  RowGather(Transport& transport, Op op, const Operand& x_shard, int64_t rows, int pieces = 0);

  // The chunks in the order in which they are expected.
  const std::vector<Chunk>& order() const { return flight_->order(); }
  // The rows of one chunk where the transport has them, [blocks, chunk.rows * inner, width]; waits for them.
  at::Tensor chunk(const Chunk& chunk);
  // All rows in order, [blocks, rows * inner, width], in new memory.
  at::Tensor collect();
  // All rows but this rank's own, in order, [blocks, (rows - own rows) * inner, width], in new memory.
  at::Tensor collect_others();
  // The same rows of a tensor of the form [blocks, rows * inner, *], contiguous or not.
  at::Tensor others_of(const at::Tensor& all) const;
  // out [1, rows * inner, N] = all rows @ weight^T (+ bias), or @ weight where it is not transposed: one
  // kernel, which waits for the rows. Only where why_not_fused() is empty.
  // `tiles`: FusedProduct::tiles.
  void multiply(const at::Tensor& out, const at::Tensor& weight, bool transposed, const at::Tensor& bias,
                const std::string& tiles);
  void finish() { flight_->finish(); }

 private:
  Transport& transport_;
  Operand shard_;
  int64_t rows_;
  bool multiplied_ = false;
  std::unique_ptr<GatherFlight> flight_;
};

class RowScatter {
 public:
  // `like` gives the form of the rows: blocks, inner and the number of rows; `width` and its dtype those of
  // the product; `with_bias` whether reduce() will be given one, in which all ranks must agree; `all`
  // whether reduce_all() will be asked for instead of reduce(); `pieces`: FlightDescriptor::pieces.
  RowScatter(Transport& transport, Op op, const Operand& like, int64_t width, bool with_bias, bool all,
             int pieces = 0);

  // The chunks in the order in which the others wait for them.
  const std::vector<Chunk>& order() const { return flight_->order(); }
  int64_t own_rows() const { return own_rows_; }
  // Where this rank writes its part of the chunk, [blocks, chunk.rows * inner, width].
  at::Tensor part(const Chunk& chunk) { return flight_->part(chunk); }
  // The part of that chunk is written; it may leave.
  void publish(const Chunk& chunk) { flight_->publish(chunk); }
  // This rank's rows summed over all ranks, [blocks, own rows * inner, width], in new memory; bias [width] is
  // added once.
  at::Tensor reduce(const at::Tensor& bias);
  // The same in one kernel, instead of part(), publish() and reduce(), of the parts x [1, rows * inner, K] @
  // weight^T, or @ weight where it is not transposed. Only where why_not_fused() is empty.
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, bool transposed, const at::Tensor& bias,
                      const std::string& tiles);
  // All rows summed over all ranks, [blocks, rows * inner, width]: reduces the own rows and reads the others'
  // sums.
  at::Tensor reduce_all(const at::Tensor& bias);
  // reduce_all() in two steps, each of which waits for the others.
  void reduce_for_all(const at::Tensor& bias) { flight_->reduce({}, bias); }
  at::Tensor collect_sums();
  // Whether reduce(), reduce_for_all() or collect_sums() would not wait; false also where that cannot be
  // told.
  bool parts_have_come() const { return flight_->parts_have_come(); }
  bool sums_have_come() const;
  void finish() { flight_->finish(); }

 private:
  Transport& transport_;
  int64_t blocks_;
  int64_t inner_;
  int64_t width_;
  int64_t rows_;
  int64_t own_rows_;
  at::TensorOptions options_;
  std::unique_ptr<ScatterFlight> flight_;
};

}  // namespace pyruntime
