#include "ops/tier/tuned.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <sstream>

#include "transport/group.h"

namespace pyruntime {

namespace {

struct Table {
  TunedTiers tiers;
  std::map<TierKey, int> chunks;  // by TierKey::shared(): the number if all its tiers agree, else 0
};

// Ops also look up tiers on the threads of backward passes.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, Table> tables;  // by world size and transport
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

std::string in_chunks(int chunks) {
  return "each rank's rows in " + std::to_string(chunks) + (chunks == 1 ? " chunk" : " chunks");
}

std::string TunedTier::text(int chunks_taken) const {
  std::ostringstream text;
  text.precision(3);
  text << "tuned:";
  const char* before = " ";
  for (const auto& [name, median] : seconds) {
    text << before << name << " " << median * 1e3 << " ms";
    before = ", ";
  }
  text << " on " << date;
  if (chunks_taken > 0) text << "; " << in_chunks(chunks_taken);
  if (!tiles.empty()) text << "; tiles: " << tiles;
  return text.str();
}

// The kind of transport is its description without the link's measurements: "ring over gloo".
Tuned tuned_for(const Group& group, const TierKey& key) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.tables.empty()) return {};
  const std::string description = group.transport_description();
  const auto known = all.tables.find({group.world_size(), description.substr(0, description.find(','))});
  if (known == all.tables.end()) return {};
  Tuned found;
  const auto tier = known->second.tiers.find(key);
  if (tier != known->second.tiers.end()) found.tier = tier->second;
  const auto chunks = known->second.chunks.find(key.shared());
  if (chunks != known->second.chunks.end()) found.chunks = chunks->second;
  return found;
}

void set_tuned_tiers(int world_size, const std::string& transport, TunedTiers tiers) {
  Table table;
  for (const auto& [key, tier] : tiers) {
    const TierChoice choice = tier_named(tier.tier);
    TORCH_CHECK_VALUE(choice.tier != Tier::kAuto, "'auto' was tuned for ", key.text(),
                      "; name the tier that was measured fastest.");
    TORCH_CHECK_VALUE(tier.tier == name_of(choice.tier), "the tier '", tier.tier, "' was tuned for ",
                      key.text(), "; chunks and tiles have places of their own.");
    TORCH_CHECK_VALUE(tier.chunks >= 0, tier.chunks, " chunks were tuned for ", key.text(),
                      "; use 0 for as many as the transport chooses.");
    const auto [shared, is_new] = table.chunks.try_emplace(key.shared(), tier.chunks);
    if (!is_new && shared->second != tier.chunks) shared->second = 0;
  }
  table.tiers = std::move(tiers);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables[{world_size, transport}] = std::move(table);
}

void clear_tuned_tiers() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tables.clear();
}

}  // namespace pyruntime
