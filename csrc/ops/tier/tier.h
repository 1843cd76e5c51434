// The tiers in which an op may run, and the key by which one is chosen.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace pyruntime {

enum class Tier {
  kAuto,     // the tier tuned for this op, shape, dtype and group, else a fixed rule
  kUnfused,  // the collective, then the library's GEMM
  kChunked,  // the library's GEMM chunk by chunk, as the chunks arrive
  kFused,    // one kernel that waits for, or sends, the rows itself; on devices
};

const char* name_of(Tier tier);

// A tier, and the options within it.
struct TierChoice {
  Tier tier;
  int chunks = 0;          // how many chunks each rank's rows travel in; 0: the transport chooses
  std::string tiles = {};  // of the fused kernel, by name (DeviceSharing::tiles()); empty: by its rule

  // The text that tier_named() parses.
  std::string text() const;
};

// Parses "chunked", "chunked:4", "unfused:4" or "fused:large". Raises ValueError for anything else.
TierChoice tier_named(const std::string& text);

// The key that decides a tier: rows of the whole operand, widths of the GEMM (all weights) and of the input.
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
  // Each rank has some of n of a column linear's weight, and some of k of a row linear's.
  bool is_column() const { return !op.starts_with("matmul_"); }
  bool is_forward() const { return !op.ends_with("_backward"); }
  // The GEMM in the kernels' terms, [rows, k] x [k, n].
  int64_t width_of_output() const { return is_forward() ? n : k; }
  int64_t width_of_input() const { return is_forward() ? k : n; }
  // The part that is the same on all ranks: all but the width in which a weight is cut, perhaps unevenly.
  TierKey shared() const;
  std::string text() const;  // for people
};

}  // namespace pyruntime
