// The language-model head with its loss: logits are multiplied, reduced to losses and their gradients, and
// multiplied with both operands, some rows at a time. So only the logits of these rows are ever in memory.
//
//   L_c = gather(X_c) @ W_r^T               W_r [V_r, K]: this rank's part of the vocabulary
//   loss_c, lse_c                           from the statistics of all ranks (cpu/layers/cross_entropy.cpp)
//   dL_c = scale_c dloss_c / dL_c           over the logits
//   dX_c = scatter(sum over ranks of dL_c @ W_r)
//   dW_r = sum over chunks c of dL_c^T @ gather(X_c)
//
// Gradients are computed here, because a backward pass would have to multiply the logits again. A chunk holds
// equally many rows of every rank. The rows of chunk c + 1 and the statistics of chunk c travel while other
// chunks are multiplied: the gradient of a chunk follows the logits of the next one. Its dX travels under its
// part of dW.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <memory>
#include <string>

#include "cpu/layers/cross_entropy.h"
#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/matmul_scatter.h"
#include "ops/operators.h"

namespace pyruntime {

namespace {

constexpr const char* kOp = "linear_cross_entropy";

struct Head {
  Group* group;  // null: one rank
  at::Tensor weight;
  int64_t vocab_start, vocab_size, ignore_index;
  double z_loss;
  c10::string_view group_name, tier, wire;

  int ranks() const { return group == nullptr ? 1 : group->world_size(); }
};

// The rows of all ranks in one chunk. Logits are multiplied and gradients computed in between the calls of
// other chunks.
class HeadChunk {
 public:
  // x_own: this rank's rows of the chunk; labels and scale: of all ranks' rows, which are `rows`. The rows
  // leave at once.
  HeadChunk(const Head& head, const at::Tensor& x_own, int64_t rows, at::Tensor labels, at::Tensor scale,
            bool keeps_rows)
      : head_(head), labels_(std::move(labels)), scale_(std::move(scale)), x_(x_own) {
    if (head.group == nullptr) return;
    const Operand x = Operand::of(x_own, 0, "x_shard");
    gather_ = std::make_unique<GatherMatmul>(route("all_gather_matmul", x, rows), Op::kAllGatherMatmul, x,
                                             keeps_rows ? RowsAre::kKept : RowsAre::kPassing);
    keeps_rows_ = keeps_rows;
  }

  // Writes the logits to `memory` [at least rows, V_r], and sends their statistics.
  void multiply(const at::Tensor& memory) {
    logits_ = memory.narrow(0, 0, labels_.size(0));
    const at::Tensor out = logits_.unsqueeze(0);
    if (gather_ == nullptr) {
      WeightGemm(head_.weight, /*transposed=*/true, x_.size(0)).write(out, x_.unsqueeze(0), {}, false);
    } else {
      gather_->multiply({{out, head_.weight}}, /*transposed=*/true);
      if (keeps_rows_) x_ = as_matrix(gather_->rows());
      gather_->finish();
      gather_.reset();
    }
    stats_ = layers::call_cross_entropy_stats(logits_, labels_, head_.vocab_start);
    if (head_.group == nullptr) return;
    const Operand mine = Operand::of(stats_.view({1, -1}), 0, "statistics");
    const Route whole{*head_.group, head_.ranks(), {Tier::kUnfused}};
    gather_ = std::make_unique<GatherMatmul>(whole, Op::kAllGather, mine, RowsAre::kKept);
  }

  // Returns the losses. With `writes_gradient` it also writes the logits' gradient over them.
  at::Tensor losses(bool writes_gradient) {
    if (gather_ != nullptr) {
      stats_ = gather_->rows();
      gather_->finish();
      gather_.reset();
    }
    auto [losses, lse] =
        layers::call_cross_entropy_loss(logits_, labels_, stats_.view({head_.ranks(), labels_.size(0), 3}),
                                        head_.vocab_start, head_.vocab_size, head_.ignore_index);
    at::Tensor of_lse;
    if (head_.z_loss != 0) {
      const at::Tensor ignored = labels_.eq(head_.ignore_index);
      losses = losses + (lse.square() * head_.z_loss).masked_fill(ignored, 0);
      of_lse = (lse * scale_ * (2 * head_.z_loss)).masked_fill(ignored, 0);
    }
    if (writes_gradient) {
      layers::write_cross_entropy_gradient(logits_, labels_, lse, scale_, of_lse, head_.vocab_start,
                                           head_.ignore_index);
    }
    return losses;
  }

  // Writes this rank's rows of dX = dL @ W; adds dL^T @ X to dw or, for the first chunk, writes it. Both
  // may be undefined. The logits have been overwritten with dL.
  void multiply_gradient(const at::Tensor& dx_own, const at::Tensor& dw, bool is_first) const {
    std::optional<MatmulScatter> scatter;
    if (dx_own.defined() && head_.group != nullptr) {
      const Operand dl = Operand::of(logits_, 0, "gradient");
      scatter.emplace(route("all_gather_matmul_backward", dl, {}),
                      MatmulScatter::Parts{{dl}, {head_.weight}, /*transposed=*/false}, /*all=*/false);
    } else if (dx_own.defined()) {
      WeightGemm(head_.weight, /*transposed=*/false, logits_.size(0))
          .write(dx_own.unsqueeze(0), logits_.unsqueeze(0), {}, false);
    }
    if (dw.defined()) {
      WeightGradientGemm(logits_, x_.contiguous()).write(dw, 0, /*accumulate=*/!is_first);
    }
    if (scatter) dx_own.copy_(as_matrix(scatter->finish()));
  }

 private:
  Route route(const char* op, const Operand& x, std::optional<int64_t> rows) const {
    return choose_route({.op = op,
                         .x = x,
                         .n = head_.weight.size(0),
                         .k = head_.weight.size(1),
                         .group = head_.group_name,
                         .tier = head_.tier,
                         .rows = rows,
                         .wire = head_.wire,
                         .under_other_work = true});
  }

  const Head& head_;
  at::Tensor labels_, scale_, x_, logits_, stats_;
  bool keeps_rows_ = true;
  std::unique_ptr<GatherMatmul> gather_;  // of the rows, then of the statistics
};

// A plan that cuts the rows: chunk c has rows [begin(c), begin(c + 1)) of each rank's. Chunks are even, so
// that a bf16 GEMM pairs the same rows for any number of chunks, and of nearly one size, so that none is too
// small for our GEMM.
struct HeadRows {
  int64_t all;
  int ranks, rank;
  int64_t most;  // rows of one rank in a chunk; one more if it is odd

  int64_t own(int r) const { return rows_of_rank(all, ranks, r); }
  int64_t chunks() const { return std::max<int64_t>(1, (own(0) + most - 1) / most); }
  int64_t begin(int64_t chunk) const { return std::min(own(0), (own(0) + 1) / 2 * chunk / chunks() * 2); }
  int64_t in_chunk(int r, int64_t chunk) const { return std::min(own(r), begin(chunk + 1)) - begin(chunk); }
  int64_t of_chunk(int64_t chunk) const {
    int64_t rows = 0;
    for (int r = 0; r < ranks; ++r) rows += in_chunk(r, chunk);
    return rows;
  }
  int64_t largest() const {
    int64_t rows = 0;
    for (int64_t chunk = 0; chunk < chunks(); ++chunk) rows = std::max(rows, of_chunk(chunk));
    return rows;
  }
  // Views of the chunk's rows in `values` [all], one for each rank.
  Tensors of_chunk(const at::Tensor& values, int64_t chunk) const {
    Tensors parts;
    int64_t first = 0;
    for (int r = 0; r < ranks; first += own(r++)) {
      parts.push_back(values.narrow(0, first + begin(chunk), in_chunk(r, chunk)));
    }
    return parts;
  }
  at::Tensor gathered(const at::Tensor& values, int64_t chunk) const {
    return ranks == 1 ? of_chunk(values, chunk).front() : at::cat(of_chunk(values, chunk));
  }
};

void check(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& scale, const HeadRows& rows) {
  TORCH_CHECK_VALUE(labels.dim() == 1 && scale.sizes() == labels.sizes(), kOp, ": labels have shape ",
                    labels.sizes(), " and their weights ", scale.sizes(),
                    "; both must be [rows], for the rows of all ranks.");
  TORCH_CHECK_VALUE(x.size(0) == rows.own(rows.rank), kOp, ": x has ", x.size(0), " rows on rank ", rows.rank,
                    " of ", rows.ranks, "; of the ", rows.all, " rows that have labels, it must have ",
                    rows.own(rows.rank), ", as torch.tensor_split cuts them.");
  TORCH_CHECK_TYPE(scale.scalar_type() == (x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat), kOp,
                   ": the weights of the labels are ", scale.scalar_type(), " for x of dtype ",
                   x.scalar_type(), "; they must be float32, for float64 x float64.");
}

// Returns [losses of all rows] + [dX of this rank's rows if need_dx] + [dW if need_dw]. The gradients are
// those of sum(scale * losses); dW is fp32 for narrower operands, not rounded.
Tensors linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& labels,
                             const at::Tensor& scale, c10::string_view group, int64_t vocab_start,
                             int64_t vocab_size, int64_t ignore_index, double z_loss, int64_t chunk_rows,
                             bool need_dx, bool need_dw, c10::string_view tier, c10::string_view wire) {
  const Operand operand = Operand::of_linear(kOp, x, 0, "x", {weight}, {at::Tensor()});
  const c10::DeviceGuard on(x.device());
  const Head head{
      group_of_sums(group), weight, vocab_start, vocab_size, ignore_index, z_loss, group, tier, wire};
  TORCH_CHECK_VALUE(chunk_rows > 0, kOp, " was given chunk_rows=", chunk_rows, "; pass at least 1.");
  const HeadRows rows{labels.size(0), head.ranks(), head.group == nullptr ? 0 : head.group->rank(),
                      (chunk_rows + head.ranks() - 1) / head.ranks()};
  check(x, labels, scale, rows);
  const at::Tensor own = as_matrix(operand.data);
  const at::ScalarType wide = scale.scalar_type();
  const at::Tensor losses = at::empty(labels.sizes(), scale.options());
  at::Tensor dx, dw;
  if (need_dx) dx = at::empty(x.sizes(), x.options());
  if (need_dw) dw = at::empty(weight.sizes(), weight.options().dtype(wide));

  const auto begin = [&](int64_t chunk) {
    const at::Tensor rows_of_own = own.narrow(0, rows.begin(chunk), rows.in_chunk(rows.rank, chunk));
    return std::make_unique<HeadChunk>(head, rows_of_own, rows.of_chunk(chunk), rows.gathered(labels, chunk),
                                       rows.gathered(scale, chunk), need_dw);
  };
  const auto finish = [&](HeadChunk& each, int64_t chunk) {
    const at::Tensor found = each.losses(need_dx || need_dw);
    int64_t place = 0;
    for (const at::Tensor& of_rank : rows.of_chunk(losses, chunk)) {
      of_rank.copy_(found.narrow(0, place, of_rank.size(0)));
      place += of_rank.size(0);
    }
    at::Tensor dx_own;
    if (need_dx) dx_own = dx.narrow(0, rows.begin(chunk), rows.in_chunk(rows.rank, chunk));
    each.multiply_gradient(dx_own, dw, chunk == 0);
  };

  const int64_t chunks = rows.chunks();
  // With other ranks the statistics of one chunk travel while the next is multiplied.
  const int64_t behind = head.group != nullptr && chunks > 1 ? 1 : 0;
  Tensors memory;
  for (int64_t i = 0; i <= behind; ++i)
    memory.push_back(at::empty({rows.largest(), weight.size(0)}, x.options()));
  std::unique_ptr<HeadChunk> before, now, next = begin(0);
  for (int64_t chunk = 0; chunk < chunks + behind; ++chunk) {
    before = std::move(now);
    now = std::move(next);
    if (chunk + 1 < chunks) next = begin(chunk + 1);
    if (chunk < chunks) now->multiply(memory[chunk % memory.size()]);
    if (behind == 0) {
      finish(*now, chunk);
    } else if (chunk > 0) {
      finish(*before, chunk - 1);
    }
  }
  Tensors result{losses};
  if (need_dx) result.push_back(dx);
  if (need_dw) result.push_back(dw);
  return result;
}

}  // namespace

void register_linear_cross_entropy(torch::Library& m) {
  Operator<linear_cross_entropy>::define_without_gradient(
      m,
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels, Tensor scale, str group, int "
      "vocab_start, "
      "int vocab_size, int ignore_index, float z_loss, int chunk_rows, bool need_dx, bool need_dw, str tier, "
      "str wire) -> Tensor[]");
}

}  // namespace pyruntime
