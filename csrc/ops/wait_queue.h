// Lets a thread multiply queued products, piece by piece, while it would otherwise wait.
//
// A product that nobody needs yet is queued. Wherever its thread would then wait, it multiplies a piece of
// the oldest product instead (Filler in core/deadline.h). A piece is some rows of a GEMM's result over its
// whole depth. The rows are always the same, so the time at which a piece runs changes no bit.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/deadline.h"

namespace pyruntime {

class Piecework {
 public:
  virtual ~Piecework() = default;
  // Computes one piece, without waiting for anybody; returns false if there is none now.
  virtual bool multiply() = 0;
};

// A computing thread's queue. It keeps nothing alive: a product leaves when its owner releases it.
class WaitQueue : public Filler {
 public:
  WaitQueue() { set_filler(this); }
  ~WaitQueue() override { set_filler(nullptr); }
  WaitQueue(const WaitQueue&) = delete;
  WaitQueue& operator=(const WaitQueue&) = delete;

  static WaitQueue& of_this_thread();

  void add(const std::shared_ptr<Piecework>& product);
  bool work() override;
  // Oldest first.
  std::vector<std::shared_ptr<Piecework>> products() const;

 private:
  std::vector<std::weak_ptr<Piecework>> products_;
};

// The rows in each piece of a GEMM on the CPU with a result [rows, width] and sums over `depth`. A fixed
// rule, because it decides bits.
int64_t rows_of_piece(int64_t depth, int64_t rows, int64_t width);

}  // namespace pyruntime
