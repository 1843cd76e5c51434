// Approximates the nearest orthogonal matrix by Newton-Schulz: the direction of Muon's step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "ops/wait_queue.h"

namespace pyruntime {

// For X [n, k], n <= k (else its transpose): X / max(||X||_F, 1e-7), then five times (Jordan 2024,
// https://kellerjordan.github.io/posts/muon; torch.optim.Muon):
//
//     A = X X^T       B = b A + c A A       X = a X + B X       (a, b, c) = (3.4445, -4.7750, 2.0315)
//
// With X = U S V^T it becomes U p(S) V^T, p(S) between 0.7 and 1.2 except for the smallest. GEMMs have the
// dtype of the matrix; the norm is summed in fp32 or fp64. On the CPU it is computed in pieces, in the waits
// of the thread that made it, until it is destroyed; only that thread uses it. On a device all of it is
// enqueued at once, on the stream that is current when it is made.
class NewtonSchulz : public Piecework {
 public:
  // matrix: of a floating-point dtype; nobody writes into it any more. Raises ValueError for anything else.
  static std::shared_ptr<NewtonSchulz> make(const at::Tensor& matrix);

  bool multiply() override;
  // Multiplies the rest and returns the result, contiguous, in the matrix's shape and dtype. It has no -0:
  // sums with zeros of other ranks have the same bits.
  at::Tensor finish();

 private:
  enum class Product { kGram, kPolynomial, kApply };

  explicit NewtonSchulz(const at::Tensor& matrix);
  void begin();
  void end_product();

  at::Tensor x_;  // the matrix as given, until begin()
  bool is_transposed_ = false;
  int32_t layer_;
  at::Tensor gram_, polynomial_, next_x_;
  int steps_left_;
  Product product_ = Product::kGram;
  int64_t next_row_ = 0;  // the row of the product where the next piece begins
};

}  // namespace pyruntime
