#include "transport/account.h"

#include <c10/util/Exception.h>

#include "core/ledger/peer_figures.h"

namespace pyruntime {

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

double Spending::begin_of(Entered kind, c10::Device device) {
  if (device.is_cpu()) take_filled();  // drops the time of waits that nobody counts
  return device.is_cpu() || kind == Entered::kWait || Ledger::is_on() ? moment(device) : 0;
}

Spending::~Spending() {
  if (begin_ <= 0) {
    count_on_stream();
    return;
  }
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

void Spending::count_on_stream() {
  if (begin_ == 0) return;
  try {
    const auto begin = static_cast<int64_t>(-begin_);
    auto& clock = StreamClock::instance();
    const int rank = peer_ < 0 ? peer_ : context_.process_group_rank(peer_);
    const int64_t end = kind_ != Entered::kWait
                            ? clock.mark()
                            : clock.mark_end_of_wait(begin, context_.name,
                                                     {context_.process_group, context_.traffic_class, rank});
    if (end == StreamClock::kNone) return;
    enter(kind_, context_, op_, peer_, /*bytes=*/0, begin_, /*wanted=*/begin_, -static_cast<double>(end));
  } catch (const c10::Error&) {
    // A device that has failed says so to whoever asks it for the next operation.
  }
}

void Reading::came(int64_t bytes, const Travelled& travelled) {
  context_.stats.bytes += bytes;
  if (!Ledger::is_on() || bytes == 0) return;
  // The ledger may have been switched on after this reading began.
  if (begin_ == 0) return;
  const double end = begin_ > 0 ? monotonic_seconds() : -static_cast<double>(StreamClock::instance().mark());
  if (end == 0) return;
  enter(Entered::kRead, context_, name_of(op_), peer_, bytes, begin_, wanted_ != 0 ? wanted_ : end, end,
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

}  // namespace pyruntime
