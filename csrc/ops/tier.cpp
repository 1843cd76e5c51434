#include "ops/tier.h"

#include <c10/core/DeviceGuard.h>
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
// The chunked tier is kept unless another one is faster by more than the noise.
constexpr double kOthersMustWinBy = 0.97;

double median_after_warm_up(const std::vector<double>& seconds) {
  std::vector<double> sorted(seconds.begin() + 1, seconds.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

// Its calls so far, in seconds.
std::vector<double>& calls_of(TierTrials& trials, Tier tier) {
  if (tier == Tier::kFused) return trials.fused;
  return tier == Tier::kChunked ? trials.chunked : trials.unfused;
}

// The tier of the next call, for a key that auto has not settled yet. The unfused one comes last.
Tier next_trial(const TierTrials& trials) {
  const size_t rounds = trials.unfused.size();
  if (trials.chunked.size() <= rounds) return Tier::kChunked;
  const bool fused_is_due = trials.why_not_fused.empty() && trials.fused.size() <= rounds;
  return fused_is_due ? Tier::kFused : Tier::kUnfused;
}

void settle(TierTrials& trials) {
  if (trials.unfused.size() < kTrials) return;
  Tier best = Tier::kChunked;
  double least = trials.chunked_s = median_after_warm_up(trials.chunked);
  const auto compare = [&](Tier tier, double& seconds) {
    seconds = median_after_warm_up(calls_of(trials, tier));
    if (seconds >= kOthersMustWinBy * least) return;
    best = tier;
    least = seconds;
  };
  if (trials.fused.size() >= kTrials) compare(Tier::kFused, trials.fused_s);
  compare(Tier::kUnfused, trials.unfused_s);
  trials.tier = name_of(best);
}

// Why no fused kernel can run, as far as the key tells. Of a backward, what travels forward comes back.
std::string why_not_fused_by_key(const Transport& transport, const TierKey& key) {
  const bool forward = key.op.find("_backward") == std::string::npos;
  const bool column = key.op.rfind("all_gather_matmul", 0) == 0;
  if (!column && key.op.rfind("matmul_reduce_scatter", 0) != 0) return no_fused_kernel();
  const Op op = column == forward ? Op::kAllGatherMatmul : Op::kMatmulReduceScatter;
  return transport.why_not_fused({op, static_cast<int32_t>(key.dtype), key.rows, /*row_blocks=*/1,
                                  /*inner=*/1, column ? key.k : key.n, /*with_bias=*/false,
                                  /*own_rows=*/0});
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
  if (name == "fused") return Tier::kFused;
  TORCH_CHECK_VALUE(false, "tier='", name, "' is no tier; use 'auto', 'fused', 'chunked' or 'unfused'.");
}

const char* name_of(Tier tier) {
  switch (tier) {
    case Tier::kAuto:
      return "auto";
    case Tier::kUnfused:
      return "unfused";
    case Tier::kChunked:
      return "chunked";
    case Tier::kFused:
      return "fused";
  }
  return "unknown";
}

std::string TierKey::text() const {
  std::ostringstream text;
  text << op << " rows=" << rows << " n=" << n << " k=" << k << " " << c10::toString(dtype) << " "
       << c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  return text.str();
}

std::string no_fused_kernel() {
  return "no fused kernel computes it";
}

Tensors run_in_tier(Group& group, Transport* transport, const TierKey& key, Tier asked,
                    const std::function<std::string()>& why_not_fused,
                    const std::function<Tensors(Tier)>& body) {
  const c10::DeviceGuard on(key.device);
  const auto check = [&](bool possible, const std::string& why_not, const char* instead) {
    TORCH_CHECK_VALUE(possible, "tier='", name_of(asked), "' was asked for ", key.op, " on group '",
                      group.name(), "', but ", why_not, "; use tier='auto' or '", instead, "'.");
  };
  if (transport == nullptr) {
    check(asked == Tier::kAuto || asked == Tier::kUnfused, group.why_no_transport(key.device), "unfused");
    return body(Tier::kUnfused);
  }
  if (asked == Tier::kFused) {
    const std::string why_not = why_not_fused();
    check(why_not.empty(), why_not, "chunked");
  }
  if (asked != Tier::kAuto) return body(asked);

  TierTrials& trials = group.tier_trials()[key.text()];
  if (trials.tier.empty()) settle_by_preset(group, key, trials, why_not_fused);
  if (!trials.tier.empty()) {
    // Calls with one key may differ in what the key does not say: rows in several blocks, say.
    const Tier settled = tier_named(trials.tier);
    return body(settled == Tier::kFused && !why_not_fused().empty() ? Tier::kChunked : settled);
  }
  check(!transport->is_capturing(),
        "its tiers are still being measured, which a CUDA graph cannot capture: run it a dozen times before",
        "chunked");
  trials.why_not_fused = why_not_fused();
  const Tier tier = next_trial(trials);
  await_device(key.device);
  const double start = monotonic_seconds();
  Tensors result = body(tier);
  await_device(key.device);
  calls_of(trials, tier).push_back(monotonic_seconds() - start);
  settle(trials);
  return result;
}

std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, Tier asked) {
  if (group.world_size() == 1) return {"local", "the group has one rank, so nothing travels"};
  const c10::Device device = group.known_device(key.device);
  if (!group.transport_sought(device)) return {name_of(asked), "no op of the group has run yet"};
  const Transport* transport = group.transport(device);
  if (transport == nullptr) return {"unfused", group.why_no_transport(device)};
  if (asked != Tier::kAuto) {
    const std::string why_not = why_not_fused_by_key(*transport, key);
    const std::string was_asked = std::string("tier='") + name_of(asked) + "' was asked for";
    if (why_not.empty()) return {name_of(asked), was_asked};
    return {asked == Tier::kFused ? "none" : name_of(asked), was_asked + "; fused: " + why_not};
  }
  const auto known = group.tier_trials().find(key.text());
  if (known == group.tier_trials().end()) {
    const std::optional<TierPreset> preset = find_tier_preset(group, key);
    const bool can_run = preset && (preset->tier != "fused" || why_not_fused_by_key(*transport, key).empty());
    if (can_run) return {preset->tier, preset->text()};
    return {"auto", "no call with this shape yet: the first ones measure the tiers"};
  }
  if (known->second.tier.empty())
    return {"auto", "being measured: the first calls with this shape take the tiers in turn"};
  const TierTrials& trials = known->second;
  if (!trials.tuned.empty()) return {trials.tier, trials.tuned};
  std::string measured = "measured: chunked " + milliseconds(trials.chunked_s);
  if (trials.fused_s > 0) measured += ", fused " + milliseconds(trials.fused_s);
  measured += ", unfused " + milliseconds(trials.unfused_s);
  if (!trials.why_not_fused.empty()) measured += "; fused: " + trials.why_not_fused;
  return {trials.tier, measured};
}

}  // namespace pyruntime
