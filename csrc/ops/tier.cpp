#include "ops/tier.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
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

bool is_forward(const TierKey& key) {
  return key.op.find("_backward") == std::string::npos;
}

// The flight whose rows are multiplied, as far as the key tells; none for ops that have no fused kernel. Of a
// backward, what travels forward comes back.
std::optional<FlightDescriptor> flight_of(const TierKey& key) {
  const bool column = key.op.rfind("all_gather_matmul", 0) == 0;
  if (!column && key.op.rfind("matmul_reduce_scatter", 0) != 0) return std::nullopt;
  const Op op = column == is_forward(key) ? Op::kAllGatherMatmul : Op::kMatmulReduceScatter;
  return FlightDescriptor{op,
                          static_cast<int32_t>(key.dtype),
                          key.rows,
                          /*row_blocks=*/1,
                          /*inner=*/1,
                          column ? key.k : key.n,
                          /*with_bias=*/false,
                          /*own_rows=*/0};
}

std::string why_not_fused_by_key(const Transport& transport, const TierKey& key) {
  const std::optional<FlightDescriptor> flight = flight_of(key);
  return flight ? transport.why_not_fused(*flight) : no_fused_kernel();
}

// The product of a key, as the kernels count it: [rows, k] x [k, n].
struct Widths {
  int64_t n, k;
};

Widths widths_of(const TierKey& key) {
  return is_forward(key) ? Widths{key.n, key.k} : Widths{key.k, key.n};
}

std::string why_crowded(const Transport& transport, const TierKey& key) {
  return transport.why_crowded(key.rows, widths_of(key).n);
}

// Why the transport cannot do what within a tier was chosen; empty where it can.
std::string why_not_within(const Transport& transport, int chunks, const std::string& tiles) {
  if (chunks > 0) {
    const std::string why_not = transport.why_not_pieces(chunks);
    if (!why_not.empty()) return why_not;
  }
  if (tiles.empty()) return "";
  const std::vector<std::string> known = transport.tiles();
  if (std::find(known.begin(), known.end(), tiles) != known.end()) return "";
  return known.empty() ? "there are no fused kernels" : "tiles here are " + c10::Join(", ", known);
}

// A preset that can run here.
std::optional<TierPreset> fitting_preset(Group& group, const Transport& transport, const TierKey& key,
                                         const std::function<std::string()>& why_not_fused) {
  std::optional<TierPreset> preset = find_tier_preset(group, key);
  if (!preset || !why_not_within(transport, preset->chunks, preset->tiles).empty()) return std::nullopt;
  if (preset->tier == name_of(Tier::kFused) && !why_not_fused().empty()) return std::nullopt;
  return preset;
}

// The number of chunks of this key, whatever the tier: what was tuned, which a group keeps from the first op
// that took it; that is the same op on all ranks.
int tuned_chunks(const Group& group, const Transport& transport, const TierKey& key) {
  const auto known = group.tuned_chunks().find(shared_text(key.text()));
  if (known != group.tuned_chunks().end()) return known->second;
  const int chunks = find_tuned_chunks(group, key);
  return chunks > 0 && transport.why_not_pieces(chunks).empty() ? chunks : 0;
}

int settled_chunks(Group& group, const Transport& transport, const TierKey& key) {
  const int chunks = tuned_chunks(group, transport, key);
  if (chunks > 0) group.tuned_chunks().try_emplace(shared_text(key.text()), chunks);
  return chunks;
}

// What explains a preset: with the number of chunks that is taken.
std::string text_of(TierPreset preset, int chunks) {
  preset.chunks = chunks;
  return preset.text();
}

int positive_number(const std::string& text) {
  const bool is_one =
      !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos;
  return is_one ? std::stoi(text) : 0;
}

// What a device was given is over when this returns: its ops return before they are done.
void await_device(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

std::string text_of(const Way& way) {
  std::string text = name_of(way.tier);
  if (way.chunks > 0) text += ":" + std::to_string(way.chunks);
  return way.tiles.empty() ? text : text + ":" + way.tiles;
}

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds * 1e3 << " ms";
  return text.str();
}

}  // namespace

Way way_named(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon), detail = colon < text.size() ? text.substr(colon + 1) : "";
  for (const Tier tier : {Tier::kAuto, Tier::kUnfused, Tier::kChunked, Tier::kFused}) {
    if (name != name_of(tier)) continue;
    if (colon == std::string::npos) return {tier};
    if (tier == Tier::kFused && !detail.empty()) return {tier, 0, detail};
    const bool takes_chunks = tier == Tier::kUnfused || tier == Tier::kChunked;
    if (takes_chunks && positive_number(detail) > 0) return {tier, positive_number(detail)};
  }
  TORCH_CHECK_VALUE(false, "tier='", text, "' is no tier; use 'auto', 'fused', 'chunked' or 'unfused', ",
                    "'chunked:4' for a number of chunks or 'fused:large' for tiles.");
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

std::string shared_text(const std::string& key) {
  const size_t cut = key.find(key.rfind("all_gather_matmul", 0) == 0 ? " n=" : " k=");
  if (cut == std::string::npos) return key;
  return key.substr(0, cut) + key.substr(std::min(key.find(' ', cut + 1), key.size()));
}

std::string no_fused_kernel() {
  return "no fused kernel computes it";
}

Tensors run_in_tier(Group& group, Transport* transport, const TierKey& key, const Way& asked,
                    const std::function<std::string()>& why_not_fused,
                    const std::function<Tensors(const Way&)>& body) {
  const c10::DeviceGuard on(key.device);
  const auto check = [&](bool possible, const std::string& why_not, const char* instead) {
    TORCH_CHECK_VALUE(possible, "tier='", text_of(asked), "' was asked for ", key.op, " on group '",
                      group.name(), "', but ", why_not, "; use tier='auto' or '", instead, "'.");
  };
  if (transport == nullptr) {
    const bool is_plain = asked.tier == Tier::kAuto || (asked.tier == Tier::kUnfused && asked.chunks == 0);
    check(is_plain, group.why_no_transport(key.device), "unfused");
    return body({Tier::kUnfused});
  }
  if (asked.tier == Tier::kFused) {
    const std::string why_not = why_not_fused();
    check(why_not.empty(), why_not, "chunked");
    // What runs now waits its turn.
    const std::string crowded = transport->is_capturing() ? why_crowded(*transport, key) : "";
    check(crowded.empty(), crowded, "chunked");
  }
  const std::string why_not = why_not_within(*transport, asked.chunks, asked.tiles);
  check(why_not.empty(), why_not, name_of(asked.tier));
  const int chunks = asked.chunks > 0 ? asked.chunks : settled_chunks(group, *transport, key);
  if (asked.tier != Tier::kAuto) return body({asked.tier, chunks, asked.tiles});

  TierTrials& trials = group.tier_trials()[key.text()];
  if (trials.tier.empty()) {
    if (const auto preset = fitting_preset(group, *transport, key, why_not_fused)) {
      trials.tier = preset->tier;
      trials.tiles = preset->tiles;
      trials.tuned = text_of(*preset, chunks);
    }
  }
  if (!trials.tier.empty()) {
    // Calls with one key may differ in what the key does not say: rows in several blocks, say.
    const Tier settled = way_named(trials.tier).tier;
    if (settled != Tier::kFused) return body({settled, chunks});
    if (!why_not_fused().empty()) return body({Tier::kChunked, chunks});
    const std::string crowded = why_crowded(*transport, key);
    if (crowded.empty()) return body({settled, chunks, trials.tiles});
    ++trials.crowded;
    trials.why_crowded = crowded;
    return body({Tier::kChunked, chunks});
  }
  check(!transport->is_capturing(),
        "its tiers are still being measured, which a CUDA graph cannot capture: run it a dozen times before",
        "chunked");
  await_device(key.device);
  const std::string not_fused = why_not_fused();
  if (!not_fused.empty()) trials.why_not_fused = not_fused;
  const Tier tier = next_trial(trials);
  if (tier == Tier::kFused) {
    // Said of this moment, not of the kernel: its trial comes later.
    const std::string crowded = why_crowded(*transport, key);
    if (!crowded.empty()) {
      ++trials.crowded;
      trials.why_crowded = crowded;
      return body({Tier::kChunked, chunks});
    }
  }
  const double start = monotonic_seconds();
  Tensors result = body({tier, chunks});
  await_device(key.device);
  calls_of(trials, tier).push_back(monotonic_seconds() - start);
  settle(trials);
  return result;
}

std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, const Way& asked) {
  if (group.world_size() == 1) return {"local", "the group has one rank, so nothing travels"};
  const c10::Device device = group.known_device(key.device);
  if (!group.transport_sought(device)) return {name_of(asked.tier), "no op of the group has run yet"};
  const Transport* transport = group.transport(device);
  if (transport == nullptr) return {"unfused", group.why_no_transport(device)};
  const auto why_not_fused = [&] { return why_not_fused_by_key(*transport, key); };
  if (asked.tier != Tier::kAuto) {
    std::string was_asked = "tier='" + text_of(asked) + "' was asked for";
    const int chunks = tuned_chunks(group, *transport, key);
    if (asked.chunks == 0 && chunks > 0) was_asked += "; tuned: " + in_chunks(chunks);
    const std::string why_not = why_not_fused();
    if (why_not.empty()) return {name_of(asked.tier), was_asked};
    return {asked.tier == Tier::kFused ? "none" : name_of(asked.tier), was_asked + "; fused: " + why_not};
  }
  const auto known = group.tier_trials().find(key.text());
  if (known == group.tier_trials().end()) {
    const std::optional<TierPreset> preset = fitting_preset(group, *transport, key, why_not_fused);
    if (preset) return {preset->tier, text_of(*preset, tuned_chunks(group, *transport, key))};
    return {"auto", "no call with this shape yet: the first ones measure the tiers"};
  }
  if (known->second.tier.empty())
    return {"auto", "being measured: the first calls with this shape take the tiers in turn"};
  const TierTrials& trials = known->second;
  const std::string crowded = trials.crowded == 0
                                  ? ""
                                  : c10::str("; ", trials.crowded, trials.crowded == 1 ? " call" : " calls",
                                             " took the chunked tier: ", trials.why_crowded);
  if (!trials.tuned.empty()) return {trials.tier, trials.tuned + crowded};
  std::string measured = "measured: chunked " + milliseconds(trials.chunked_s);
  if (trials.fused_s > 0) measured += ", fused " + milliseconds(trials.fused_s);
  measured += ", unfused " + milliseconds(trials.unfused_s);
  if (!trials.why_not_fused.empty()) measured += "; fused: " + trials.why_not_fused;
  return {trials.tier, measured + crowded};
}

std::vector<std::string> other_ways(Group& group, const TierKey& key) {
  const c10::DeviceGuard on(key.device);
  const Transport* transport = group.transport(group.known_device(key.device));
  const std::optional<FlightDescriptor> flight = flight_of(key);
  std::vector<std::string> ways;
  if (transport == nullptr || !flight) return ways;
  for (const int chunks : transport->other_pieces(*flight)) ways.push_back(text_of({Tier::kChunked, chunks}));
  if (!transport->why_not_fused(*flight).empty()) return ways;
  const Widths widths = widths_of(key);
  for (const std::string& tiles : transport->other_tiles(key.rows, widths.n, widths.k)) {
    ways.push_back(text_of({Tier::kFused, 0, tiles}));
  }
  return ways;
}

}  // namespace pyruntime
