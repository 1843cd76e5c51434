// The k largest magnitudes of a vector, in one pass over its memory.
//
// A sample says from which magnitude on a value may be one of them. Values of at least that are collected
// while x is computed, and zeros written in their place; those that turn out too small are put back. What the
// sample says decides the time alone: where too few are collected, it is asked again with more caution; where
// too many come, the k largest until there are kept, and from then on what is larger than the least of them
// is collected. So nothing is taken but by its magnitude and, of equal ones, its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "cpu/compression/sift.h"

namespace pyruntime::cpu {

class Largest {
 public:
  // Of x = values (+ before, where it is not null), at least the k largest, in order. rest: x with zeros in
  // their place; may be null, or `before`. adds: the squares of all others are added up.
  static Largest of(const at::Tensor& values, const float* before, int64_t k, float* rest, bool adds);

  // Exactly k are left: of equal magnitudes the first.
  void settle();
  // The sum of the squares of x without its k largest; no more than in any call before, and fewer are left.
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
