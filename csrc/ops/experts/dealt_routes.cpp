#include "ops/experts/dealt_routes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

namespace {

// [ranks, ranks], int64, on the device: how many rows of each rank have an expert on each.
at::Tensor counted(const at::Tensor& table, int ranks, int64_t per_rank) {
  const int64_t rows = table.size(0), slots = table.size(1) / 2;
  // The first and the last column are for what is no rank's.
  const at::Tensor columns =
      at::floor_divide(table.narrow(1, 0, slots), per_rank).add_(1).clamp_(0, ranks + 1).to(at::kLong);
  const at::Tensor marks = at::zeros({rows, ranks + 2}, table.options().dtype(at::kByte))
                               .scatter_(1, columns, 1)
                               .narrow(1, 1, ranks);
  const auto sums = [&](int64_t begin, int64_t sources, int64_t of_each) {
    return marks.narrow(0, begin, sources * of_each)
        .unflatten(0, {sources, of_each})
        .sum({1}, /*keepdim=*/false, at::kLong);
  };
  const int64_t longer = rows % ranks, each = rows / ranks;
  if (longer == 0) return sums(0, ranks, each);
  return at::cat({sums(0, longer, each + 1), sums(longer * (each + 1), ranks - longer, each)});
}

DealtRows read(const at::Tensor& counts) {
  const at::Tensor here = counts.to(at::kCPU).contiguous();
  const auto* const first = here.const_data_ptr<int64_t>();
  return {std::vector<int64_t>(first, first + here.numel()), static_cast<int>(counts.size(0))};
}

at::Tensor rows_of(const at::Tensor& table, int ranks, int rank) {
  const Chunk own = ChunkPlan(table.size(0), ranks, rank).own();
  return table.narrow(0, own.begin, own.rows);
}

SortedPlaces sorted(const at::Tensor& table, int64_t first, int64_t per, int64_t groups) {
  return {*kernels_for(table.device(), table.scalar_type()), table, first, per, groups, /*only_rows=*/true};
}

}  // namespace

double share_of_rows(int64_t experts, int64_t ranks, int64_t k) {
  const int64_t others = experts - (experts + ranks - 1) / ranks;
  double to_others = 1;
  for (int64_t slot = 0; slot < k; ++slot) {
    to_others *=
        std::max<double>(0, static_cast<double>(others - slot)) / static_cast<double>(experts - slot);
  }
  return 1 - to_others;
}

bool deals_share(double share, int64_t ranks_of_rail, bool under_other_work) {
  return ranks_of_rail == 1 ? share < (under_other_work ? 0.5 : 0.9)
                            : share * static_cast<double>(ranks_of_rail) < 1;
}

DealtRoutes::DealtRoutes(const at::Tensor& table, int rank, int ranks, int64_t experts)
    : table_(table),
      rank_(rank),
      ranks_(ranks),
      per_rank_((experts + ranks - 1) / ranks),
      counts_(read(counted(table, ranks, per_rank_))),
      of_own_(sorted(rows_of(table, ranks, rank), /*first=*/0, per_rank_, ranks)),
      leaving_(of_own_.rows.narrow(0, 0, counts_.leaving(rank))) {}

const at::Tensor& DealtRoutes::arriving() {
  if (!arriving_.defined()) {
    const SortedPlaces here = sorted(table_, rank_ * per_rank_, per_rank_, /*groups=*/1);
    arriving_ = here.rows.narrow(0, 0, counts_.arriving(rank_));
    table_.reset();
  }
  return arriving_;
}

const at::Tensor& DealtRoutes::places(const ExpertRows& routed) {
  if (!places_.defined()) places_ = at::searchsorted(arriving(), routed.rows());
  return places_;
}

at::Tensor DealtRoutes::sums_of_ranks(const at::Tensor& returned) const {
  const at::Tensor sums = at::empty({of_own_.positions.size(0), returned.size(1)}, returned.options());
  if (sums.numel() > 0) of_own_.sum(returned, of_own_.positions, sums);
  return sums;
}

}  // namespace pyruntime
