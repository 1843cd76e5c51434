#include "ops/tier.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <mutex>
#include <sstream>

namespace pyruntime {

namespace {

const char* name_of(Tier tier) {
  constexpr const char* kNames[] = {"auto", "unfused", "chunked", "fused"};
  return kNames[static_cast<int>(tier)];
}

std::string text_of(const TierChoice& choice) {
  std::string text = name_of(choice.tier);
  if (choice.chunks > 0) text += ":" + std::to_string(choice.chunks);
  return choice.tiles.empty() ? text : text + ":" + choice.tiles;
}

int positive_number(const std::string& text) {
  const bool is_one =
      !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos;
  return is_one ? std::stoi(text) : 0;
}

std::string in_chunks(int chunks) {
  return "each rank's rows in " + std::to_string(chunks) + (chunks == 1 ? " chunk" : " chunks");
}

// --- what was tuned

struct Tuned {
  TunedTiers tiers;
  std::map<TierKey, int> chunks;  // by TierKey::shared(): what all tiers of it name, else 0
};

// Ops look things up on the threads of backward passes too.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, Tuned> tuned;  // by world size and transport
};

Registry& registry() {
  static Registry instance;
  return instance;
}

struct Found {
  std::optional<TunedTier> tier;
  int chunks = 0;
};

// The kind of transport is its description without what was measured of the link: "ring over gloo".
Found tuned_for(const Group& group, const TierKey& key) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.tuned.empty()) return {};
  const std::string description = group.transport_description();
  const auto known = all.tuned.find({group.world_size(), description.substr(0, description.find(','))});
  if (known == all.tuned.end()) return {};
  Found found;
  const auto tier = known->second.tiers.find(key);
  if (tier != known->second.tiers.end()) found.tier = tier->second;
  const auto chunks = known->second.chunks.find(key.shared());
  if (chunks != known->second.chunks.end()) found.chunks = chunks->second;
  return found;
}

// --- what can run

// Of the weight of a column linear each rank has some of n, of that of a row linear some of k.
bool is_column(const TierKey& key) {
  return !key.op.starts_with("matmul_");
}

bool is_forward(const TierKey& key) {
  return !key.op.ends_with("_backward");
}

// The flight whose rows are multiplied, as far as the key tells; none for ops that have no fused kernel. Of a
// backward, what travels forward comes back.
std::optional<FlightDescriptor> flight_of(const TierKey& key) {
  if (!key.op.starts_with("all_gather_matmul") && !key.op.starts_with("matmul_reduce_scatter"))
    return std::nullopt;
  const Op op = is_column(key) == is_forward(key) ? Op::kAllGatherMatmul : Op::kMatmulReduceScatter;
  return FlightDescriptor{op,
                          static_cast<int32_t>(key.dtype),
                          key.rows,
                          /*row_blocks=*/1,
                          /*inner=*/1,
                          is_column(key) ? key.k : key.n,
                          /*with_bias=*/false,
                          /*own_rows=*/0};
}

// As the kernels count the GEMM of a key, [rows, k] x [k, n].
int64_t width_of_output(const TierKey& key) {
  return is_forward(key) ? key.n : key.k;
}

std::string why_not_fused(const Transport& transport, const std::optional<FlightDescriptor>& flight) {
  return flight ? transport.why_not_fused(*flight) : "no fused kernel computes it";
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

// What was tuned and can run here.
Found usable(const Group& group, const Transport& transport, const TierKey& key,
             const std::optional<FlightDescriptor>& flight) {
  Found found = tuned_for(group, key);
  if (found.chunks > 0 && !transport.why_not_pieces(found.chunks).empty()) found.chunks = 0;
  const bool can_run =
      found.tier && why_not_within(transport, found.tier->chunks, found.tier->tiles).empty() &&
      (tier_named(found.tier->tier).tier != Tier::kFused || why_not_fused(transport, flight).empty());
  if (!can_run) found.tier.reset();
  return found;
}

// Raises ValueError where what was asked by name cannot run.
void check_can_run(const Group& group, const Transport& transport, const TierKey& key,
                   const TierChoice& asked, const std::optional<FlightDescriptor>& flight) {
  const auto check = [&](const std::string& why_not, const char* instead) {
    TORCH_CHECK_VALUE(why_not.empty(), "tier='", text_of(asked), "' was asked for ", key.op, " on group '",
                      group.name(), "', but ", why_not, "; use tier='auto' or '", instead, "'.");
  };
  const bool travels_whole = asked.tier == Tier::kAuto || (asked.tier == Tier::kUnfused && asked.chunks == 0);
  if (!travels_whole) check(transport.why_not_chunked(), "unfused");
  if (asked.tier == Tier::kFused) {
    check(why_not_fused(transport, flight), "chunked");
    // What runs now waits its turn.
    if (transport.is_capturing()) check(transport.why_crowded(key.rows, width_of_output(key)), "chunked");
  }
  check(why_not_within(transport, asked.chunks, asked.tiles), name_of(asked.tier));
}

}  // namespace

TierChoice tier_named(const std::string& text) {
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

TierKey TierKey::shared() const {
  TierKey key = *this;
  (is_column(key) ? key.n : key.k) = 0;
  return key;
}

std::string TierKey::text() const {
  std::ostringstream text;
  text << op << " rows=" << rows << " n=" << n << " k=" << k << " " << c10::toString(dtype) << " "
       << c10::DeviceTypeName(device, /*lower_case=*/true);
  return text.str();
}

TierChoice choose_tier(Group& group, const char* op, const Operand& operand, int64_t rows, int64_t n,
                       int64_t k, const TierChoice& asked) {
  if (group.world_size() == 1) return {Tier::kUnfused};
  const at::Tensor& x = operand.data;
  const TierKey key{op, rows * operand.blocks * operand.inner, n, k, x.scalar_type(), x.device().type()};
  std::optional<FlightDescriptor> flight = flight_of(key);
  if (flight) flight->rows = rows, flight->row_blocks = operand.blocks, flight->inner = operand.inner;
  Transport& transport = group.transport(x.device());
  check_can_run(group, transport, key, asked, flight);
  const Found found = usable(group, transport, key, flight);
  const int chunks = asked.chunks > 0 ? asked.chunks : found.chunks;
  if (asked.tier != Tier::kAuto) return {asked.tier, chunks, asked.tiles};
  if (!transport.why_not_chunked().empty()) return {Tier::kUnfused};
  if (!found.tier) return {Tier::kChunked, chunks};
  const TierChoice tuned{tier_named(found.tier->tier).tier, chunks, found.tier->tiles};
  if (tuned.tier != Tier::kFused) return tuned;
  const int64_t width = width_of_output(key);
  const std::string crowded = transport.why_crowded(key.rows, width);
  if (crowded.empty()) return tuned;
  Transport::Crowding& counted = transport.crowding()[{key.rows, width}];
  ++counted.ops;
  counted.why = crowded;
  return {Tier::kChunked, chunks};
}

TierChoice in_few_chunks(Group& group, TierChoice choice, c10::Device device) {
  if (choice.tier != Tier::kChunked || !group.crosses_hosts(device)) return choice;
  const Transport& transport = group.transport(device);
  for (int chunks = 1; chunks <= 2 && choice.chunks == 0; ++chunks) {
    if (transport.why_not_pieces(chunks).empty()) choice.chunks = chunks;
  }
  return choice;
}

std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, c10::Device device,
                                                 const TierChoice& asked) {
  if (group.world_size() == 1) return {"local", "the group has one rank, so nothing travels"};
  device = group.known_device(device);
  if (!group.transport_sought(device)) return {name_of(asked.tier), "no op of the group has run yet"};
  Transport& transport = group.transport(device);
  const std::string whole = transport.why_not_chunked();
  if (!whole.empty()) return {"unfused", whole};
  const std::optional<FlightDescriptor> flight = flight_of(key);
  const std::string not_fused = why_not_fused(transport, flight);
  const Found found = usable(group, transport, key, flight);
  if (asked.tier != Tier::kAuto) {
    std::string was_asked = "tier='" + text_of(asked) + "' was asked for";
    if (asked.chunks == 0 && found.chunks > 0) was_asked += "; tuned: " + in_chunks(found.chunks);
    if (not_fused.empty()) return {name_of(asked.tier), was_asked};
    return {asked.tier == Tier::kFused ? "none" : name_of(asked.tier), was_asked + "; fused: " + not_fused};
  }
  if (!found.tier) {
    std::string rule = "chunked is the rule where nothing was tuned (python -m pyruntime tune)";
    if (found.chunks > 0) rule += "; tuned: " + in_chunks(found.chunks);
    return {"chunked", not_fused.empty() ? rule : rule + "; fused: " + not_fused};
  }
  std::string why = found.tier->text(found.chunks);
  const auto crowding = transport.crowding().find({key.rows, width_of_output(key)});
  if (found.tier->tier == name_of(Tier::kFused) && crowding != transport.crowding().end()) {
    const auto& [ops, last] = crowding->second;
    why += c10::str("; ", ops, ops == 1 ? " call" : " calls", " took the chunked tier: ", last);
  }
  return {found.tier->tier, why};
}

std::vector<std::string> other_choices(Group& group, const TierKey& key, c10::Device device) {
  const c10::DeviceGuard on(device);
  const Transport& transport = group.transport(group.known_device(device));
  const std::optional<FlightDescriptor> flight = flight_of(key);
  std::vector<std::string> others;
  if (!flight) return others;
  for (const int chunks : transport.other_pieces(*flight))
    others.push_back(text_of({Tier::kChunked, chunks}));
  if (!transport.why_not_fused(*flight).empty()) return others;
  const int64_t n = width_of_output(key), k = is_forward(key) ? key.k : key.n;
  for (const std::string& tiles : transport.other_tiles(key.rows, n, k))
    others.push_back(text_of({Tier::kFused, 0, tiles}));
  return others;
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

void set_tuned_tiers(int world_size, const std::string& transport, TunedTiers tiers) {
  Tuned tuned;
  for (const auto& [key, tier] : tiers) {
    const TierChoice choice = tier_named(tier.tier);
    TORCH_CHECK_VALUE(choice.tier != Tier::kAuto, "'auto' was tuned for ", key.text(), "; it is no choice.");
    TORCH_CHECK_VALUE(tier.tier == name_of(choice.tier), "the tier '", tier.tier, "' was tuned for ",
                      key.text(), "; chunks and tiles have places of their own.");
    TORCH_CHECK_VALUE(tier.chunks >= 0, tier.chunks, " chunks were tuned for ", key.text(),
                      "; use 0 for as many as the transport chooses.");
    const auto [shared, is_new] = tuned.chunks.try_emplace(key.shared(), tier.chunks);
    if (!is_new && shared->second != tier.chunks) shared->second = 0;
  }
  tuned.tiers = std::move(tiers);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tuned[{world_size, transport}] = std::move(tuned);
}

void clear_tuned_tiers() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tuned.clear();
}

}  // namespace pyruntime
