// Which way an op runs, and why.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "transport/group.h"

namespace pyruntime {

enum class Tier {
  kAuto,     // whichever of the others was measured to be fastest for this op, shape, dtype and group
  kUnfused,  // the collective, then the library's GEMM
  kChunked,  // the library's GEMM chunk by chunk, as the chunks arrive
  kFused,    // one kernel that waits for, or sends, the rows itself; on devices
};

// A tier, and what within it can be chosen.
struct Way {
  Tier tier;
  int chunks = 0;          // that each rank's rows travel in; 0: as the transport chooses
  std::string tiles = {};  // of the fused kernel, by name (Transport::tiles()); empty: by its rule
};

// "chunked"; "chunked:4" and "unfused:4" say a number of chunks, "fused:large" names tiles. Raises ValueError
// for what is none of these.
Way way_named(const std::string& text);
const char* name_of(Tier tier);

// What decides a tier: rows of the whole operand, width of the product (all weights together) and of the
// input.
struct TierKey {
  std::string op;
  int64_t rows;
  int64_t n;
  int64_t k;
  c10::ScalarType dtype;
  c10::Device device;

  // The device by its kind alone: ranks number their devices differently.
  std::string text() const;
};

// What of TierKey::text() is the same on all ranks: all but the width in which a weight is cut, perhaps
// unevenly: n of all_gather_matmul, k of the others.
std::string shared_text(const std::string& key);

using Tensors = std::vector<at::Tensor>;

// Runs `body` in the way that was asked for. For kAuto the first calls with this key take the tiers in turn
// and are timed; the later ones take the tier whose median was lowest. Each rank chooses for itself: what
// travels, and in which order, is the same in all tiers, so ranks need not agree (their shapes may differ,
// too, where a weight is cut unevenly). The number of chunks is what they must agree on: one that was tuned
// for the op and its rows is taken in every tier, unless `asked` names another.
//
// `why_not_fused`: asked where that matters; then kAuto leaves the fused tier out, and kFused raises
// ValueError.
Tensors run_in_tier(Group& group, Transport* transport, const TierKey& key, const Way& asked,
                    const std::function<std::string()>& why_not_fused,
                    const std::function<Tensors(const Way&)>& body);
// For ops that have none.
std::string no_fused_kernel();

// The tier that `asked` means for this key now, and why not a faster one. Not collective.
std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, const Way& asked);

// Other ways worth measuring beside the tiers' own, as way_named() takes them: half and twice the number of
// chunks, and tiles that the kernel's rule does not take. After the group's first op.
std::vector<std::string> other_ways(Group& group, const TierKey& key);

}  // namespace pyruntime
