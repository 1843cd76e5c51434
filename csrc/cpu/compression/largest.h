// Finds the k largest magnitudes of a vector in one pass over its memory.
//
// A sample estimates a threshold. Values of at least that magnitude are collected while x is computed, with
// zeros written in their place; those that turn out too small are put back. The sample affects only the time:
// if too few values are collected, the pass is repeated with a lower threshold. If too many are, only the k
// largest so far are kept, and from then on only larger values are collected. So the result depends only on
// magnitudes and, among equal ones, on places.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "cpu/compression/sift.h"

namespace pyruntime::cpu {

class Largest {
 public:
  // Collects at least the k largest of x = values (+ before, if not null), in order. rest: receives x with
  // zeros in their place; may be null, or `before`. adds: also sums the squares of all others.
  static Largest of(const at::Tensor& values, const float* before, int64_t k, float* rest, bool adds);

  // Keeps exactly k: among equal magnitudes the first.
  void settle();
  // Returns the sum of squares of x without its k largest, and discards smaller values. k must not exceed
  // that of earlier calls.
  double squares_of_all_but(int64_t k);

  int64_t number() const { return large_.number; }
  const float* values() const { return values_.get(); }
  const int32_t* places() const { return places_.get(); }

 private:
  Largest(int64_t count, int64_t k, float* rest, bool adds);

  template <typename T>
  void find(const T* values, const float* before, int64_t count);
  template <typename T>
  void look_through(const T* values, const float* before, int64_t count, uint32_t least);
  void put_back();

  int64_t k_, room_;
  float* rest_;
  bool adds_;
  uint32_t least_ = 0;
  std::unique_ptr<float[]> values_;
  std::unique_ptr<int32_t[]> places_;
  Large large_{};
  double squares_[kSiftRun] = {};
};

}  // namespace pyruntime::cpu
