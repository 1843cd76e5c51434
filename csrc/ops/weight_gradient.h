// dW = dY^T X of a linear layer: where it goes, and when it is multiplied.
//
// Autograd gets it as a tensor, unless the weight has a sink: then dY and X are handed over as they are, so
// that data parallelism can write each chunk of rows where it leaves from, and autograd is given nothing.
//
// Between hosts it may come later. No op waits for it, so the product is queued for the waits of this thread
// (ops/wait_queue.h): a piece is some rows of dW over all rows of dY and X. What is left when a product's
// owner wants it is multiplied then.
//
// Without a sink the owner is the backward pass: finished gradients are accumulated by autograd itself, hooks
// and all, when the next product comes or the pass ends; nobody sees a part of one. A pass that fails takes
// its queue with it. A sink may queue what it is given (`later`), and owns it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "ops/gemm/gemm.h"
#include "ops/wait_queue.h"

namespace pyruntime {

// dy [rows, N], x [rows, K], both contiguous or transposable without a copy. `later`: the op that made them
// waits for other hosts, so they are worth queueing as a WeightProduct.
using WeightGradientSink = std::function<void(const at::Tensor& dy, const at::Tensor& x, bool later)>;

// From now on the gradient of `weight` goes to `sink`; an empty one gives it back to autograd. The weight is
// known by its memory, and a sink ends with it.
void set_weight_gradient_sink(const at::Tensor& weight, WeightGradientSink sink);
bool has_weight_gradient_sink(const at::Tensor& weight);

// dy^T @ x summed over all rows of all blocks, dy [blocks, rows, N], x [blocks, rows, K]: [N, K], or
// undefined where the weight's sink took them. `in_pieces`: between hosts; multiplied in the pieces of
// multiply_later(), and thus with its bits.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x,
                           bool in_pieces = false);
// out = dy^T @ x, or out += dy^T @ x, of matrices, in those pieces; on a device in one.
void write_in_pieces(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate);

// out = dY^T X, or out += dY^T X, summed over all operands that it is given: in pieces, in the waits of the
// thread that made it, oldest first, until it is destroyed. Used by that thread alone. Products that write to
// the same memory are multiplied in the order in which they were made.
class WeightProduct : public Piecework {
 public:
  // out [N, K], contiguous. `name`: of what computes it, for the ledger; a literal.
  static std::shared_ptr<WeightProduct> make(const at::Tensor& out, bool accumulate, const char* name);

  // dy [rows, N], x [rows, K], which nobody writes into any more.
  void add(const at::Tensor& dy, const at::Tensor& x);
  bool multiply() override;
  // What is left of it; `out` is written when it returns.
  void finish();

  const at::Tensor& out() const { return out_; }
  bool has_operands() const { return !operands_.empty(); }
  int64_t bytes() const;  // of operands

 private:
  WeightProduct(const at::Tensor& out, bool accumulate, const char* name);

  at::Tensor out_;
  const char* name_;
  int32_t layer_;
  std::deque<std::pair<at::Tensor, at::Tensor>> operands_;  // dY and X
  std::optional<WeightGradientGemm> gemm_;                  // of the first, once it has begun
  int64_t next_row_ = 0;                                    // of `out_`, where the next piece begins
  bool has_sum_;                                            // of earlier operands, or of others
};

// Called in the backward of an autograd function: whether the gradient of `weight`, one of its inputs, may
// come later in the pass. It may where autograd does nothing with it but add it to .grad, once: not where
// torch.autograd.grad() or backward(inputs=...) asks for it, where hooks are to be called when it comes,
// where the weight has a sink, another use in the pass, or is computed, and not while torch.compile traces.
bool may_come_later(const at::Tensor& weight);

// The gradient of `weight`, for which may_come_later() holds, is the sum of such products, dy [blocks, rows,
// N] and x [blocks, rows, K], which nobody writes into any more. `last`: none follows. `name`: of what
// computes it, for the ledger; a literal.
void multiply_later(const at::Tensor& weight, const char* name, const at::Tensor& dy, const at::Tensor& x,
                    bool last = true);

}  // namespace pyruntime
