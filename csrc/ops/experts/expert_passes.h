// The passes of an operator of experts: rows are gathered or dealt, the experts of this rank multiply theirs,
// and what they make of a row is summed. On CPUs an expert takes its rows chunk by chunk, as they arrive. On
// devices all experts take all rows in one launch each, but for an expert's GEMMs: a launch for each expert
// and chunk would take longer than all products.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/chunk_plan.h"
#include "ops/experts/dealt_routes.h"
#include "ops/experts/expert_rows.h"
#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/line_exchange.h"
#include "ops/matmul_scatter.h"
#include "ops/operand.h"
#include "ops/tier/route.h"

namespace pyruntime {

// Rows that are computed together: on a CPU an expert's rows in `range`, or all its places if these are all
// its rows; on a device all places of all experts.
struct Share {
  int64_t first, experts;
  ExpertRows::Run run;
  Chunk range;
};

// Calls `use` with each expert of `share` that has places, and these, counted from the share's first.
void for_each_expert(const ExpertRows& routed, const Share& share,
                     const std::function<void(int64_t expert, const ExpertRows::Run& own)>& use);

// Shares that together are all rows of all experts.
std::vector<Share> all_shares(const ExpertRows& routed, int64_t rows, c10::Device device);

// Gives the memory of a share's results, [share.run.count, *].
using Memory = std::function<at::Tensor()>;

// rows @ matrix^T [+ bias] if `transposed`, else rows @ matrix, for the matrices of this rank's experts. Each
// is arranged when its first rows come, and dropped after its last.
class ExpertGemms {
 public:
  ExpertGemms(const at::Tensor& matrices, bool transposed, const ExpertRows& routed,
              const at::Tensor& biases = {});

  // Returns the products of the share's rows: in `out`, or if one launch multiplies for all experts, in
  // memory of its own.
  at::Tensor multiply(const Share& share, const at::Tensor& rows, const Memory& out);

 private:
  // rows: those of some chunks, or all places of the expert.
  void write(int64_t expert, const at::Tensor& out, const at::Tensor& rows);

  at::Tensor matrices_, biases_;
  bool transposed_, at_once_;
  const ExpertRows& routed_;
  std::vector<std::optional<WeightGemm>> gemms_;
  std::vector<int64_t> done_;
};

// Computes for each row the sum of its results over this rank's experts.
class SumsOfExperts {
 public:
  // Returns what experts make of their rows, [share.run.count, D], in `out` or, on a device, in other memory.
  using Compute = std::function<at::Tensor(const Share& share, const Memory& out)>;

  // matrices: the experts' first ones, which decide how many rows a CPU computes at once.
  SumsOfExperts(const Route& route, const Operand& x, const ExpertRows& routed, const at::Tensor& matrices,
                Compute compute);

  // Computes all rows, before a scatter asks for them.
  void make_all();
  // Writes the sums of some rows, which are all that have an expert here. On a device.
  void write_rows(const at::Tensor& rows, const at::Tensor& out);
  // For a MatmulScatter that is constructed while this lives.
  MatmulScatter::Parts parts();

 private:
  // On CPUs half of the own rows come first, as they wait for nobody; the others last, while sums travel.
  void begin(const std::vector<Chunk>& order);
  void write(const at::Tensor& out, const Chunk& chunk);
  // On a CPU: what is not made yet of these rows.
  void make(int64_t begin, int64_t end);
  void compute(const Share& share);
  const at::Tensor& made();

  const ExpertRows& routed_;
  Operand form_;  // of all rows
  Chunk own_;
  int64_t at_once_;  // rows of all ranks that a CPU computes at once
  Compute compute_;
  std::vector<Chunk> order_;
  at::Tensor made_;  // [routed rows, D], in their order; see made()
  bool all_are_made_ = false;
  std::vector<bool> is_made_;  // of all rows, on a CPU
};

// The sums over ranks, on their way to the rows' owners, or to all ranks if rows are not cut.
class SumsOfRanks {
 public:
  // Computes, and sends what is computed. dealt: null if parts of all rows are scattered.
  SumsOfRanks(const Route& route, const Operand& x, bool cut, std::shared_ptr<DealtRoutes> dealt,
              SumsOfExperts& sums);

  // Sums beside what the caller's stream gets from now on, if that can be.
  void reduce_beside();
  // The sums of this rank's rows, or of all if they are not cut, [rows, D].
  at::Tensor finish();

 private:
  std::shared_ptr<DealtRoutes> dealt_;
  std::optional<MatmulScatter> scatter_;
  std::optional<LineDeal> deal_;
};

// Rows of all ranks for the experts of this one: dealt, or gathered if they are cut, else this rank's.
class AllRows {
 public:
  AllRows(const Route& route, const Operand& rows, bool cut, std::shared_ptr<DealtRoutes> dealt);

  // Copies the rows of `share` to `out`.
  void copy(const ExpertRows& routed, const Share& share, const at::Tensor& out);
  void finish();

 private:
  Operand rows_;
  std::shared_ptr<DealtRoutes> dealt_;
  std::optional<GatherMatmul> gather_;
  std::optional<LineDeal> deal_;
};

}  // namespace pyruntime
