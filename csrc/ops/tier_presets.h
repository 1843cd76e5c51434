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
  std::string tiles;  // of its kernel, by name; empty: by the kernel's own rule
  std::vector<std::pair<std::string, double>> seconds;  // the median of each tier that was measured
  std::string date;

  // "tuned: chunked 1.2 ms, unfused 1.5 ms on 2026-11-21"
  std::string text() const;
};

using TierPresets = std::map<std::string, TierPreset>;  // by TierKey::text()

// From now on groups of `world_size` ranks whose Group::transport_description() begins with `transport` take
// these; they replace those that were set for the same before. Raises ValueError for a tier that is none.
void set_tier_presets(int world_size, const std::string& transport, TierPresets presets);
void clear_tier_presets();

// After the group's first op.
std::optional<TierPreset> find_tier_preset(const Group& group, const TierKey& key);

// Settles `trials` by the preset, where there is one that can run here: the fused tier cannot everywhere.
void settle_by_preset(const Group& group, const TierKey& key, TierTrials& trials,
                      const std::function<std::string()>& why_not_fused);

}  // namespace pyruntime
