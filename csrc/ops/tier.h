// Which tier an op runs in, and why.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/operand.h"
#include "transport/group.h"

namespace pyruntime {

enum class Tier {
  kAuto,     // what was tuned for this op, shape, dtype and group, else a fixed rule
  kUnfused,  // the collective, then the library's GEMM
  kChunked,  // the library's GEMM chunk by chunk, as the chunks arrive
  kFused,    // one kernel that waits for, or sends, the rows itself; on devices
};

// A tier, and what within it can be chosen.
struct TierChoice {
  Tier tier;
  int chunks = 0;          // that each rank's rows travel in; 0: as the transport chooses
  std::string tiles = {};  // of the fused kernel, by name (Transport::tiles()); empty: by its rule
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
  // What of it is the same on all ranks: all but the width in which a weight is cut, perhaps unevenly.
  TierKey shared() const;
  std::string text() const;  // for people
};

// The choice for this call of an op on an operand of which all ranks have `rows` together; n and k as in
// TierKey. kAuto is what was tuned, where that can run here, else chunked where rows travel in chunks, else
// unfused; so it is the same in every run and on every rank. Where other fused kernels hold the device, the
// fused tier that was tuned becomes chunked. What travels, and in which order, is the same in all tiers, so
// ranks need not agree; on the number of chunks they must, and one that was tuned for the op and its rows is
// taken in every tier, unless `asked` names another.
//
// Raises ValueError where what was asked by name cannot run. In a group of one rank all tiers are unfused.
TierChoice choose_tier(Group& group, const char* op, const Operand& operand, int64_t rows, int64_t n,
                       int64_t k, const TierChoice& asked);

// That choice for rows that travel under other work: in as few chunks as may be, unless a number was tuned or
// asked for.
TierChoice in_few_chunks(Group& group, TierChoice choice, c10::Device device);

// The tier that `asked` means for this key now, and why not a faster one. Not collective. `device`: of the
// kind that the key names.
std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, c10::Device device,
                                                 const TierChoice& asked);

// Other choices worth measuring beside the tiers' own, as tier_named() takes them: half and twice the number
// of chunks, and tiles that the kernel's rule does not take. After the group's first op.
std::vector<std::string> other_choices(Group& group, const TierKey& key, c10::Device device);

// --- what `python -m pyruntime tune` measured on this machine (pyruntime/tuning)

struct TunedTier {
  std::string tier;                                     // the fastest
  int chunks;                                           // as in TierChoice
  std::string tiles;                                    // as in TierChoice
  std::vector<std::pair<std::string, double>> seconds;  // the median of each choice that was measured
  std::string date;

  // "tuned: chunked 1.2 ms, chunked:4 1 ms, unfused 1.5 ms on 2026-11-21; each rank's rows in 4 chunks"
  std::string text(int chunks_taken) const;
};

using TunedTiers = std::map<TierKey, TunedTier>;

// From now on groups of `world_size` ranks whose Group::transport_description() begins with `transport` take
// these; they replace those that were set for the same before. All ranks set the same, before a group's first
// op: ranks whose numbers of chunks differ refuse the op. Raises ValueError for a tier that is none, and for
// a number below 0.
void set_tuned_tiers(int world_size, const std::string& transport, TunedTiers tuned);
void clear_tuned_tiers();

}  // namespace pyruntime
