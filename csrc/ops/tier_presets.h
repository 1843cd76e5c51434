// What `python -m pyruntime tune` measured on this machine (pyruntime/tuning), so that tier="auto" starts
// settled. For a group counts how many ranks it has and how its chunks travel; for an op TierKey::text().
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/tier.h"

namespace pyruntime {

struct TierPreset {
  std::string tier;   // the fastest
  int chunks;         // that each rank's rows travel in; 0: as the transport chooses
  std::string tiles;  // of the fused kernel, by name; empty: by its own rule
  std::vector<std::pair<std::string, double>> seconds;  // the median of each way that was measured
  std::string date;

  // "tuned: chunked 1.2 ms, chunked:4 1 ms, unfused 1.5 ms on 2026-11-21; each rank's rows in 4 chunks"
  std::string text() const;
};

using TierPresets = std::map<std::string, TierPreset>;  // by TierKey::text()

// From now on groups of `world_size` ranks whose Group::transport_description() begins with `transport` take
// these; they replace those that were set for the same before. All ranks set the same, before a group's first
// op: ranks whose numbers of chunks differ refuse the op. Raises ValueError for a tier that is none, and for
// a number below 0.
void set_tier_presets(int world_size, const std::string& transport, TierPresets presets);
void clear_tier_presets();

// After the group's first op.
std::optional<TierPreset> find_tier_preset(const Group& group, const TierKey& key);
// The number of chunks for this op, the same on all ranks even where they hold parts of a weight of different
// widths: the one that all presets of that op and those rows agree on; else 0.
int find_tuned_chunks(const Group& group, const TierKey& key);

// "each rank's rows in 4 chunks"
std::string in_chunks(int chunks);

}  // namespace pyruntime
