// Cross-entropy over a vocabulary that may be cut over ranks: what is local of it, and what follows from the
// gathered statistics.
//
//   stats_i  = (m_i, s_i, t_i) = (max_j l_ij,  sum_j exp(l_ij - m_i),  l_ij where vocab_start + j = label_i)
//   lse_i    = M_i + log sum_r s_ri exp(m_ri - M_i),  M_i = max_r m_ri        (r: the shards, in rank order)
//   loss_i   = (M_i - sum_r t_ri) + log sum_r s_ri exp(m_ri - M_i)
//   dl_ij    = dloss_i * (exp(l_ij - lse_i) - [vocab_start + j = label_i])
//
// The softmax is never stored: the backward recomputes it from the logits.

#include <limits>
#include <tuple>

#include "common.h"
#include "composites.h"
#include "layers.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels: `rows` rows of `columns` logits ----

struct StatsRows {
  // A chunk of a row is in the first-level cache when its exponentials are summed, right after its maximum
  // was found.
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
        // Where every logit so far is -inf (a masked column), any finite reference gives the right sum, 0.
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

}  // namespace

// ---- checks ----

void check_logits(const char* op, const Tensor& logits, const Tensor& labels) {
  check_floating(logits, op, "logits");
  TORCH_CHECK_VALUE(logits.dim() == 2, op, ": logits has shape ", logits.sizes(),
                    "; it must be [rows, vocabulary].");
  TORCH_CHECK_TYPE(labels.scalar_type() == at::kLong, op, ": labels has dtype ", labels.scalar_type(),
                   "; it must be int64.");
  TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == logits.size(0), op, ": labels has shape ",
                    labels.sizes(), " for ", logits.size(0), " rows of logits; it must be [", logits.size(0),
                    "].");
}

namespace {

void check_row_values(const char* op, const Tensor& logits, const Tensor& values, const char* name) {
  const at::ScalarType dtype = statistics_dtype(logits.scalar_type());
  TORCH_CHECK_TYPE(values.scalar_type() == dtype, op, ": ", name, " has dtype ", values.scalar_type(),
                   "; for ", logits.scalar_type(), " logits it must be ", dtype, ".");
  TORCH_CHECK_VALUE(values.dim() == 1 && values.size(0) == logits.size(0), op, ": ", name, " has shape ",
                    values.sizes(), " for ", logits.size(0), " rows of logits; it must be [", logits.size(0),
                    "].");
}

void check_loss(const Tensor& logits, const Tensor& labels, const Tensor& stats) {
  constexpr auto op = "cross_entropy_loss";
  check_logits(op, logits, labels);
  const at::ScalarType dtype = statistics_dtype(logits.scalar_type());
  TORCH_CHECK_TYPE(stats.scalar_type() == dtype, op, ": stats has dtype ", stats.scalar_type(), "; for ",
                   logits.scalar_type(), " logits it must be ", dtype, ".");
  TORCH_CHECK_VALUE(
      stats.dim() == 3 && stats.size(0) > 0 && stats.size(1) == logits.size(0) && stats.size(2) == 3, op,
      ": stats has shape ", stats.sizes(), "; it must be [shards, ", logits.size(0), ", 3].");
}

}  // namespace

void check_logits_backward(const char* op, const Tensor& logits, const Tensor& labels, const Tensor& lse,
                           const Tensor& grad) {
  check_logits(op, logits, labels);
  check_row_values(op, logits, lse, "lse");
  check_row_values(op, logits, grad, "grad");
}

namespace {

// ---- ops on the CPU ----

Tensor stats_cpu(const Tensor& logits_in, const Tensor& labels_in, int64_t vocab_start) {
  check_logits("cross_entropy_stats", logits_in, labels_in);
  const Tensor logits = logits_in.contiguous(), labels = labels_in.contiguous();
  const int64_t rows = logits.size(0), columns = logits.size(1);
  Tensor stats = at::empty({rows, 3}, logits.options().dtype(statistics_dtype(logits.scalar_type())));
  PYRUNTIME_DISPATCH_FLOAT(logits.scalar_type(), "cross_entropy_stats", [&] {
    using stat_t = acc_t<scalar_t>;
    const scalar_t* logits_data = logits.const_data_ptr<scalar_t>();
    const int64_t* labels_data = labels.const_data_ptr<int64_t>();
    stat_t* stats_data = stats.mutable_data_ptr<stat_t>();
    at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
      simd_run<StatsRows>(logits_data + begin * columns, labels_data + begin, stats_data + 3 * begin,
                          end - begin, columns, vocab_start);
    });
  });
  return stats;
}

// A few numbers a row: not worth vectorising.
std::tuple<Tensor, Tensor> loss_cpu(const Tensor& logits, const Tensor& labels_in, const Tensor& stats_in,
                                    int64_t /*vocab_start*/, int64_t vocab_size, int64_t ignore_index,
                                    bool /*overwrite_logits*/) {
  check_loss(logits, labels_in, stats_in);
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
      // Not lse - target: where the logits are large, their difference keeps digits that lse has lost.
      loss_data[row] = label == ignore_index ? scalar_t(0) : (highest - target) + std::log(sum);
    }
  });
  return {loss, lse};
}

void softmax_grad_cpu(const Tensor& logits, const Tensor& labels_in, const Tensor& lse_in,
                      const Tensor& grad_in, int64_t vocab_start, const Tensor& dlogits) {
  const Tensor labels = labels_in.contiguous(), lse = lse_in.contiguous(), grad = grad_in.contiguous();
  const int64_t rows = logits.size(0), columns = logits.size(1);
  PYRUNTIME_DISPATCH_FLOAT(logits.scalar_type(), "cross_entropy_backward", [&] {
    using stat_t = acc_t<scalar_t>;
    const scalar_t* logits_data = logits.const_data_ptr<scalar_t>();
    const int64_t* labels_data = labels.const_data_ptr<int64_t>();
    const stat_t *lse_data = lse.const_data_ptr<stat_t>(), *grad_data = grad.const_data_ptr<stat_t>();
    scalar_t* dlogits_data = dlogits.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
      simd_run<SoftmaxGradRows>(logits_data + begin * columns, labels_data + begin, lse_data + begin,
                                grad_data + begin, dlogits_data + begin * columns, end - begin, columns,
                                vocab_start);
    });
  });
}

Tensor backward_cpu(const Tensor& logits, const Tensor& labels, const Tensor& lse, const Tensor& grad,
                    int64_t vocab_start) {
  check_logits_backward("cross_entropy_backward", logits, labels, lse, grad);
  Tensor dlogits = at::empty(logits.sizes(), logits.options());
  softmax_grad_cpu(logits.contiguous(), labels, lse, grad, vocab_start, dlogits);
  return dlogits;
}

void backward_inplace_cpu(const Tensor& logits, const Tensor& labels, const Tensor& lse, const Tensor& grad,
                          int64_t vocab_start) {
  check_logits_backward("cross_entropy_backward_", logits, labels, lse, grad);
  TORCH_CHECK_VALUE(logits.is_contiguous(), "cross_entropy_backward_: logits has strides ", logits.strides(),
                    "; it is written in place and must be contiguous.");
  softmax_grad_cpu(logits, labels, lse, grad, vocab_start, logits);
  mark_written(logits);
}

// ---- ops on every other device ----

constexpr int64_t kRowsPerBlock = 2048;

}  // namespace

Tensor cross_entropy_stats_composite(const Tensor& logits_in, const Tensor& labels, int64_t vocab_start) {
  check_logits("cross_entropy_stats", logits_in, labels);
  const auto dtype = statistics_dtype(logits_in.scalar_type());
  const int64_t columns = logits_in.size(1);
  Tensor stats = at::zeros({logits_in.size(0), 3}, logits_in.options().dtype(dtype));
  if (columns == 0) {
    stats.select(1, 0).fill_(-std::numeric_limits<double>::infinity());
    return stats;
  }
  for (int64_t begin = 0; begin < logits_in.size(0); begin += kRowsPerBlock) {
    const int64_t rows = std::min(kRowsPerBlock, logits_in.size(0) - begin);
    Tensor logits = logits_in.narrow(0, begin, rows).to(dtype, /*non_blocking=*/false, /*copy=*/true);
    const Tensor highest = logits.amax({1}, /*keepdim=*/true);
    const Tensor reference = highest.masked_fill(highest.eq(-std::numeric_limits<double>::infinity()), 0);
    const Tensor target = labels.narrow(0, begin, rows).sub(vocab_start).unsqueeze(1);
    const Tensor elsewhere = target.lt(0).logical_or(target.ge(columns));
    const Tensor target_logit = logits.gather(1, target.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0);
    const Tensor sum = logits.sub_(reference).exp_().sum({1}, /*keepdim=*/true);
    stats.narrow(0, begin, rows).copy_(at::cat({highest, sum, target_logit}, 1));
  }
  return stats;
}

namespace {

std::tuple<Tensor, Tensor> loss_composite(const Tensor& logits, const Tensor& labels, const Tensor& stats,
                                          int64_t /*vocab_start*/, int64_t vocab_size, int64_t ignore_index,
                                          bool /*overwrite_logits*/) {
  check_loss(logits, labels, stats);
  const Tensor ignored = labels.eq(ignore_index);
  at::_assert_async(ignored.logical_or(labels.ge(0).logical_and(labels.lt(vocab_size))).all(),
                    "cross_entropy_loss: a label is neither in the vocabulary nor ignore_index.");
  const Tensor highest = stats.select(2, 0), top = highest.amax({0});
  const Tensor sum = stats.select(2, 1).mul(highest.sub(top).exp()).sum({0});
  const Tensor lse = sum.log().add(top);
  return {lse.sub(stats.select(2, 2).sum({0})).masked_fill(ignored, 0), lse};
}

// Into `dlogits`, which may be the logits, a block of rows at a time: a wide copy of all logits would be the
// largest tensor of a training step.
void softmax_grad_composite(const Tensor& logits, const Tensor& labels, const Tensor& lse, const Tensor& grad,
                            int64_t vocab_start, const Tensor& dlogits) {
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

}  // namespace

Tensor cross_entropy_backward_composite(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                                        const Tensor& grad, int64_t vocab_start) {
  check_logits_backward("cross_entropy_backward", logits, labels, lse, grad);
  const Tensor dlogits = at::empty(logits.sizes(), logits.options());
  softmax_grad_composite(logits, labels, lse, grad, vocab_start, dlogits);
  return dlogits;
}

void cross_entropy_backward_inplace_composite(const Tensor& logits, const Tensor& labels, const Tensor& lse,
                                              const Tensor& grad, int64_t vocab_start) {
  check_logits_backward("cross_entropy_backward_", logits, labels, lse, grad);
  softmax_grad_composite(logits, labels, lse, grad, vocab_start, logits);
}

namespace {

// ---- autograd ----

Tensor call_stats(const Tensor& logits, const Tensor& labels, c10::SymInt vocab_start) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, c10::SymInt)>("pyruntime::cross_entropy_stats");
  return op.call(logits, labels, std::move(vocab_start));
}

std::tuple<Tensor, Tensor> call_loss(const Tensor& logits, const Tensor& labels, const Tensor& stats,
                                     c10::SymInt vocab_start, c10::SymInt vocab_size, int64_t ignore_index,
                                     bool overwrite_logits) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                                         c10::SymInt, int64_t, bool)>("pyruntime::cross_entropy_loss");
  return op.call(logits, labels, stats, std::move(vocab_start), std::move(vocab_size), ignore_index,
                 overwrite_logits);
}

// The gradient of cross_entropy_loss accounts for what stats owes to the logits, so stats itself carries
// none.
Tensor stats_autograd(const Tensor& logits, const Tensor& labels, c10::SymInt vocab_start) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_stats(logits, labels, std::move(vocab_start));
}

struct CrossEntropyLoss : torch::autograd::Function<CrossEntropyLoss> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Tensor& labels,
                               const Tensor& stats, c10::SymInt vocab_start, c10::SymInt vocab_size,
                               int64_t ignore_index, bool overwrite_logits) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, lse] =
        call_loss(logits, labels, stats, vocab_start, vocab_size, ignore_index, overwrite_logits);
    ctx->save_for_backward({logits, labels, lse});
    ctx->mark_non_differentiable({lse});
    ctx->saved_data["vocab_start"] = std::move(vocab_start);
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["overwrite_logits"] = overwrite_logits;
    return {loss, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt)>(
            "pyruntime::cross_entropy_backward");
    static const auto op_inplace =
        find_op<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt)>(
            "pyruntime::cross_entropy_backward_");
    const auto saved = ctx->get_saved_variables();
    const Tensor &logits = saved[0], &labels = saved[1], &lse = saved[2];
    const c10::SymInt vocab_start = ctx->saved_data["vocab_start"].toSymInt();
    const Tensor grad = grads[0].masked_fill(labels.eq(ctx->saved_data["ignore_index"].toInt()), 0);
    Tensor dlogits;
    if (ctx->saved_data["overwrite_logits"].toBool()) {
      dlogits = logits.detach();
      op_inplace.call(dlogits, labels, lse, grad, vocab_start);
    } else {
      dlogits = op.call(logits, labels, lse, grad, vocab_start);
    }
    const Tensor none;
    return {dlogits, none, none, none, none, none, none};
  }
};

std::tuple<Tensor, Tensor> loss_autograd(const Tensor& logits, const Tensor& labels, const Tensor& stats,
                                         c10::SymInt vocab_start, c10::SymInt vocab_size,
                                         int64_t ignore_index, bool overwrite_logits) {
  TORCH_CHECK_VALUE(
      !overwrite_logits || !logits.requires_grad() || !logits.is_leaf(),
      "cross_entropy_loss: overwrite_logits=True would destroy logits that the caller made (a leaf of the "
      "graph); leave it False.");
  const variable_list out = CrossEntropyLoss::apply(logits, labels, stats, std::move(vocab_start),
                                                    std::move(vocab_size), ignore_index, overwrite_logits);
  return {out[0], out[1]};
}

}  // namespace

void register_cross_entropy(torch::Library& m) {
  m.def("cross_entropy_stats(Tensor logits, Tensor labels, SymInt vocab_start) -> Tensor");
  m.def(
      "cross_entropy_loss(Tensor logits, Tensor labels, Tensor stats, SymInt vocab_start, SymInt vocab_size, "
      "int ignore_index=-100, bool overwrite_logits=False) -> (Tensor loss, Tensor lse)");
  m.def(
      "cross_entropy_backward(Tensor logits, Tensor labels, Tensor lse, Tensor grad, SymInt vocab_start) -> "
      "Tensor");
  m.def(
      "cross_entropy_backward_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor grad, SymInt "
      "vocab_start) -> ()");
  implement(m, "cross_entropy_stats", stats_cpu, cross_entropy_stats_composite);
  implement(m, "cross_entropy_loss", loss_cpu, loss_composite);
  implement(m, "cross_entropy_backward", backward_cpu, cross_entropy_backward_composite);
  implement(m, "cross_entropy_backward_", backward_inplace_cpu, cross_entropy_backward_inplace_composite);
  implement_autograd(m, "cross_entropy_stats", stats_autograd);
  implement_autograd(m, "cross_entropy_loss", loss_autograd);
  refuse_autograd(m, "cross_entropy_backward");
  refuse_autograd(m, "cross_entropy_backward_");
}

}  // namespace pyruntime::layers
