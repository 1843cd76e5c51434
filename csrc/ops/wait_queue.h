// Products that a thread multiplies in place of waiting, piece by piece.
//
// A product that nobody needs yet is queued, and wherever its thread would wait from then on it multiplies a
// piece of the oldest one instead (Filler in core/deadline.h). A piece is some rows of a GEMM's result over
// all of its depth, always the same ones, so when it ran changes no bit.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/deadline.h"

namespace pyruntime {

class Piecework {
 public:
  virtual ~Piecework() = default;
  // A piece, without waiting for anybody; false where there is none now.
  virtual bool multiply() = 0;
};

// Of a thread that computes. Keeps nothing alive: what is queued leaves when its owner lets it go.
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

// Rows in each piece of a GEMM on the CPU with a result [rows, width] and sums over `depth`. A fixed rule: it
// decides bits.
int64_t rows_of_piece(int64_t depth, int64_t rows, int64_t width);

}  // namespace pyruntime
