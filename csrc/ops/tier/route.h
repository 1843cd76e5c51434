// Chooses how a call of an op runs: once, before it begins. The rest of the op follows the choice.
#pragma once

#include <c10/util/string_view.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/operand.h"
#include "ops/tier/tier.h"
#include "ops/wire.h"
#include "transport/group.h"

namespace pyruntime {

// A requested call of an op.
struct Call {
  const char* op;
  const Operand& x;
  int64_t n, k;  // as in TierKey
  c10::string_view group;
  c10::string_view tier;  // a text for tier_named()
  // The rows of all ranks, if x has only this rank's; kUnknownRows if the ranks exchange their numbers.
  std::optional<int64_t> rows = {};
  c10::string_view wire = "same";
  // The group over which the products are also summed, and the op that sums them; "": they are complete.
  c10::string_view sums = "";
  const char* op_of_sums = nullptr;
  // Whether the rows travel under another slice's work.
  bool under_other_work = false;
};

struct Route {
  Group& group;
  int64_t rows;           // over all ranks
  TierChoice tier;        // never kAuto
  Wire wire = {};         // the format in which gathered rows travel
  Group* sums = nullptr;  // the group over which products are also summed
  TierChoice sums_tier = {Tier::kUnfused};
  // Whether rows that travel in chunks are read, or computed, all together: then one signal announces them.
  bool together = false;

  int64_t own_rows() const { return rows_of_rank(rows, group.world_size(), group.rank()); }
  // The route of the sums.
  Route of_sums() const { return {*sums, rows, sums_tier}; }
};

// Chooses the route of this call. kAuto becomes the tuned tier if it can run here; else chunked if rows
// travel in chunks; else unfused. So the choice is the same in every run and on every rank. If other fused
// kernels occupy the device, a tuned fused tier becomes chunked.
//
// The same rows travel in the same order in all tiers, so ranks need not agree on the tier. They must agree
// on the number of chunks. A number tuned for the op and its rows applies to every tier, unless the call
// names another. Rows that travel under other work, and rows whose products are summed over a second group,
// travel in as few chunks as possible, unless a number was tuned or requested. On devices one GEMM multiplies
// rows that travel under other work: it need not hide them, and GEMMs of chunks are slower and more launches.
// In a group of one rank all tiers are unfused.
//
// Collective if the rows are unknown. Raises ValueError for an unknown group, tier or wire; a wire that
// rounds in a group of one rank; rows that are not this rank's share; and a named tier that cannot run.
Route choose_route(const Call& call);

// Returns `rows`, of which x_shard must have this rank's share, or with kUnknownRows the sum of the ranks'
// rows. Raises ValueError if the shares are not those of torch.tensor_split.
int64_t agreed_rows(const char* op, Group& group, const Operand& x_shard, int64_t rows);

// The group of that name if it has several ranks, else nullptr.
Group* group_of_sums(c10::string_view name);

// Whether an op over `group`, or over the group of its sums, waits for other hosts.
bool waits_for_hosts(Group& group, c10::string_view sums, c10::Device device);

// The tier that `asked` means for this key now, and the reason. Not collective. `device`: of the kind that
// the key names.
std::pair<std::string, std::string> explain_tier(Group& group, const TierKey& key, c10::Device device,
                                                 const TierChoice& asked);

// Further choices worth measuring besides the tiers themselves, as texts for tier_named(): half and twice the
// number of chunks, and tiles that the kernel's rule does not choose. Only after the group's first op.
std::vector<std::string> other_choices(Group& group, const TierKey& key, c10::Device device);

}  // namespace pyruntime
