#include "ops/tier_presets.h"

#include <mutex>
#include <sstream>

namespace pyruntime {

namespace {

// Ops look things up on the threads of backward passes too.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, TierPresets> presets;  // by world size and transport
};

Registry& registry() {
  static Registry instance;
  return instance;
}

// The kind of transport, without what was measured of the link: "symmetric memory", "ring over gloo".
std::string kind_of(const std::string& description) {
  return description.substr(0, description.find(','));
}

}  // namespace

std::string TierPreset::text() const {
  std::ostringstream text;
  text.precision(3);
  text << "tuned:";
  const char* before = " ";
  for (const auto& [name, median] : seconds) {
    text << before << name << " " << median * 1e3 << " ms";
    before = ", ";
  }
  text << " on " << date;
  return text.str();
}

void set_tier_presets(int world_size, const std::string& transport, TierPresets presets) {
  for (const auto& [key, preset] : presets) {
    TORCH_CHECK_VALUE(tier_named(preset.tier) != Tier::kAuto, "the preset of ", key,
                      " is 'auto', which is no choice.");
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.presets[{world_size, transport}] = std::move(presets);
}

void clear_tier_presets() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.presets.clear();
}

std::optional<TierPreset> find_tier_preset(const Group& group, const TierKey& key) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.presets.empty()) return std::nullopt;
  const auto of_group = all.presets.find({group.world_size(), kind_of(group.transport_description())});
  if (of_group == all.presets.end()) return std::nullopt;
  const auto found = of_group->second.find(key.text());
  if (found == of_group->second.end()) return std::nullopt;
  return found->second;
}

void settle_by_preset(const Group& group, const TierKey& key, TierTrials& trials,
                      const std::function<std::string()>& why_not_fused) {
  const std::optional<TierPreset> preset = find_tier_preset(group, key);
  if (!preset || (tier_named(preset->tier) == Tier::kFused && !why_not_fused().empty())) return;
  trials.tier = preset->tier;
  trials.tuned = preset->text();
}

}  // namespace pyruntime
