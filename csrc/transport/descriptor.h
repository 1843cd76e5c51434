// The description of an op's data that ranks compare.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

enum class Op : int32_t {
  kAllGather = 1,
  kReduceScatter,
  kAllReduce,
  kAllGatherMatmul,
  kMatmulReduceScatter,
  kMatmulAllReduce,
  kSend,
  kAllToAll,  // only by the process group's own collectives
  kDeal,
};

const char* name_of(Op op);

// The op that one rank is about to do; ranks compare the fields that must agree when they meet in a flight.
struct FlightDescriptor {
  Op op;
  int32_t dtype;       // c10::ScalarType
  int64_t rows;        // of the whole operand, over all ranks; kUnknownRows: exchanged through own_rows
  int64_t row_blocks;  // product of the dimensions before the cut one (batch, for dim = 1)
  int64_t inner;       // product of the dimensions between the cut one and the last
  int64_t width;       // size of the last dimension of what travels
  bool with_bias;      // the owners of rows add one to their sums
  int64_t own_rows;    // rows that this rank holds; may differ between ranks
  int32_t holder = kEveryRank;  // the rank that holds all rows
  int64_t agreement = 0;        // a digest of whatever else the ranks must agree on
  int32_t pieces = 0;           // how many pieces a rank's rows travel in; 0: the transport chooses
  int32_t pass = 0;             // the op's forward or backward pass, counted by group; see Passes
  int32_t failed_passes = 0;    // see GroupContext

  c10::ScalarType scalar_type() const { return static_cast<c10::ScalarType>(dtype); }
  // The elements of one row, over all blocks.
  int64_t row_elements() const { return row_blocks * inner * width; }
  int64_t row_bytes() const;
  // The bytes of one line of a row.
  int64_t line_bytes() const { return row_bytes() / (row_blocks * inner); }
  // One chunk as it lies in memory: contiguous, [row_blocks, chunk.rows * inner, width].
  std::vector<int64_t> sizes_of(const Chunk& chunk) const { return {row_blocks, chunk.rows * inner, width}; }
  // Whether the ranks agree on the op.
  bool agrees_with(const FlightDescriptor& other) const;
  std::string text() const;
  // The same flight of some of the rows; the ranks must agree on their numbers.
  FlightDescriptor of_some(const std::vector<int64_t>& rows) const;
};

inline constexpr int64_t kUnknownRows = -1;

}  // namespace pyruntime
