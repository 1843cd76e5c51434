// Ops of a ring in steps, on small integers whose sums are exact, each checking every number that it gets.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "transport/ring/ring_of_threads.h"

namespace ring_test {

using pyruntime::Chunk;
using pyruntime::FlightDescriptor;
using pyruntime::Op;

struct Shape {
  int64_t rows;
  int64_t blocks = 1;
  int64_t inner = 1;
  int64_t width = 1;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool with_bias = false;
};

inline FlightDescriptor describe(Op op, const Shape& shape, const Member& member) {
  return {op,
          static_cast<int32_t>(shape.dtype),
          shape.rows,
          shape.blocks,
          shape.inner,
          shape.width,
          shape.with_bias,
          pyruntime::rows_of_rank(shape.rows, member.ranks(), member.rank())};
}

// The number at a place of what `rank` holds in op `op`; 0 to 7, so that bf16 holds sums over many ranks.
inline float number_at(int op, int rank, int64_t block, int64_t row, int64_t column) {
  const auto mixed = static_cast<uint64_t>(op * 31 + rank * 7 + block * 5 + row * 3 + column) * 2654435761u;
  return static_cast<float>((mixed >> 16) % 8);
}

using NumberAt = std::function<float(int64_t block, int64_t row, int64_t column)>;

// visit(element, block, row of the operand, column) for all of a chunk's memory.
template <typename T, typename Visit>
void for_each_element(const at::Tensor& memory, const Chunk& chunk, const Shape& shape, const Visit& visit) {
  const int64_t columns = shape.inner * shape.width;
  EXPECT_EQ(memory.numel(), shape.blocks * chunk.rows * columns);
  EXPECT(memory.is_contiguous());
  if (memory.numel() != shape.blocks * chunk.rows * columns) return;
  T* element = memory.numel() == 0 ? nullptr : memory.data_ptr<T>();
  for (int64_t block = 0; block < shape.blocks; ++block) {
    for (int64_t row = 0; row < chunk.rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        visit(*element++, block, chunk.begin + row, column);
      }
    }
  }
}

template <typename Visit>
void with_dtype(c10::ScalarType dtype, const Visit& visit) {
  if (dtype == c10::ScalarType::BFloat16) return visit(c10::BFloat16());
  if (dtype == c10::ScalarType::Double) return visit(double());
  visit(float());
}

inline void fill(const at::Tensor& memory, const Chunk& chunk, const Shape& shape, const NumberAt& number) {
  with_dtype(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each_element<T>(memory, chunk, shape, [&](T& element, int64_t block, int64_t row, int64_t column) {
      element = static_cast<T>(number(block, row, column));
    });
  });
}

// Bitwise; names the first place that differs.
inline bool expect_numbers(const at::Tensor& memory, const Chunk& chunk, const Shape& shape,
                           const NumberAt& number, const std::string& what) {
  std::ostringstream wrong;
  with_dtype(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_each_element<T>(memory, chunk, shape, [&](T& element, int64_t block, int64_t row, int64_t column) {
      const T expected = static_cast<T>(number(block, row, column));
      if (element == expected || wrong.tellp() > 0) return;
      wrong << what << ": block " << block << ", row " << row << ", column " << column << " of rank "
            << chunk.owner << "'s piece " << chunk.piece << " is " << element << ", expected " << expected;
    });
  });
  if (wrong.tellp() > 0) check::fail(__FILE__, __LINE__, wrong.str());
  return wrong.tellp() <= 0;
}

// An op in flight: begun by its constructor, then published, summed and completed. Ranks may take each step
// of several flights in any order, but all of one step before any of the next: a rank that waits for others
// must have done what they wait for.
class RingOp {
 public:
  RingOp(Member& member, const Shape& shape, int op) : member_(member), shape_(shape), op_(op) {}
  virtual ~RingOp() = default;
  int number() const { return op_; }
  // In an order of its own where `random` is given.
  virtual void publish(std::mt19937* random = nullptr) = 0;
  virtual void sum() {}
  virtual void complete() = 0;

 protected:
  std::string what(const char* kind) const {
    std::ostringstream text;
    text << kind << " " << op_ << " of " << shape_.rows << " rows on rank " << member_.rank() << " of "
         << member_.ranks() << ", " << member_.ranks_per_host() << " to a host";
    return text.str();
  }
  float own_number(int64_t block, int64_t row, int64_t column) const {
    return number_at(op_, member_.rank(), block, row, column);
  }

  Member& member_;
  Shape shape_;
  int op_;
};

inline std::vector<Chunk> in_some_order(std::vector<Chunk> chunks, std::mt19937* random) {
  if (random != nullptr) std::shuffle(chunks.begin(), chunks.end(), *random);
  return chunks;
}

class Gather : public RingOp {
 public:
  Gather(Member& member, const Shape& shape, int op)
      : RingOp(member, shape, op),
        flight_(member.transport().gather(describe(Op::kAllGather, shape, member))) {}

  void publish(std::mt19937* random = nullptr) override {
    for (const Chunk& chunk : in_some_order(flight_->own(), random)) {
      fill(flight_->memory(chunk), chunk, shape_, [this](auto... where) { return own_number(where...); });
      flight_->publish(chunk);
    }
  }
  void complete() override {
    int64_t rows = 0;
    for (const Chunk& chunk : flight_->order()) {
      rows += chunk.rows;
      // With several blocks this rank's rows lie in memory piece by piece, and nobody reads them there.
      if (chunk.owner == member_.rank() && shape_.blocks > 1) continue;
      if (chunk.owner != member_.rank()) flight_->wait(chunk);
      expect_numbers(
          flight_->memory(chunk), chunk, shape_,
          [&](auto... where) { return number_at(op_, chunk.owner, where...); }, what("gather"));
    }
    EXPECT_EQ(rows, shape_.rows);
    flight_->finish();
  }

 private:
  std::unique_ptr<pyruntime::GatherFlight> flight_;
};

class Scatter : public RingOp {
 public:
  Scatter(Member& member, const Shape& shape, int op, bool all)
      : RingOp(member, shape, op),
        all_(all),
        flight_(member.transport().scatter(describe(all ? Op::kAllReduce : Op::kReduceScatter, shape, member),
                                           all)) {}

  void publish(std::mt19937* random = nullptr) override {
    for (const Chunk& chunk : in_some_order(flight_->order(), random)) {
      fill(flight_->part(chunk), chunk, shape_, [this](auto... where) { return own_number(where...); });
      flight_->publish(chunk);
    }
  }
  void sum() override {
    at::Tensor bias;
    if (shape_.with_bias) {
      bias = at::empty({shape_.width}, shape_.dtype);
      const Shape line{1, 1, 1, shape_.width, shape_.dtype};
      fill(bias, {0, 0, 1}, line, [this](int64_t, int64_t, int64_t column) { return bias_at(column); });
    }
    if (!all_) {
      const int64_t own_rows = pyruntime::rows_of_rank(shape_.rows, member_.ranks(), member_.rank());
      out_ = at::empty({shape_.blocks, own_rows * shape_.inner, shape_.width}, shape_.dtype);
    }
    flight_->reduce(out_, bias);
  }
  void complete() override {
    const auto total = [this](int64_t block, int64_t row, int64_t column) {
      float sum = shape_.with_bias ? bias_at(column % shape_.width) : 0;
      for (int rank = 0; rank < member_.ranks(); ++rank) sum += number_at(op_, rank, block, row, column);
      return sum;
    };
    if (all_) {
      int64_t rows = 0;
      for (const Chunk& chunk : flight_->sums_order()) {
        rows += chunk.rows;
        flight_->wait_for_sum(chunk);
        expect_numbers(flight_->sum(chunk), chunk, shape_, total, what("scatter for all"));
      }
      EXPECT_EQ(rows, shape_.rows);
    } else {
      const pyruntime::ChunkPlan plan(shape_.rows, member_.ranks(), member_.rank());
      expect_numbers(out_, plan.own(), shape_, total, what("scatter"));
    }
    flight_->finish();
  }

 private:
  float bias_at(int64_t column) const { return number_at(op_, 99, 0, 0, column); }

  bool all_;
  std::unique_ptr<pyruntime::ScatterFlight> flight_;
  at::Tensor out_;
};

enum class Kind { kGather, kScatter, kScatterAll };
inline constexpr Kind kAllKinds[] = {Kind::kGather, Kind::kScatter, Kind::kScatterAll};

inline std::unique_ptr<RingOp> begin(Member& member, Kind kind, const Shape& shape, int op) {
  if (kind == Kind::kGather) return std::make_unique<Gather>(member, shape, op);
  return std::make_unique<Scatter>(member, shape, op, kind == Kind::kScatterAll);
}

inline void run_op(Member& member, Kind kind, const Shape& shape, int op) {
  const auto running = begin(member, kind, shape, op);
  running->publish();
  running->sum();
  running->complete();
}

}  // namespace ring_test
