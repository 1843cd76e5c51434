// Cross-entropy over a vocabulary that may be cut over ranks: each shard's statistics, and the loss from the
// gathered ones.
//
//   stats_i  = (m_i, s_i, t_i) = (max_j l_ij,  sum_j exp(l_ij - m_i),  l_ij where vocab_start + j = label_i)
//   lse_i    = M_i + log sum_r s_ri exp(m_ri - M_i),  M_i = max_r m_ri        (r: the shards, in rank order)
//   loss_i   = (M_i - sum_r t_ri) + log sum_r s_ri exp(m_ri - M_i)
//   dl_ij    = (dloss_i + dlse_i) exp(l_ij - lse_i) - dloss_i [vocab_start + j = label_i]
//
// The softmax is never stored: the backward recomputes it from the logits.

#include "cpu/layers/cross_entropy.h"

#include <limits>
#include <tuple>

#include "common.h"
#include "shared_ops.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels: `rows` rows of `columns` logits ----

struct StatsRows {
  // A chunk of a row is still in the level 1 cache when its exponentials are summed after its maximum.
  static constexpr int64_t kChunk = 2048;

  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const T* logits, const int64_t* labels, S* stats, int64_t rows,
                                   int64_t columns, int64_t vocab_start) {
    const S lowest = -std::numeric_limits<S>::infinity();
    for (int64_t row = 0; row < rows; ++row, logits += columns, stats += 3) {
      S highest = lowest, sum = 0;
      for (int64_t begin = 0; begin < columns; begin += kChunk) {
        const T* chunk = logits + begin;
        const int64_t size = columns - begin < kChunk ? columns - begin : kChunk;
        S chunk_highest = highest;
        PYRUNTIME_SIMD_REDUCE(max, chunk_highest)
        for (int64_t j = 0; j < size; ++j) {
          const S logit = load(chunk[j]);
          chunk_highest = logit > chunk_highest ? logit : chunk_highest;
        }
        // If every logit so far is -inf (a masked column), any finite reference gives the right sum, 0.
        const S reference = chunk_highest == lowest ? S(0) : chunk_highest;
        S chunk_sum = 0;
        PYRUNTIME_SIMD_REDUCE(+, chunk_sum)
        for (int64_t j = 0; j < size; ++j) chunk_sum += fast_exp(load(chunk[j]) - reference);
        sum = sum * fast_exp(highest - reference) + chunk_sum;
        highest = chunk_highest;
      }
      const int64_t target = labels[row] - vocab_start;
      stats[0] = highest;
      stats[1] = sum;
      stats[2] = target >= 0 && target < columns ? static_cast<S>(load(logits[target])) : S(0);
    }
  }
};

struct SoftmaxGradRows {
  // dlogits may be logits itself.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const T* logits, const int64_t* labels, const S* lse, const S* grad,
                                   T* dlogits, int64_t rows, int64_t columns, int64_t vocab_start) {
    for (int64_t row = 0; row < rows; ++row, logits += columns, dlogits += columns) {
      const S scale = grad[row], shift = lse[row];
      if (scale == 0) {  // an ignored row
        std::memset(static_cast<void*>(dlogits), 0, columns * sizeof(T));
        continue;
      }
      const int64_t target = labels[row] - vocab_start;
      const bool here = target >= 0 && target < columns;
      const S target_grad = here ? scale * (fast_exp(load(logits[target]) - shift) - 1) : S(0);
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) store(dlogits[j], scale * fast_exp(load(logits[j]) - shift));
      if (here) store(dlogits[target], target_grad);
    }
  }
};

// ---- checks ----

void check_one_per_row(const char* op, const Tensor& logits, const Tensor& values, const char* name) {
  TORCH_CHECK_VALUE(values.dim() == 1 && values.size(0) == logits.size(0), op, ": ", name, " has shape ",
                    values.sizes(), " for ", logits.size(0), " rows of logits; it must be [", logits.size(0),
                    "].");
}

void check_statistics(const char* op, const Tensor& logits, const Tensor& values, const char* name) {
  const at::ScalarType dtype = statistics_dtype(logits.scalar_type());
  TORCH_CHECK_TYPE(values.scalar_type() == dtype, op, ": ", name, " has dtype ", values.scalar_type(),
                   "; for ", logits.scalar_type(), " logits it must be ", dtype, ".");
}

void check_loss(const Tensor& logits, const Tensor& labels, const Tensor& stats) {
  constexpr auto op = "cross_entropy_loss";
  check_logits(op, logits, labels);
  check_statistics(op, logits, stats, "stats");
  TORCH_CHECK_VALUE(
      stats.dim() == 3 && stats.size(0) > 0 && stats.size(1) == logits.size(0) && stats.size(2) == 3, op,
      ": stats has shape ", stats.sizes(), "; it must be [shards, ", logits.size(0), ", 3].");
}

}  // namespace

void check_logits(const char* op, const Tensor& logits, const Tensor& labels) {
  check_floating(logits, op, "logits");
  TORCH_CHECK_VALUE(logits.dim() == 2, op, ": logits has shape ", logits.sizes(),
                    "; it must be [rows, vocabulary].");
  TORCH_CHECK_TYPE(labels.scalar_type() == at::kLong, op, ": labels has dtype ", labels.scalar_type(),
                   "; it must be int64.");
  check_one_per_row(op, logits, labels, "labels");
}

void check_logits_backward(const char* op, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                           const Tensor& grad) {
  check_logits(op, logits, labels);
  for (const auto& [values, name] : {std::pair(lse, "lse"), std::pair(grad, "grad")}) {
    check_statistics(op, logits, values, name);
    check_one_per_row(op, logits, values, name);
  }
}

void check_contiguous(const char* op, const Tensor& dlogits) {
  TORCH_CHECK_VALUE(dlogits.is_contiguous(), op, ": logits has strides ", dlogits.strides(),
                    "; it is written in place and must be contiguous.");
}

namespace {

// ---- on the CPU ----

void write_stats_cpu(const Tensor& logits_in, const Tensor& labels_in, int64_t vocab_start,
                     const Tensor& stats) {
  const Tensor logits = logits_in.contiguous(), labels = labels_in.contiguous();
  const int64_t rows = logits.size(0), columns = logits.size(1);
  PYRUNTIME_DISPATCH_FLOAT(logits.scalar_type(), "cross_entropy_stats", [&] {
    run_rows<StatsRows>(rows, columns,
                        std::tuple(read<scalar_t>(logits, columns), read<int64_t>(labels, 1),
                                   write<acc_t<scalar_t>>(stats, 3)),
                        vocab_start);
  });
}

// Not vectorised: there are only a few numbers per row.
std::tuple<Tensor, Tensor> loss_cpu(const Tensor& logits, const Tensor& labels_in, const Tensor& stats_in,
                                    c10::SymInt /*vocab_start*/, c10::SymInt all_columns,
                                    int64_t ignore_index, bool /*overwrite_logits*/) {
  check_loss(logits, labels_in, stats_in);
  const int64_t vocab_size = all_columns.expect_int();
  const Tensor labels = labels_in.contiguous(), stats = stats_in.contiguous();
  const int64_t shards = stats.size(0), rows = stats.size(1);
  Tensor loss = at::empty({rows}, stats.options()), lse = at::empty({rows}, stats.options());
  AT_DISPATCH_FLOATING_TYPES(stats.scalar_type(), "cross_entropy_loss", [&] {
    const scalar_t* stats_data = stats.const_data_ptr<scalar_t>();
    const int64_t* labels_data = labels.const_data_ptr<int64_t>();
    scalar_t *loss_data = loss.mutable_data_ptr<scalar_t>(), *lse_data = lse.mutable_data_ptr<scalar_t>();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t label = labels_data[row];
      TORCH_CHECK_INDEX(label == ignore_index || (label >= 0 && label < vocab_size),
                        "cross_entropy_loss: label ", label, " of row ", row, " is neither in [0, ",
                        vocab_size, ") nor ignore_index=", ignore_index, ".");
      const auto stat = [&](int64_t shard, int64_t which) {
        return stats_data[(shard * rows + row) * 3 + which];
      };
      scalar_t highest = stat(0, 0), sum = 0, target = 0;
      for (int64_t shard = 1; shard < shards; ++shard) highest = std::max(highest, stat(shard, 0));
      for (int64_t shard = 0; shard < shards; ++shard) {
        sum += stat(shard, 1) * std::exp(stat(shard, 0) - highest);
        target += stat(shard, 2);
      }
      lse_data[row] = highest + std::log(sum);
      // Not lse - target: with large logits, highest - target keeps digits that lse has lost.
      loss_data[row] = label == ignore_index ? scalar_t(0) : (highest - target) + std::log(sum);
    }
  });
  return {loss, lse};
}

void write_logits_grad_cpu(const char* op, const Tensor& logits_in, const Tensor& labels_in,
                           const Tensor& lse_in, const Tensor& grad_in, int64_t vocab_start,
                           const Tensor& dlogits) {
  check_contiguous(op, dlogits);
  const Tensor logits = logits_in.contiguous(), labels = labels_in.contiguous();
  const Tensor lse = lse_in.contiguous(), grad = grad_in.contiguous();
  const int64_t rows = logits.size(0), columns = logits.size(1);
  PYRUNTIME_DISPATCH_FLOAT(logits.scalar_type(), "cross_entropy_backward", [&] {
    using stat_t = acc_t<scalar_t>;
    run_rows<SoftmaxGradRows>(
        rows, columns,
        std::tuple(read<scalar_t>(logits, columns), read<int64_t>(labels, 1), read<stat_t>(lse, 1),
                   read<stat_t>(grad, 1), write<scalar_t>(dlogits, columns)),
        vocab_start);
  });
}

// ---- on every other device ----

constexpr int64_t kRowsPerBlock = 2048;

}  // namespace

void write_stats_composite(const Tensor& logits_in, const Tensor& labels, int64_t vocab_start,
                           const Tensor& stats) {
  const int64_t columns = logits_in.size(1);
  if (columns == 0) {
    stats.zero_().select(1, 0).fill_(-std::numeric_limits<double>::infinity());
    return;
  }
  for (int64_t begin = 0; begin < logits_in.size(0); begin += kRowsPerBlock) {
    const int64_t rows = std::min(kRowsPerBlock, logits_in.size(0) - begin);
    Tensor logits =
        logits_in.narrow(0, begin, rows).to(stats.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    const Tensor highest = logits.amax({1}, /*keepdim=*/true);
    const Tensor reference = highest.masked_fill(highest.eq(-std::numeric_limits<double>::infinity()), 0);
    const Tensor target = labels.narrow(0, begin, rows).sub(vocab_start).unsqueeze(1);
    const Tensor elsewhere = target.lt(0).logical_or(target.ge(columns));
    const Tensor target_logit = logits.gather(1, target.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0);
    const Tensor sum = logits.sub_(reference).exp_().sum({1}, /*keepdim=*/true);
    stats.narrow(0, begin, rows).copy_(at::cat({highest, sum, target_logit}, 1));
  }
}

namespace {

std::tuple<Tensor, Tensor> loss_composite(const Tensor& logits, const Tensor& labels, const Tensor& stats,
                                          c10::SymInt /*vocab_start*/, c10::SymInt vocab_size,
                                          int64_t ignore_index, bool /*overwrite_logits*/) {
  check_loss(logits, labels, stats);
  const Tensor ignored = labels.eq(ignore_index);
  at::_assert_async(ignored.logical_or(labels.ge(0).logical_and(labels.lt(vocab_size.expect_int()))).all(),
                    "cross_entropy_loss: a label is neither in the vocabulary nor ignore_index.");
  const Tensor highest = stats.select(2, 0), top = highest.amax({0});
  const Tensor sum = stats.select(2, 1).mul(highest.sub(top).exp()).sum({0});
  const Tensor lse = sum.log().add(top);
  return {lse.sub(stats.select(2, 2).sum({0})).masked_fill(ignored, 0), lse};
}

}  // namespace

// In blocks of rows: a wide copy of all logits would be the largest tensor of a training step.
void write_logits_grad_composite(const char* /*op*/, const Tensor& logits, const Tensor& labels,
                                 const Tensor& lse, const Tensor& grad, int64_t vocab_start,
                                 const Tensor& dlogits) {
  const int64_t columns = logits.size(1);
  if (logits.numel() == 0) return;
  for (int64_t begin = 0; begin < logits.size(0); begin += kRowsPerBlock) {
    const auto of_block = [&](const Tensor& all) {
      return all.narrow(0, begin, std::min(kRowsPerBlock, logits.size(0) - begin));
    };
    const Tensor own_grad = of_block(grad).unsqueeze(1);
    const Tensor target = of_block(labels).sub(vocab_start).unsqueeze(1);
    const Tensor elsewhere = target.lt(0).logical_or(target.ge(columns));
    Tensor block = of_block(logits).to(lse.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    block.sub_(of_block(lse).unsqueeze(1)).exp_();
    block.scatter_add_(1, target.masked_fill(elsewhere, 0), elsewhere.to(block.scalar_type()).sub(1));
    block.mul_(own_grad).masked_fill_(own_grad.eq(0), 0);
    of_block(dlogits).copy_(block);
  }
}

namespace {

// ---- autograd ----

using StatsOp = Operator<cross_entropy_stats<write_stats_composite>, cross_entropy_stats<write_stats_cpu>>;
using LossOp = Operator<loss_composite, loss_cpu>;
using BackwardOp = Operator<cross_entropy_backward<write_logits_grad_composite>,
                            cross_entropy_backward<write_logits_grad_cpu>>;
using InPlaceOp = Operator<cross_entropy_backward_in_place<write_logits_grad_composite>,
                           cross_entropy_backward_in_place<write_logits_grad_cpu>>;

// The gradient of cross_entropy_loss includes the dependence of stats on the logits, so stats has none.
Tensor stats_autograd(const Tensor& logits, const Tensor& labels, c10::SymInt vocab_start) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return StatsOp::call(logits, labels, std::move(vocab_start));
}

// Adds each row's value to its label's column, if this shard has it.
void add_at_labels(Tensor& dlogits, const Tensor& labels, const Tensor& values,
                   const c10::SymInt& vocab_start) {
  const c10::SymInt columns = dlogits.sym_size(1);
  if (columns == 0) return;
  const Tensor target = labels.sub(at::Scalar(vocab_start)).unsqueeze(1);
  const Tensor elsewhere = target.lt(0).logical_or(target.ge(at::Scalar(columns)));
  dlogits.scatter_add_(1, target.masked_fill(elsewhere, 0),
                       values.unsqueeze(1).masked_fill(elsewhere, 0).to(dlogits.scalar_type()));
}

// Gradients of the losses and of lse (or undefined), as one for the kernels: they subtract the sum of both at
// the label, which add_at_labels() corrects.
Tensor grad_of_rows(const Tensor& labels, int64_t ignore_index, const Tensor& of_loss, const Tensor& of_lse) {
  const Tensor grad = of_loss.masked_fill(labels.eq(ignore_index), 0);
  return of_lse.defined() ? grad.add(of_lse) : grad;
}

struct CrossEntropyLoss : Function<CrossEntropyLoss> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& labels,
                               const Tensor& stats, c10::SymInt vocab_start, c10::SymInt vocab_size,
                               int64_t ignore_index, bool overwrite_logits) {
    TORCH_CHECK_VALUE(
        !overwrite_logits || !logits.requires_grad() || !logits.is_leaf(),
        "cross_entropy_loss: overwrite_logits=True would destroy logits that the caller made (a leaf of the "
        "graph); leave it False.");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, lse] =
        LossOp::call(logits, labels, stats, vocab_start, vocab_size, ignore_index, overwrite_logits);
    ctx->save_for_backward({logits, labels, lse});
    ctx->set_materialize_grads(false);
    ctx->saved_data["vocab_start"] = std::move(vocab_start);
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["overwrite_logits"] = overwrite_logits;
    return {loss, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &logits = saved[0], &labels = saved[1], &lse = saved[2];
    const c10::SymInt vocab_start = ctx->saved_data["vocab_start"].toSymInt();
    const Tensor of_loss = grads[0].defined() ? grads[0] : at::zeros_like(lse);
    const Tensor grad = grad_of_rows(labels, ctx->saved_data["ignore_index"].toInt(), of_loss, grads[1]);
    variable_list result(7);
    if (ctx->saved_data["overwrite_logits"].toBool()) {
      result[0] = logits.detach();
      InPlaceOp::call(result[0], labels, lse, grad, vocab_start);
    } else {
      result[0] = BackwardOp::call(logits, labels, lse, grad, vocab_start);
    }
    if (grads[1].defined()) add_at_labels(result[0], labels, grads[1], vocab_start);
    return result;
  }
};

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  StatsOp::define_differentiable<stats_autograd>(
      m, "cross_entropy_stats(Tensor logits, Tensor labels, SymInt vocab_start) -> Tensor");
  LossOp::define_differentiable<CrossEntropyLoss>(
      m,
      "cross_entropy_loss(Tensor logits, Tensor labels, Tensor stats, SymInt vocab_start, SymInt vocab_size, "
      "int ignore_index=-100, bool overwrite_logits=False) -> (Tensor loss, Tensor lse)");
  BackwardOp::define_without_gradient(
      m,
      "cross_entropy_backward(Tensor logits, Tensor labels, Tensor lse, Tensor grad, SymInt vocab_start) "
      "-> Tensor");
  InPlaceOp::define_without_gradient(
      m,
      "cross_entropy_backward_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor grad, "
      "SymInt vocab_start) -> ()");
}

}  // namespace

Tensor call_cross_entropy_stats(const Tensor& logits, const Tensor& labels, int64_t vocab_start) {
  return StatsOp::call(logits, labels, vocab_start);
}

std::tuple<Tensor, Tensor> call_cross_entropy_loss(const Tensor& logits, const Tensor& labels,
                                                   const Tensor& stats, int64_t vocab_start,
                                                   int64_t vocab_size, int64_t ignore_index) {
  return LossOp::call(logits, labels, stats, vocab_start, vocab_size, ignore_index, false);
}

void write_cross_entropy_gradient(Tensor logits, const Tensor& labels, const Tensor& lse,
                                  const Tensor& of_loss, const Tensor& of_lse, int64_t vocab_start,
                                  int64_t ignore_index) {
  InPlaceOp::call(logits, labels, lse, grad_of_rows(labels, ignore_index, of_loss, of_lse), vocab_start);
  if (of_lse.defined()) add_at_labels(logits, labels, of_lse, vocab_start);
}

}  // namespace pyruntime::layers
