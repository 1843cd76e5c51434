#include "ops/line_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace pyruntime {

namespace {

Transport& transport_of(const std::string& name, c10::Device device) {
  Transport& transport = Group::get(name).transport(device);
  const std::string why_not = transport.why_not_chunked();
  TORCH_CHECK(why_not.empty(), "Parameters or messages on ", device.str(),
              " cannot be exchanged over group '", name, "': ", why_not);
  return transport;
}

// `own`: the number of lines that this rank has.
FlightDescriptor flight_of(const Transport& transport, Op op, int64_t lines, int64_t width,
                           c10::ScalarType dtype, int64_t own) {
  FlightDescriptor descriptor{op,    static_cast<int32_t>(dtype), lines, /*row_blocks=*/1, /*inner=*/1,
                              width, /*with_bias=*/false,         own};
  descriptor.failed_passes = transport.context().failed_passes;
  return descriptor;
}

std::unique_ptr<DealFlight> deal_lines(Transport& transport, const DealtRows& counts, int64_t width,
                                       c10::ScalarType dtype) {
  const std::string why_not = transport.why_not_deal();
  TORCH_CHECK(why_not.empty(), "Group '", transport.context().name, "' cannot deal rows: ", why_not, ".");
  int64_t lines = 0;
  for (int rank = 0; rank < transport.world_size(); ++rank) lines += counts.leaving(rank);
  FlightDescriptor descriptor =
      flight_of(transport, Op::kDeal, lines, width, dtype, counts.leaving(transport.rank()));
  descriptor.pass = transport.context().passes.now();
  return transport.deal(descriptor, counts);
}

std::unique_ptr<GatherFlight> gather_lines(Transport& transport, Op op, int64_t lines, int64_t width,
                                           c10::ScalarType dtype, int holder, int64_t agreement) {
  const int64_t own = rows_of_rank(lines, transport.world_size(), transport.rank(), holder);
  FlightDescriptor descriptor = flight_of(transport, op, lines, width, dtype, own);
  descriptor.holder = holder;
  descriptor.agreement = agreement;
  return transport.gather(descriptor);
}

}  // namespace

LineScatter::LineScatter(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                         c10::Device device, bool all, const std::optional<std::vector<int64_t>>& some)
    : transport_(transport_of(group, device)),
      op_(all ? Op::kAllReduce : Op::kReduceScatter),
      lines_(some ? static_cast<int64_t>(some->size()) : lines),
      width_(width),
      options_(at::TensorOptions().dtype(dtype).device(device)),
      all_(all),
      begun_(begin_of_op(device)) {
  const int64_t own = rows_of_rank(lines, transport_.world_size(), transport_.rank());
  const FlightDescriptor descriptor = flight_of(transport_, op_, lines, width, dtype, own);
  flight_ = some ? transport_.scatter_some(descriptor, all, *some) : transport_.scatter(descriptor, all);
  chunks_ = joined_on(device, flight_->order(), [&](const Chunk& chunk) { return flight_->part(chunk); });
}

bool LineScatter::can_send_some(const std::string& group, c10::Device device) {
  return Group::get(group).transport(device).scatters_some();
}

at::Tensor LineScatter::empty(int64_t lines) const {
  return at::empty({1, lines, width_}, options_);
}

void LineScatter::reduce() {
  if (std::exchange(reduced_, true)) return;
  int64_t own = 0;
  for (const Chunk& chunk : flight_->order()) own += chunk.owner == transport_.rank() ? chunk.rows : 0;
  if (!all_) own_sums_ = empty(own);
  flight_->reduce(own_sums_, {});
}

bool LineScatter::sums_have_come() const {
  const auto has_come = [&](const Chunk& chunk) { return flight_->sum_has_come(chunk); };
  return !all_ || std::ranges::all_of(flight_->sums_order(), has_come);
}

at::Tensor LineScatter::finish() {
  reduce();
  const at::Tensor sums = all_ ? empty(lines_) : own_sums_;
  if (all_) take_sums(*flight_, transport_.context(), op_, begun_, sums, /*inner=*/1);
  flight_->finish();
  return sums.select(0, 0);
}

LineGather::LineGather(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                       c10::Device device)
    : transport_(transport_of(group, device)),
      device_(device),
      begun_(begin_of_op(device)),
      flight_(gather_lines(transport_, Op::kAllGather, lines, width, dtype, kEveryRank, /*agreement=*/0)) {
  const std::vector<Chunk>& order = flight_->order();  // the first chunk is this rank's
  chunks_ = joined_on(device, {order.begin() + 1, order.end()},
                      [&](const Chunk& chunk) { return flight_->memory(chunk); });
}

bool LineGather::has_come() const {
  const std::vector<Chunk>& order = flight_->order();
  return std::all_of(order.begin() + 1, order.end(),
                     [&](const Chunk& chunk) { return flight_->has_come(chunk); });
}

at::Tensor LineGather::chunk(size_t chunk) {
  const JoinedChunk& wanted = chunks_.at(chunk);
  Reading reading(transport_.context(), Op::kAllGather, wanted.chunks.size() == 1 ? wanted.lines.owner : -1,
                  begun_, device_);
  flight_->wait_together(wanted.chunks);
  reading.came(static_cast<int64_t>(flight_->memory(wanted.lines).nbytes()),
               flight_->travelled(wanted.chunks.back()));
  return flight_->memory(wanted.lines).select(0, 0);
}

LineSend::LineSend(const std::string& group, int64_t lines, int64_t width, c10::ScalarType dtype,
                   c10::Device device, int source, int64_t agreement)
    : transport_(transport_of(group, device)),
      all_{source, /*begin=*/0, lines},
      device_(device),
      begun_(begin_of_op(device)),
      flight_(gather_lines(transport_, Op::kSend, lines, width, dtype, source, agreement)) {}

GatherFlight& LineSend::flight() {
  TORCH_CHECK(flight_ != nullptr, "The group of this send has been closed; finish sends before closing it.");
  return *flight_;
}

void LineSend::publish() {
  for (const Chunk& chunk : flight().own()) flight_->publish(chunk);
}

bool LineSend::has_come() {
  const std::vector<Chunk>& order = flight().order();
  return std::all_of(order.begin(), order.end(), [&](const Chunk& chunk) {
    return chunk.owner != all_.owner || flight_->has_come(chunk);
  });
}

void LineSend::wait() {
  Reading reading(transport_.context(), Op::kSend, all_.owner, begun_, device_);
  Travelled last;
  for (const Chunk& chunk : flight().order()) {
    if (chunk.owner != all_.owner) continue;
    flight_->wait(chunk);
    const Travelled travelled = flight_->travelled(chunk);
    if (travelled.arrived > last.arrived) last = travelled;
  }
  reading.came(static_cast<int64_t>(memory().nbytes()), last);
}

LineDeal::LineDeal(const std::string& group, DealtRows counts, int64_t width, c10::ScalarType dtype,
                   c10::Device device)
    : transport_(Group::get(group).transport(device)),
      device_(device),
      inside_(transport_.context(), Op::kDeal),
      begun_(begin_of_op(device)),
      from_others_(counts.arriving(transport_.rank()) - counts.count(transport_.rank(), transport_.rank())),
      flight_(deal_lines(transport_, counts, width, dtype)) {}

at::Tensor LineDeal::arrived() {
  Reading reading(transport_.context(), Op::kDeal, transport_.world_size() == 2 ? 1 - transport_.rank() : -1,
                  begun_, device_);
  flight_->wait();
  const at::Tensor lines = flight_->arrived().select(0, 0);
  reading.came(from_others_ * lines.size(1) * lines.element_size());
  return lines;
}

void LineDeal::finish() {
  inside_.check();
  flight_->finish();
}

}  // namespace pyruntime
