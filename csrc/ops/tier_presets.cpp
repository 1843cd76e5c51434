#include "ops/tier_presets.h"

#include <mutex>
#include <sstream>

namespace pyruntime {

namespace {

// Ops look things up on the threads of backward passes too.
struct Tuned {
  TierPresets presets;
  std::map<std::string, int> chunks;  // by TierKey::shared_text()
};

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, Tuned> tuned;  // by world size and transport
};

Registry& registry() {
  static Registry instance;
  return instance;
}

// The kind of transport, without what was measured of the link: "symmetric memory", "ring over gloo".
std::string kind_of(const std::string& description) {
  return description.substr(0, description.find(','));
}

// Of what `all` knows of groups like this one; nullptr where that is nothing.
const Tuned* known_of(const Registry& all, const Group& group) {
  if (all.tuned.empty()) return nullptr;
  const auto found = all.tuned.find({group.world_size(), kind_of(group.transport_description())});
  return found == all.tuned.end() ? nullptr : &found->second;
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
  if (chunks > 0) text << "; " << in_chunks(chunks);
  if (!tiles.empty()) text << "; tiles: " << tiles;
  return text.str();
}

void set_tier_presets(int world_size, const std::string& transport, TierPresets presets) {
  for (const auto& [key, preset] : presets) {
    const Way way = way_named(preset.tier);
    TORCH_CHECK_VALUE(way.tier != Tier::kAuto, "the preset of ", key, " is 'auto', which is no choice.");
    TORCH_CHECK_VALUE(preset.tier == name_of(way.tier), "the preset of ", key, " has the tier '", preset.tier,
                      "'; chunks and tiles have places of their own.");
    TORCH_CHECK_VALUE(preset.chunks >= 0, "the preset of ", key, " has ", preset.chunks,
                      " chunks; use 0 for as many as the transport chooses.");
  }
  Tuned tuned;
  for (const auto& [key, preset] : presets) {
    const auto [place, is_new] = tuned.chunks.try_emplace(shared_text(key), preset.chunks);
    if (!is_new && place->second != preset.chunks) place->second = 0;
  }
  tuned.presets = std::move(presets);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tuned[{world_size, transport}] = std::move(tuned);
}

void clear_tier_presets() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tuned.clear();
}

std::string in_chunks(int chunks) {
  return "each rank's rows in " + std::to_string(chunks) + (chunks == 1 ? " chunk" : " chunks");
}

std::optional<TierPreset> find_tier_preset(const Group& group, const TierKey& key) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Tuned* known = known_of(all, group);
  if (known == nullptr) return std::nullopt;
  const auto found = known->presets.find(key.text());
  if (found == known->presets.end()) return std::nullopt;
  return found->second;
}

int find_tuned_chunks(const Group& group, const TierKey& key) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Tuned* known = known_of(all, group);
  if (known == nullptr) return 0;
  const auto found = known->chunks.find(shared_text(key.text()));
  return found == known->chunks.end() ? 0 : found->second;
}

}  // namespace pyruntime
