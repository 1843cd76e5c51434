#include "ops/tier/route.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "ops/tier/tuned.h"
#include "transport/device_sharing.h"

namespace pyruntime {

namespace {

// --- which tiers can run

// The flight whose rows are multiplied, as far as the key says; none for ops without a fused kernel. In a
// backward, the direction of travel is reversed.
std::optional<FlightDescriptor> flight_of(const TierKey& key) {
  if (!key.op.starts_with("all_gather_matmul") && !key.op.starts_with("matmul_reduce_scatter"))
    return std::nullopt;
  const Op op = key.is_column() == key.is_forward() ? Op::kAllGatherMatmul : Op::kMatmulReduceScatter;
  return FlightDescriptor{op,
                          static_cast<int32_t>(key.dtype),
                          key.rows,
                          /*row_blocks=*/1,
                          /*inner=*/1,
                          key.is_column() ? key.k : key.n,
                          /*with_bias=*/false,
                          /*own_rows=*/0};
}

// A group's tiers for one key.
class Choices {
 public:
  Choices(Group& group, Transport& transport, const TierKey& key, std::optional<FlightDescriptor> flight,
          bool rounds)
      : group_(group),
        transport_(transport),
        device_(transport.device_sharing()),
        key_(key),
        flight_(flight),
        rounds_(rounds) {
    tuned_ = tuned_for(group, key);
    if (tuned_.chunks > 0 && !transport.why_not_pieces(tuned_.chunks).empty()) tuned_.chunks = 0;
    const bool can_run = tuned_.tier && why_not_within(tuned_.tier->chunks, tuned_.tier->tiles).empty() &&
                         (tier_named(tuned_.tier->tier).tier != Tier::kFused || why_not_fused().empty());
    if (!can_run) tuned_.tier.reset();
  }

  // The tuned choices; the tier only if it can run here.
  const Tuned& tuned() const { return tuned_; }

  std::string why_not_fused() const {
    if (!flight_) return "no fused kernel computes it";
    if (rounds_ && flight_->op == Op::kAllGatherMatmul) {
      return "the fused kernels multiply rows as they travel, and these travel rounded";
    }
    if (device_ != nullptr) return device_->why_not_fused(*flight_);
    return "there are fused kernels for devices of one host only, and the group's chunks travel by " +
           transport_.description();
  }

  // Raises ValueError if a tier that was requested by name cannot run.
  void check_can_run(const TierChoice& asked) const {
    const auto check = [&](const std::string& why_not, const char* instead) {
      TORCH_CHECK_VALUE(why_not.empty(), "tier='", asked.text(), "' was asked for ", key_.op, " on group '",
                        group_.name(), "', but ", why_not, "; use tier='auto' or '", instead, "'.");
    };
    const bool travels_whole =
        asked.tier == Tier::kAuto || (asked.tier == Tier::kUnfused && asked.chunks == 0);
    if (!travels_whole) check(transport_.why_not_chunked(), "unfused");
    if (asked.tier == Tier::kFused) {
      check(why_not_fused(), "chunked");
      // A kernel that runs now can wait for others; a captured one cannot.
      if (device_->is_capturing()) check(device_->why_crowded(key_.rows, key_.width_of_output()), "chunked");
    }
    check(why_not_within(asked.chunks, asked.tiles), name_of(asked.tier));
  }

  TierChoice choose(const TierChoice& asked) const {
    const int chunks = asked.chunks > 0 ? asked.chunks : tuned_.chunks;
    if (asked.tier != Tier::kAuto) return {asked.tier, chunks, asked.tiles};
    if (!transport_.why_not_chunked().empty()) return {Tier::kUnfused};
    if (!tuned_.tier) return {Tier::kChunked, chunks};
    const TierChoice tuned{tier_named(tuned_.tier->tier).tier, chunks, tuned_.tier->tiles};
    if (tuned.tier != Tier::kFused || device_->makes_room_for(key_.rows, key_.width_of_output()))
      return tuned;
    return {Tier::kChunked, chunks};
  }

 private:
  // Says why the transport cannot run a tier with these chunks and tiles; empty if it can.
  std::string why_not_within(int chunks, const std::string& tiles) const {
    if (chunks > 0) {
      const std::string why_not = transport_.why_not_pieces(chunks);
      if (!why_not.empty()) return why_not;
    }
    if (tiles.empty()) return "";
    if (device_ == nullptr) return "there are no fused kernels";
    const std::vector<std::string> known = device_->tiles();
    if (std::find(known.begin(), known.end(), tiles) != known.end()) return "";
    return "tiles here are " + c10::Join(", ", known);
  }

  const Group& group_;
  const Transport& transport_;
  DeviceSharing* device_;  // null: there are no fused kernels
  const TierKey& key_;
  std::optional<FlightDescriptor> flight_;
  bool rounds_;  // whether gathered rows travel in fewer bytes
  Tuned tuned_;
};

TierChoice choose_tier(Group& group, const Call& call, const char* op, int64_t rows, const TierChoice& asked,
                       bool rounds = false) {
  if (group.world_size() == 1) return {Tier::kUnfused};
  const at::Tensor& x = call.x.data;
  const TierKey key{
      op, rows * call.x.blocks * call.x.inner, call.n, call.k, x.scalar_type(), x.device().type()};
  std::optional<FlightDescriptor> flight = flight_of(key);
  if (flight) flight->rows = rows, flight->row_blocks = call.x.blocks, flight->inner = call.x.inner;
  const Choices choices(group, group.transport(x.device()), key, flight, rounds);
  choices.check_can_run(asked);
  return choices.choose(asked);
}

// Takes as few chunks as possible, unless a number was tuned or requested.
void take_few_chunks(Group& group, TierChoice& choice, c10::Device device) {
  if (choice.tier != Tier::kChunked || !group.crosses_hosts(device)) return;
  const Transport& transport = group.transport(device);
  for (int chunks = 1; chunks <= 2 && choice.chunks == 0; ++chunks) {
    if (transport.why_not_pieces(chunks).empty()) choice.chunks = chunks;
  }
}

Wire wire_named(c10::string_view format, const at::Tensor& rows, const Group& group) {
  const Wire wire = Wire::named(format, rows.scalar_type(), rows.device());
  TORCH_CHECK_VALUE(!wire.rounds() || group.world_size() > 1, "wire='", format,
                    "' was asked for, and one rank alone gathers nothing; leave it out.");
  return wire;
}

}  // namespace

Route choose_route(const Call& call) {
  const TierChoice asked = tier_named(std::string(call.tier));
  Group& group = Group::get(std::string(call.group));
  const Wire wire = wire_named(call.wire, call.x.data, group);
  const int64_t rows = call.rows ? agreed_rows(call.op, group, call.x, *call.rows) : call.x.rows;
  const TierChoice tier = choose_tier(group, call, call.op, rows, asked, wire.rounds());
  Route route{group, rows, tier, wire, group_of_sums(call.sums)};
  if (route.sums != nullptr || call.under_other_work)
    take_few_chunks(group, route.tier, call.x.data.device());
  route.together = call.under_other_work && tier.tier == Tier::kChunked && !call.x.data.is_cpu();
  if (route.sums != nullptr) route.sums_tier = choose_tier(*route.sums, call, call.op_of_sums, rows, asked);
  return route;
}

int64_t agreed_rows(const char* op, Group& group, const Operand& x_shard, int64_t rows) {
  if (rows != kUnknownRows) {
    const int64_t share = rows_of_rank(rows, group.world_size(), group.rank());
    TORCH_CHECK_VALUE(x_shard.rows == share, op, ": rank ", group.rank(), " of a group of ",
                      group.world_size(), " holds ", x_shard.rows, " rows, and its share of rows=", rows,
                      " is ", share, "; rows are cut as torch.tensor_split cuts them.");
    return rows;
  }
  if (group.world_size() == 1) return x_shard.rows;
  Transport& transport = group.transport(x_shard.data.device());
  const std::vector<int64_t> held =
      transport.rows_held(x_shard.flight(Op::kAllGather, kUnknownRows, x_shard.width));
  int64_t total = 0;
  for (const int64_t count : held) total += count;
  for (int peer = 0; peer < transport.world_size(); ++peer) {
    const int64_t share = rows_of_rank(total, transport.world_size(), peer);
    TORCH_CHECK_VALUE(held[peer] == share, "The ranks of group '", group.name(), "' hold ",
                      at::IntArrayRef(held), " rows, ", total, " in all; ", transport.context().name_of(peer),
                      " should hold ", share, " of them, as torch.tensor_split cuts rows.");
  }
  return total;
}

Group* group_of_sums(c10::string_view name) {
  if (name.empty()) return nullptr;
  Group& group = Group::get(std::string(name));
  return group.world_size() > 1 ? &group : nullptr;
}

bool waits_for_hosts(Group& group, c10::string_view sums, c10::Device device) {
  Group* const over = group_of_sums(sums);
  return group.crosses_hosts(device) || (over != nullptr && over->crosses_hosts(device));
}

std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, c10::Device device,
                                                 const TierChoice& asked) {
  if (group.world_size() == 1) return {"local", "the group has one rank, so nothing travels"};
  device = group.known_device(device);
  if (!group.transport_sought(device)) return {name_of(asked.tier), "no op of the group has run yet"};
  Transport& transport = group.transport(device);
  const std::string whole = transport.why_not_chunked();
  if (!whole.empty()) return {"unfused", whole};
  const Choices choices(group, transport, key, flight_of(key), /*rounds=*/false);
  const std::string not_fused = choices.why_not_fused();
  const Tuned& tuned = choices.tuned();
  if (asked.tier != Tier::kAuto) {
    std::string was_asked = "tier='" + asked.text() + "' was asked for";
    if (asked.chunks == 0 && tuned.chunks > 0) was_asked += "; tuned: " + in_chunks(tuned.chunks);
    if (not_fused.empty()) return {name_of(asked.tier), was_asked};
    return {asked.tier == Tier::kFused ? "none" : name_of(asked.tier), was_asked + "; fused: " + not_fused};
  }
  if (!tuned.tier) {
    std::string rule = "chunked is the rule where nothing was tuned (python -m pyruntime tune)";
    if (tuned.chunks > 0) rule += "; tuned: " + in_chunks(tuned.chunks);
    return {"chunked", not_fused.empty() ? rule : rule + "; fused: " + not_fused};
  }
  std::string why = tuned.tier->text(tuned.chunks);
  if (tuned.tier->tier == name_of(Tier::kFused)) {
    const DeviceSharing::Crowding crowded =
        transport.device_sharing()->crowding(key.rows, key.width_of_output());
    if (crowded.ops > 0) {
      why += c10::str("; ", crowded.ops, crowded.ops == 1 ? " call" : " calls",
                      " took the chunked tier: ", crowded.why);
    }
  }
  return {tuned.tier->tier, why};
}

std::vector<std::string> other_choices(Group& group, const TierKey& key, c10::Device device) {
  const c10::DeviceGuard on(device);
  Transport& transport = group.transport(group.known_device(device));
  const std::optional<FlightDescriptor> flight = flight_of(key);
  std::vector<std::string> others;
  if (!flight) return others;
  for (const int chunks : transport.other_pieces(*flight))
    others.push_back(TierChoice{Tier::kChunked, chunks}.text());
  const DeviceSharing* const sharing = transport.device_sharing();
  if (sharing == nullptr || !sharing->why_not_fused(*flight).empty()) return others;
  for (const std::string& tiles : sharing->other_tiles(key.rows, key.width_of_output(), key.width_of_input()))
    others.push_back(TierChoice{Tier::kFused, 0, tiles}.text());
  return others;
}

}  // namespace pyruntime
