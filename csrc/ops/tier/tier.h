// The tiers that an op may run in, and what decides one.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace pyruntime {

enum class Tier {
  kAuto,     // what was tuned for this op, shape, dtype and group, else a fixed rule
  kUnfused,  // the collective, then the library's GEMM
  kChunked,  // the library's GEMM chunk by chunk, as the chunks arrive
  kFused,    // one kernel that waits for, or sends, the rows itself; on devices
};

const char* name_of(Tier tier);

// A tier, and what within it can be chosen.
struct TierChoice {
  Tier tier;
  int chunks = 0;          // that each rank's rows travel in; 0: as the transport chooses
  std::string tiles = {};  // of the fused kernel, by name (DeviceSharing::tiles()); empty: by its rule

  // As tier_named() takes it.
  std::string text() const;
};

// "chunked"; "chunked:4" and "unfused:4" say a number of chunks, "fused:large" names tiles. Raises ValueError
// for what is none of these.
TierChoice tier_named(const std::string& text);

// What decides a tier: rows of the whole operand, width of the GEMM (all weights together) and of the input.
struct TierKey {
  std::string op;
  int64_t rows;
  int64_t n;
  int64_t k;
  c10::ScalarType dtype;
  c10::DeviceType device;  // ranks number their devices differently

  bool operator<(const TierKey& other) const {
    return std::tie(op, rows, n, k, dtype, device) <
           std::tie(other.op, other.rows, other.n, other.k, other.dtype, other.device);
  }
  // Of the weight of a column linear each rank has some of n, of that of a row linear some of k.
  bool is_column() const { return !op.starts_with("matmul_"); }
  bool is_forward() const { return !op.ends_with("_backward"); }
  // The GEMM as kernels count it, [rows, k] x [k, n].
  int64_t width_of_output() const { return is_forward() ? n : k; }
  int64_t width_of_input() const { return is_forward() ? k : n; }
  // What of it is the same on all ranks: all but the width in which a weight is cut, perhaps unevenly.
  TierKey shared() const;
  std::string text() const;  // for people
};

}  // namespace pyruntime
