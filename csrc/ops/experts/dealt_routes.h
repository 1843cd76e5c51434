// Which rows travel where if each goes only to the ranks that have one of its experts, once to each. What a
// rank makes of a row returns as one sum over its experts, and the row's owner adds these in the order of
// ranks.
//
// All of it is worked out on the device, from the experts of all ranks' rows. The host reads how many rows
// each rank sends to each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/experts/expert_rows.h"
#include "ops/experts/sorted_places.h"
#include "transport/dealt_rows.h"

namespace pyruntime {

// The share of all rows that come to a rank: the probability that of k different experts, each set as likely,
// one is among the ceil(E / P) of a rank, u = 1 - C(E - E / P, k) / C(E, k).
double share_of_rows(int64_t experts, int64_t ranks, int64_t k);
// Whether rows of which each rank needs such a share are dealt: on one host below 0.9, as a gather copies no
// row to where it leaves; below a half if their way is under other work, where copies cost more than bytes.
// On rails only if no more rows cross between hosts than in a gather.
bool deals_share(double share, int64_t ranks_of_rail, bool under_other_work = false);

class DealtRoutes {
 public:
  // table: as of ExpertRows, for which there are kernels (sorted_places.h). Rows are cut over the ranks as
  // torch.tensor_split cuts them, experts as torch.chunk does. The host waits.
  DealtRoutes(const at::Tensor& table, int rank, int ranks, int64_t experts);

  const DealtRows& counts() const { return counts_; }
  // [counts().leaving(rank)]: this rank's rows, by receiver, counted from its first.
  const at::Tensor& leaving() const { return leaving_; }
  // [counts().arriving(rank)]: the rows that come here, by sender: numbers over all ranks, ascending.
  const at::Tensor& arriving();
  // [routed.size()]: the places of an expert's rows among those.
  const at::Tensor& places(const ExpertRows& routed);
  // returned [counts().leaving(rank), D]: what the ranks made of leaving(). For each row of this rank the sum
  // in the order of ranks, [own rows, D], in fp32 and rounded once.
  at::Tensor sums_of_ranks(const at::Tensor& returned) const;

 private:
  at::Tensor table_;  // until arriving_ is known
  int rank_, ranks_;
  int64_t per_rank_;  // experts
  DealtRows counts_;
  SortedPlaces of_own_;  // this rank's rows, by receiver
  at::Tensor leaving_;
  at::Tensor arriving_, places_;  // undefined: not asked for yet
};

}  // namespace pyruntime
