#include "ops/tier.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "core/deadline.h"
#include "ops/tier_presets.h"

namespace pyruntime {

namespace {

// Calls of each tier before auto chooses; the first is a warm-up and does not count.
constexpr size_t kTrials = 4;
// The chunked tier is kept unless the unfused one is faster by more than the noise.
constexpr double kUnfusedMustWinBy = 0.97;

double median_after_warm_up(const std::vector<double>& seconds) {
  std::vector<double> sorted(seconds.begin() + 1, seconds.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

// The tier of the next call, for a key that auto has not settled yet.
Tier next_trial(const TierTrials& trials) {
  return trials.chunked.size() <= trials.unfused.size() ? Tier::kChunked : Tier::kUnfused;
}

void settle(TierTrials& trials) {
  if (trials.unfused.size() < kTrials) return;
  trials.chunked_s = median_after_warm_up(trials.chunked);
  trials.unfused_s = median_after_warm_up(trials.unfused);
  trials.tier =
      name_of(trials.unfused_s < kUnfusedMustWinBy * trials.chunked_s ? Tier::kUnfused : Tier::kChunked);
}

// What a device was given is over when this returns: its ops return before they are done.
void await_device(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds * 1e3 << " ms";
  return text.str();
}

}  // namespace

Tier tier_named(const std::string& name) {
  if (name == "auto") return Tier::kAuto;
  if (name == "chunked") return Tier::kChunked;
  if (name == "unfused") return Tier::kUnfused;
  TORCH_CHECK_VALUE(name != "fused",
                    "tier='fused' was asked for and no fused kernel exists for this device; use 'auto', "
                    "'chunked' or 'unfused'.");
  TORCH_CHECK_VALUE(false, "tier='", name, "' is no tier; use 'auto', 'chunked' or 'unfused'.");
}

const char* name_of(Tier tier) {
  switch (tier) {
    case Tier::kAuto:
      return "auto";
    case Tier::kUnfused:
      return "unfused";
    case Tier::kChunked:
      return "chunked";
  }
  return "unknown";
}

std::string TierKey::text() const {
  std::ostringstream text;
  text << op << " rows=" << rows << " n=" << n << " k=" << k << " " << c10::toString(dtype) << " "
       << c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  return text.str();
}

Tensors run_in_tier(Group& group, Transport* transport, const TierKey& key, Tier asked,
                    const std::function<Tensors(Tier)>& body) {
  if (transport == nullptr) {
    TORCH_CHECK_VALUE(asked != Tier::kChunked, "tier='chunked' was asked for ", key.op, " on group '",
                      group.name(), "', but ", group.why_no_transport(key.device),
                      "; use tier='auto' or 'unfused'.");
    return body(Tier::kUnfused);
  }
  if (asked != Tier::kAuto) return body(asked);

  TierTrials& trials = group.tier_trials()[key.text()];
  if (trials.tier.empty()) settle_by_preset(group, key, trials);
  if (!trials.tier.empty()) return body(tier_named(trials.tier));
  const Tier tier = next_trial(trials);
  await_device(key.device);
  const double start = monotonic_seconds();
  Tensors result = body(tier);
  await_device(key.device);
  (tier == Tier::kChunked ? trials.chunked : trials.unfused).push_back(monotonic_seconds() - start);
  settle(trials);
  return result;
}

std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, Tier asked) {
  if (group.world_size() == 1) return {"local", "the group has one rank, so nothing travels"};
  if (!group.transport_sought()) return {name_of(asked), "no op of the group has run yet"};
  if (group.transport(key.device) == nullptr) return {"unfused", group.why_no_transport(key.device)};
  if (asked != Tier::kAuto) {
    return {name_of(asked), std::string("tier='") + name_of(asked) +
                                "' was asked for; fused: no kernel for " + key.device.str()};
  }
  const auto known = group.tier_trials().find(key.text());
  if (known == group.tier_trials().end()) {
    const std::optional<TierPreset> preset = find_tier_preset(group, key);
    if (preset) return {preset->tier, preset->text()};
    return {"auto", "no call with this shape yet: the first ones measure the tiers"};
  }
  if (known->second.tier.empty())
    return {"auto", "being measured: the first calls with this shape take the tiers in turn"};
  if (!known->second.tuned.empty()) return {known->second.tier, known->second.tuned};
  return {known->second.tier, "measured: chunked " + milliseconds(known->second.chunked_s) + ", unfused " +
                                  milliseconds(known->second.unfused_s) + "; fused: no kernel for " +
                                  key.device.str()};
}

}  // namespace pyruntime
