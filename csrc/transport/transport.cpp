#include "transport/transport.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/graph_task.h>

#include <iterator>
#include <sstream>

#include "core/peer_figures.h"

namespace pyruntime {

const char* name_of(Op op) {
  constexpr const char* kNames[] = {
      "all_gather",        "reduce_scatter", "all_reduce", "all_gather_matmul", "matmul_reduce_scatter",
      "matmul_all_reduce", "send",           "all_to_all"};
  const auto at = static_cast<size_t>(op) - static_cast<size_t>(Op::kAllGather);
  return at < std::size(kNames) ? kNames[at] : "unknown op";
}

namespace {

void enter(Entered kind, const GroupContext& context, const char* op, int peer, int64_t bytes, double begin,
           double wanted, double end, const Travelled& travelled = {}) {
  if (!Ledger::is_on()) return;
  LedgerEntry entry{kind, static_cast<int32_t>(context.traffic_class)};
  entry.name = Ledger::instance().number_of(op);
  entry.peer = peer < 0 ? peer : context.process_group_rank(peer);
  entry.bytes = bytes;
  entry.begin = begin;
  entry.wanted = wanted;
  entry.end = end;
  entry.from = travelled.from < 0 ? travelled.from : context.process_group_rank(travelled.from);
  entry.left = travelled.left;
  entry.arrived = travelled.arrived;
  Ledger::instance().enter(entry);
}

}  // namespace

Spending::~Spending() {
  double begin = begin_;
  for (const Span& worked : take_filled()) {
    count(begin, worked.begin);
    begin = worked.end;
  }
  count(begin, monotonic_seconds());
}

void Spending::count(double begin, double end) {
  (kind_ == Entered::kWait ? context_.stats.waiting_s : context_.stats.moving_s) += end - begin;
  if (kind_ == Entered::kWait && peer_ >= 0) {
    PeerTable::instance().waited(
        {context_.process_group, context_.traffic_class, context_.process_group_rank(peer_)}, end - begin);
  }
  enter(kind_, context_, op_, peer_, /*bytes=*/0, begin, /*wanted=*/begin, end);
}

void Reading::came(int64_t bytes, const Travelled& travelled) {
  context_.stats.bytes += bytes;
  if (!Ledger::is_on() || bytes == 0) return;
  const double end = monotonic_seconds();
  // The ledger may have been switched on after the bytes were asked for.
  enter(Entered::kRead, context_, name_of(op_), peer_, bytes, begin_, wanted_ > 0 ? wanted_ : end, end,
        travelled);
}

void enter_transfer(Entered kind, const GroupContext& context, Op op, int peer, int64_t bytes, double begin,
                    double end) {
  enter(kind, context, name_of(op), peer, bytes, begin, /*wanted=*/begin, end);
}

void count_collective(GroupContext& context, Op op, int64_t bytes, double begin) {
  const double end = monotonic_seconds();
  ++context.stats.ops;
  context.stats.bytes += bytes;
  context.stats.waiting_s += end - begin;
  enter(Entered::kWait, context, name_of(op), /*peer=*/-1, /*bytes=*/0, begin, /*wanted=*/begin, end);
  enter(Entered::kRead, context, name_of(op), /*peer=*/-1, bytes, begin, /*wanted=*/begin, end);
}

void GatherFlight::multiply(const FusedGemm&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask Transport::why_not_fused() first.");
}

void ScatterFlight::multiply(const FusedGemm&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask Transport::why_not_fused() first.");
}

std::unique_ptr<ScatterFlight> Transport::scatter_some(const FlightDescriptor&, bool,
                                                       const std::vector<int64_t>&) {
  TORCH_CHECK(false, "This transport scatters all rows: ask Transport::scatters_some() first.");
}

std::string Transport::why_not_fused(const FlightDescriptor&) const {
  return "there are fused kernels for devices of one host only, and the group's chunks travel by " +
         description();
}

std::string Transport::why_not_pieces(int) const {
  return "the number of chunks is no choice where they travel by " + description();
}

// Passes follow each other, forward and backward by turns, but where one backward pass follows another.
int32_t Passes::now() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task) return count;
  count += graph_task != -1 && task != -1 ? 2 : 1;
  graph_task = task;
  return count;
}

int64_t FlightDescriptor::row_bytes() const {
  return row_elements() * static_cast<int64_t>(c10::elementSize(scalar_type()));
}

FlightDescriptor FlightDescriptor::of_some(const std::vector<int64_t>& rows) const {
  uint64_t digest = 14695981039346656037ULL;  // FNV-1a
  for (const int64_t row : rows) digest = (digest ^ static_cast<uint64_t>(row)) * 1099511628211ULL;
  FlightDescriptor some = *this;
  some.rows = static_cast<int64_t>(rows.size());
  some.agreement = static_cast<int64_t>(digest);
  return some;
}

bool FlightDescriptor::agrees_with(const FlightDescriptor& other) const {
  return other.op == op && other.dtype == dtype && other.rows == rows && other.row_blocks == row_blocks &&
         other.with_bias == with_bias && other.holder == holder && other.agreement == agreement &&
         other.pieces == pieces && other.pass == pass && other.failed_passes == failed_passes &&
         other.inner * other.width == inner * width;
}

std::string FlightDescriptor::text() const {
  std::ostringstream text;
  text << name_of(op) << " with ";
  if (rows == kUnknownRows) {
    text << own_rows << " rows on this rank";
  } else {
    text << rows << " rows in all";
  }
  text << " (in " << row_blocks << " blocks) of " << inner * width << " " << c10::toString(scalar_type())
       << (with_bias ? " and a bias" : "");
  if (pieces != 0) text << ", each rank's rows in " << pieces << " chunks";
  if (failed_passes != 0) {
    text << ", after " << failed_passes
         << (failed_passes == 1 ? " pass that an exception ended" : " passes that exceptions ended");
  }
  if (agreement != 0) text << ", its other arguments having the digest " << agreement;
  return text.str();
}

}  // namespace pyruntime
