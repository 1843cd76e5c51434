// The two movements of rows on which every primitive stands, one flight each.
//
// RowGather: every rank shows its rows; any rank reads any other's, chunk by chunk, in place.
// RowScatter: every rank writes its part of all rows; each owner sums its own rows over the ranks.
//
// Both may be in flight at once, several times over: the backward of a column linear runs one of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/chunk_plan.h"
#include "cpu/compression/wire.h"
#include "ops/operand.h"
#include "transport/group.h"
#include "transport/inside.h"

namespace pyruntime {

// `rows` as given, or, where it is kUnknownRows, the sum of what the ranks hold. Raises ValueError on every
// rank when the ranks' shares are not those of torch.tensor_split.
int64_t agreed_rows(Group& group, const Operand& x_shard, int64_t rows);

// What rows like these travel as between the ranks of the group, by name. Raises ValueError as Wire::named()
// does, and where one rank alone would round them.
cpu::Wire wire_named(c10::string_view format, const Operand& rows, const Group& group);

class RowGather {
 public:
  // Copies this rank's rows into its workspace and publishes them. `pieces`: FlightDescriptor::pieces.
  // `wire`: what they travel as, in which all ranks agree; this rank reads its own as the others do.
  RowGather(Transport& transport, Op op, const Operand& x_shard, int64_t rows, int pieces = 0,
            cpu::Wire wire = {});

  // The chunks in the order in which they are expected.
  const std::vector<Chunk>& order() const { return flight_->order(); }
  // The rows of one chunk, [blocks, chunk.rows * inner, width], where the transport has them, or, where they
  // were rounded, in new memory; waits for them.
  at::Tensor chunk(const Chunk& chunk);
  // All rows in order, [blocks, rows * inner, width], in new memory; or chunk by chunk, beside other work.
  at::Tensor collect();
  at::Tensor empty_rows() const;
  void copy_chunk(const at::Tensor& all, const Chunk& chunk, const at::Tensor& rows) const;
  // All rows but this rank's own, in order, [blocks, (rows - own rows) * inner, width], in new memory.
  at::Tensor collect_others();
  // out [1, rows * inner, N] = all rows @ weight^T (+ bias), or @ weight where it is not transposed: one
  // kernel, which waits for the rows. Only where Transport::why_not_fused() is empty. `tiles`:
  // FusedGemm::tiles.
  void multiply(const at::Tensor& out, const at::Tensor& weight, bool transposed, const at::Tensor& bias,
                const std::string& tiles);
  void finish() {
    inside_.check();
    flight_->finish();
  }

 private:
  // Another rank's chunk as it travelled, once it is here.
  at::Tensor arrived(const Chunk& chunk);
  // out, in the form of the chunk's rows, = these.
  void read(const Chunk& chunk, const at::Tensor& out);

  Inside inside_;
  Transport& transport_;
  Op op_;
  double begun_ = monotonic_seconds();
  Operand shard_;  // as all ranks read it
  int64_t rows_;
  cpu::Wire wire_;
  bool multiplied_ = false;
  std::set<int64_t> counted_;  // where the chunks begin that have come: they are read again, and come once
  std::unique_ptr<GatherFlight> flight_;
};

class RowScatter {
 public:
  // `like` gives the form of the rows: blocks, inner and the number of rows; `width` and its dtype those of
  // the GEMM; `with_bias` whether reduce() will be given one, in which all ranks must agree; `all` whether
  // every rank gets all sums, not those of its rows; `pieces`: FlightDescriptor::pieces; `some`: the rows
  // that travel, where these are not all (Transport::scatter_some), and of which there are sums;
  // `stays_open`: others of the group may begin and end meanwhile, in whichever thread and pass.
  RowScatter(Transport& transport, Op op, const Operand& like, int64_t width, bool with_bias, bool all,
             int pieces = 0, const std::vector<int64_t>* some = nullptr, bool stays_open = false);

  // The chunks in the order in which the others wait for them.
  const std::vector<Chunk>& order() const { return flight_->order(); }
  // Where this rank writes its part of the chunk, [blocks, chunk.rows * inner, width].
  at::Tensor part(const Chunk& chunk) { return flight_->part(chunk); }
  // The part of that chunk is written; it may leave.
  void publish(const Chunk& chunk) { flight_->publish(chunk); }
  // All parts at once, of all rows [blocks, rows * inner, width].
  void publish_all(const at::Tensor& parts);
  // This rank's rows summed over all ranks, [blocks, own rows * inner, width], or, where `all`, all rows,
  // those of the others as these have summed them; in new memory. bias [width] is added once.
  at::Tensor reduce(const at::Tensor& bias) {
    reduce_own(bias);
    return sums();
  }
  // The same in two steps, each of which waits for the others.
  void reduce_own(const at::Tensor& bias);
  at::Tensor sums();
  // Those of all rows into `out`, which has their form.
  void sums(const at::Tensor& out);
  // Whether reduce_own() or sums() would not wait; false also where that cannot be told.
  bool parts_have_come() const { return flight_->parts_have_come(); }
  bool sums_have_come() const;
  // Those of this rank's rows in one kernel, instead of part(), publish() and reduce(), of the parts x [1,
  // rows * inner, K] @ weight^T, or @ weight where it is not transposed. Only where
  // Transport::why_not_fused() is empty.
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, bool transposed, const at::Tensor& bias,
                      const std::string& tiles);
  void finish() {
    if (inside_) inside_->check();
    flight_->finish();
  }

 private:
  at::Tensor empty(int64_t rows) const;

  std::optional<Inside> inside_;  // unless it stays open
  Transport& transport_;
  Op op_;
  double begun_ = monotonic_seconds();
  Operand like_;
  int64_t width_;
  int64_t own_rows_;
  bool all_;
  at::Tensor own_sums_;  // unless all_
  std::unique_ptr<ScatterFlight> flight_;
};

}  // namespace pyruntime
