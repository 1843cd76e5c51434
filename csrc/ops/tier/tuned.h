// The tiers that `python -m pyruntime tune` measured on this machine (pyruntime/tuning).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/tier/tier.h"

namespace pyruntime {

struct TunedTier {
  std::string tier;                                     // the fastest
  int chunks;                                           // as in TierChoice
  std::string tiles;                                    // as in TierChoice
  std::vector<std::pair<std::string, double>> seconds;  // the median of each measured choice
  std::string date;

  // "tuned: chunked 1.2 ms, chunked:4 1 ms, unfused 1.5 ms on 2026-11-21; each rank's rows in 4 chunks"
  std::string text(int chunks_taken) const;
};

using TunedTiers = std::map<TierKey, TunedTier>;

// Sets the tiers of groups with `world_size` ranks whose Group::transport_description() begins with
// `transport`; they replace the former ones. All ranks set the same, before a group's first op: ranks with
// different numbers of chunks refuse the op. Raises ValueError for an unknown tier and for a number below 0.
void set_tuned_tiers(int world_size, const std::string& transport, TunedTiers tuned);
void clear_tuned_tiers();

// The tuned choices for one key.
struct Tuned {
  std::optional<TunedTier> tier;
  int chunks = 0;  // of all tiers, if they agree
};

class Group;
Tuned tuned_for(const Group& group, const TierKey& key);

// "each rank's rows in 4 chunks"
std::string in_chunks(int chunks);

}  // namespace pyruntime
