#include "ops/experts/expert_passes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <utility>

#include "cpu/packed_matrix.h"
#include "ops/gemm/groups.h"

namespace pyruntime {

void for_each_expert(const ExpertRows& routed, const Share& share,
                     const std::function<void(int64_t expert, const ExpertRows::Run& own)>& use) {
  if (share.experts == 1) return use(share.first, {0, share.run.count});
  for (int64_t expert = share.first; expert < share.first + share.experts; ++expert) {
    const ExpertRows::Run run = routed.places_of(expert);
    if (!run.is_empty()) use(expert, {run.begin - share.run.begin, run.count});
  }
}

std::vector<Share> all_shares(const ExpertRows& routed, int64_t rows, c10::Device device) {
  const Chunk every{0, 0, rows};
  if (!device.is_cpu()) {
    if (routed.size() == 0) return {};
    return {{0, routed.experts(), routed.all(), every}};
  }
  std::vector<Share> shares;
  for (int64_t expert = 0; expert < routed.experts(); ++expert) {
    const ExpertRows::Run run = routed.places_of(expert);
    if (!run.is_empty()) shares.push_back({expert, 1, run, every});
  }
  return shares;
}

// --- GEMMs

ExpertGemms::ExpertGemms(const at::Tensor& matrices, bool transposed, const ExpertRows& routed,
                         const at::Tensor& biases)
    : matrices_(matrices),
      biases_(biases),
      transposed_(transposed),
      at_once_(!matrices.is_cpu() && !biases.defined() && multiplies_groups(matrices)),
      routed_(routed) {
  gemms_.resize(routed.experts());
  done_.resize(routed.experts());
}

at::Tensor ExpertGemms::multiply(const Share& share, const at::Tensor& rows, const Memory& out) {
  if (at_once_) return multiply_groups(rows, matrices_, transposed_, routed_.ends_on_device());
  const at::Tensor all = out();
  for_each_expert(routed_, share, [&](int64_t expert, const ExpertRows::Run& own) {
    write(expert, own.of(all), own.of(rows));
  });
  return all;
}

void ExpertGemms::write(int64_t expert, const at::Tensor& out, const at::Tensor& rows) {
  const int64_t all = routed_.of(expert).count, count = rows.size(0), padded = routed_.padded(count);
  if (!gemms_[expert]) gemms_[expert].emplace(matrices_.select(0, expert), transposed_, all);
  const at::Tensor bias = biases_.defined() ? biases_.select(0, expert) : at::Tensor();
  const auto multiply = [&](const at::Tensor& to, const at::Tensor& from) {
    gemms_[expert]->write(to.unsqueeze(0), from.unsqueeze(0), bias, /*accumulate=*/false);
  };
  if (count == padded) {
    multiply(out, rows);
  } else {
    const at::Tensor from = rows.new_zeros({padded, rows.size(1)});
    const at::Tensor to = rows.new_empty({padded, out.size(1)});
    from.narrow(0, 0, count).copy_(rows);
    multiply(to, from);
    out.copy_(to.narrow(0, 0, count));
  }
  if ((done_[expert] += count) >= all) gemms_[expert].reset();
}

// --- sums

namespace {

// The least rows of an expert in one GEMM between hosts: with fewer, reading its matrix takes the time. Ours
// arranges a matrix once for all of them, the library in each.
constexpr int64_t kRowsOfOurs = 16, kRowsOfLibrary = 64;

// On one host there is nothing to hide, as rows are read where they are: all rows at once.
int64_t rows_at_once(const Route& route, const ExpertRows& routed, const at::Tensor& matrices) {
  if (!route.group.crosses_hosts(matrices.device()) || routed.size() == 0) return route.rows;
  const bool ours = cpu::PackedMatrix::can_hold(matrices.select(0, 0));
  return (ours ? kRowsOfOurs : kRowsOfLibrary) * routed.experts() * route.rows / routed.size();
}

}  // namespace

SumsOfExperts::SumsOfExperts(const Route& route, const Operand& x, const ExpertRows& routed,
                             const at::Tensor& matrices, Compute compute)
    : routed_(routed),
      form_(x),
      own_(ChunkPlan(route.rows, route.group.world_size(), route.group.rank()).own()),
      at_once_(matrices.is_cpu() ? rows_at_once(route, routed, matrices) : 0),
      compute_(std::move(compute)),
      is_made_(route.rows, false) {
  form_.rows = route.rows;
}

void SumsOfExperts::make_all() {
  for (const Share& share : all_shares(routed_, form_.rows, form_.data.device())) compute(share);
  is_made_.assign(is_made_.size(), true);
  all_are_made_ = true;
}

void SumsOfExperts::write_rows(const at::Tensor& rows, const at::Tensor& out) {
  if (!all_are_made_) make_all();
  routed_.sum(made(), rows, out);
}

MatmulScatter::Parts SumsOfExperts::parts() {
  return {.operands = {form_},
          .weights = {},
          .transposed = false,
          .compute = [this](const at::Tensor& out, const Chunk& chunk) { write(out, chunk); },
          .prepare = [this](const std::vector<Chunk>& order) { begin(order); }};
}

void SumsOfExperts::begin(const std::vector<Chunk>& order) {
  order_ = order;
  if (at_once_ > 0 && own_.rows / 2 >= at_once_) make(own_.begin, own_.begin + own_.rows / 2);
}

void SumsOfExperts::compute(const Share& share) {
  const at::Tensor found = compute_(share, [&] { return share.run.of(made()); });
  if (!found.is_cpu()) made_ = found;
}

const at::Tensor& SumsOfExperts::made() {
  if (!made_.defined()) made_ = at::empty({routed_.size(), form_.width}, form_.data.options());
  return made_;
}

void SumsOfExperts::write(const at::Tensor& out, const Chunk& chunk) {
  if (!out.is_cpu()) {
    if (!all_are_made_) make_all();
    return routed_.sum(made(), chunk, out.select(0, 0));
  }
  int64_t begin = chunk.begin, end = begin + chunk.rows;
  for (const Chunk& next : order_) {
    if (next.begin == end && end - begin < at_once_) end += next.rows;
  }
  if (at_once_ >= form_.rows) begin = 0, end = form_.rows;
  make(begin, end);
  routed_.sum(made(), chunk, out.select(0, 0));
}

void SumsOfExperts::make(int64_t begin, int64_t end) {
  const auto last = is_made_.begin() + end;
  for (auto from = is_made_.begin() + begin; from != last;) {
    from = std::find(from, last, false);
    const auto to = std::find(from, last, true);
    const Chunk range{own_.owner, from - is_made_.begin(), to - from};
    for (int64_t expert = 0; range.rows > 0 && expert < routed_.experts(); ++expert) {
      ExpertRows::Run run = routed_.of(expert, range);
      if (run.count == routed_.of(expert).count) run = routed_.places_of(expert);
      if (!run.is_empty()) compute({expert, 1, run, range});
    }
    std::fill(from, to, true);
    from = to;
  }
}

SumsOfRanks::SumsOfRanks(const Route& route, const Operand& x, bool cut, std::shared_ptr<DealtRoutes> dealt,
                         SumsOfExperts& sums)
    : dealt_(std::move(dealt)) {
  if (dealt_ == nullptr) {
    scatter_.emplace(route, sums.parts(), /*all=*/!cut);
    return;
  }
  deal_.emplace(route.group.name(), dealt_->counts().back(), x.width, x.data.scalar_type(), x.data.device());
  sums.write_rows(dealt_->arriving(), deal_->leaving());
  deal_->publish();
}

void SumsOfRanks::reduce_beside() {
  if (scatter_) scatter_->reduce_beside();
}

at::Tensor SumsOfRanks::finish() {
  if (scatter_) return scatter_->finish().select(0, 0);
  const at::Tensor sums = dealt_->sums_of_ranks(deal_->arrived());
  deal_->finish();
  deal_.reset();  // its memory is free for the rest of the op
  return sums;
}

// --- rows

AllRows::AllRows(const Route& route, const Operand& rows, bool cut, std::shared_ptr<DealtRoutes> dealt)
    : rows_(rows), dealt_(std::move(dealt)) {
  if (dealt_ != nullptr) {
    deal_.emplace(route.group.name(), dealt_->counts(), rows.width, rows.data.scalar_type(),
                  rows.data.device());
    at::Tensor leaving = deal_->leaving();
    at::index_select_out(leaving, rows.data.select(0, 0), 0, dealt_->leaving());
    deal_->publish();
    return;
  }
  if (!cut) return;
  if (rows.data.is_cpu()) {
    gather_.emplace(route, Op::kAllGatherMatmul, rows, RowsAre::kPassing);
    return;
  }
  // All rows are picked in one launch: signals between them would only delay the last.
  Route whole = route;
  whole.together = true;
  gather_.emplace(whole, Op::kAllGather, rows, RowsAre::kLent);
}

void AllRows::copy(const ExpertRows& routed, const Share& share, const at::Tensor& out) {
  const Chunk& range = share.range;
  at::Tensor to = out;
  if (deal_) {
    at::index_select_out(to, deal_->arrived(), 0, dealt_->places(routed));
    return;
  }
  if (!out.is_cpu()) {
    const at::Tensor all = gather_ ? gather_->rows() : rows_.rows_of(range);
    at::index_select_out(to, all.select(0, 0), 0, routed.rows());
    return;
  }
  const int64_t first = routed.of(share.first, range).begin;
  const auto take = [&](const Chunk& part, const at::Tensor& rows) {
    const ExpertRows::Run run = routed.of(share.first, part);
    if (run.is_empty()) return;
    at::Tensor of_part = out.narrow(0, run.begin - first, run.count);
    at::index_select_out(of_part, rows.select(0, 0), 0, run.of(routed.rows()) - part.begin);
  };
  if (gather_) {
    gather_->for_each_in(range, take);
  } else {
    take(range, rows_.rows_of(range));
  }
}

void AllRows::finish() {
  if (gather_) gather_->finish();
  if (deal_) deal_->finish();
  deal_.reset();
}

}  // namespace pyruntime
