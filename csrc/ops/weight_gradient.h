// dW = dY^T X of a linear layer: where it goes, and when it is multiplied.
//
// Autograd gets dW as a tensor, unless the weight has a sink. A sink gets dY and X unmultiplied, so that data
// parallelism can write each chunk of rows into the memory that it leaves from; autograd then gets nothing.
//
// Between hosts dW may come later. No op waits for it, so the product is queued for the waits of this thread
// (ops/wait_queue.h): a piece is some rows of dW over all rows of dY and X. The rest is multiplied when the
// product's owner wants it.
//
// Without a sink the backward pass is the owner: autograd itself accumulates finished gradients, hooks
// included, when the next product comes or the pass ends. Nobody sees a partial gradient. A pass that fails
// takes its queue with it. A sink may queue its products (`later`), and owns them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/gemm/groups.h"
#include "ops/wait_queue.h"

namespace pyruntime {

// dy [rows, N], x [rows, K], both contiguous or transposable without a copy. `later`: the op waits for other
// hosts, so queueing them as a WeightProduct pays; false for stacks. `ends`: empty for one matrix.
using WeightGradientSink =
    std::function<void(const at::Tensor& dy, const at::Tensor& x, bool later, const Ends& ends)>;

// Sends the gradient of `weight` to `sink` from now on; an empty sink returns it to autograd. The weight is
// identified by its memory, and its sink ends with it. `keeps`: the sink may read dY and X after it has
// returned; else only if it was told `later`.
void set_weight_gradient_sink(const at::Tensor& weight, WeightGradientSink sink, bool keeps);
bool has_weight_gradient_sink(const at::Tensor& weight);
bool has_sink_that_keeps(const at::Tensor& weight);

// dy^T @ x summed over all rows of all blocks, dy [blocks, rows, N], x [blocks, rows, K]: [N, K], or
// undefined if the weight's sink took them. `in_pieces`: between hosts; multiplied in the pieces of
// multiply_later(), and thus with its bits.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x,
                           bool in_pieces = false);
// out[e] = dy^T @ x, or out[e] += dy^T @ x, over the rows of matrix e: out [E, N, K] contiguous.
void write_stack(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, const Ends& ends,
                 bool accumulate);
// The gradient of a stack, written by write_stack(), or undefined if the stack's sink took dy and x. Where
// `sum` is defined, it is added to that.
at::Tensor stack_gradient(const at::Tensor& stack, const at::Tensor& dy, const at::Tensor& x,
                          const Ends& ends, const at::Tensor& sum = {});
// out = dy^T @ x, or out += dy^T @ x, of matrices, in the same pieces; on a device in one piece.
void write_in_pieces(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate);

// out = dY^T X, or out += dY^T X, summed over all of its operands. It is multiplied in pieces, in the waits
// of the thread that made it, oldest first, until it is destroyed; only that thread uses it. Products that
// write to the same memory are multiplied in the order in which they were made.
class WeightProduct : public Piecework {
 public:
  // out [N, K], contiguous. `name`: the op's name in the ledger; a literal.
  static std::shared_ptr<WeightProduct> make(const at::Tensor& out, bool accumulate, const char* name);

  // Adds dy [rows, N] and x [rows, K], which nobody writes into any more.
  void add(const at::Tensor& dy, const at::Tensor& x);
  bool multiply() override;
  // Multiplies the rest; `out` is complete when it returns.
  void finish();

  const at::Tensor& out() const { return out_; }
  bool has_operands() const { return !operands_.empty(); }
  int64_t bytes() const;  // of the operands

 private:
  WeightProduct(const at::Tensor& out, bool accumulate, const char* name);

  at::Tensor out_;
  const char* name_;
  int32_t layer_;
  std::deque<std::pair<at::Tensor, at::Tensor>> operands_;  // dY and X
  std::optional<WeightGradientGemm> gemm_;                  // of the first operands, once begun
  int64_t next_row_ = 0;                                    // the row of `out_` where the next piece begins
  bool has_sum_;                                            // a sum of earlier operands or products
};

// Called in the backward of an autograd function: whether the gradient of `weight`, one of its inputs, may
// come later in the pass. It may if autograd only adds it to .grad, once. It may not if torch.autograd.grad()
// or backward(inputs=...) requests it, or hooks run when it comes; nor if the weight has a sink, has another
// use in the pass, or is computed; nor while torch.compile traces.
bool may_come_later(const at::Tensor& weight);

// Adds a product to the gradient of `weight`, for which may_come_later() must hold: dy [blocks, rows, N] and
// x [blocks, rows, K], not written any more. `last`: no other follows. `name`: for the ledger; a literal.
void multiply_later(const at::Tensor& weight, const char* name, const at::Tensor& dy, const at::Tensor& x,
                    bool last = true);

}  // namespace pyruntime
