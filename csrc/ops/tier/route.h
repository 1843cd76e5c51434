// How a call of an op goes: chosen once, before it begins. Everything after takes the choice.
#pragma once

#include <c10/util/string_view.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/compression/wire.h"
#include "ops/operand.h"
#include "ops/tier/tier.h"
#include "transport/group.h"

namespace pyruntime {

// A call of an op, as it is asked for.
struct Call {
  const char* op;
  const Operand& x;
  int64_t n, k;  // as in TierKey
  c10::string_view group;
  c10::string_view tier;  // as tier_named() takes it
  // Rows of all ranks, if x has this rank's alone; kUnknownRows where these tell each other.
  std::optional<int64_t> rows = {};
  c10::string_view wire = "same";
  // The group over which the products are summed too, and the op by which they are; "": no other has a part
  // of them.
  c10::string_view sums = "";
  const char* op_of_sums = nullptr;
  // Rows travel under another slice's work.
  bool under_other_work = false;
};

struct Route {
  Group& group;
  int64_t rows;           // over all ranks
  TierChoice tier;        // never kAuto
  cpu::Wire wire = {};    // what rows that are gathered travel as
  Group* sums = nullptr;  // the group over which products are summed too
  TierChoice sums_tier = {Tier::kUnfused};

  int64_t own_rows() const { return rows_of_rank(rows, group.world_size(), group.rank()); }
  // The way of the sums.
  Route of_sums() const { return {*sums, rows, sums_tier}; }
};

// The route of this call. Of tiers kAuto is what was tuned, where that can run here, else chunked where rows
// travel in chunks, else unfused; so it is the same in every run and on every rank. Where other fused kernels
// hold the device, the fused tier that was tuned becomes chunked. What travels, and in which order, is the
// same in all tiers, so ranks need not agree; on the number of chunks they must, and one that was tuned for
// the op and its rows is taken in every tier, unless the call names another. Rows that travel under other
// work, and those whose products are summed over a second group, travel in as few chunks as may be, unless a
// number was tuned or asked for. In a group of one rank all tiers are unfused.
//
// Collective where rows are not known. Raises ValueError for a group, tier or wire that is none, for a wire
// where one rank alone would round rows, where this rank's rows are not its share, and where a tier that was
// asked for by name cannot run.
Route choose_route(const Call& call);

// `rows` as given, of which x_shard has this rank's share, or, where it is kUnknownRows, the sum of what the
// ranks hold. Raises ValueError where the shares are not those of torch.tensor_split.
int64_t agreed_rows(const char* op, Group& group, const Operand& x_shard, int64_t rows);

// The group of that name, where it has several ranks, else none.
Group* group_of_sums(c10::string_view name);

// Whether an op over `group`, or one over that of its sums, waits for other hosts.
bool waits_for_hosts(Group& group, c10::string_view sums, c10::Device device);

// The tier that `asked` means for this key now, and why not a faster one. Not collective. `device`: of the
// kind that the key names.
std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, c10::Device device,
                                                 const TierChoice& asked);

// Other choices worth measuring beside the tiers' own, as tier_named() takes them: half and twice the number
// of chunks, and tiles that the kernel's rule does not take. After the group's first op.
std::vector<std::string> other_choices(Group& group, const TierKey& key, c10::Device device);

}  // namespace pyruntime
