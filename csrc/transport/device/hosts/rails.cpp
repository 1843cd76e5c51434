#include "transport/device/hosts/rails.h"

#include <algorithm>
#include <array>
#include <utility>

#include "transport/device/device_flight.h"

namespace pyruntime {

namespace {

// The most exchanges of a flight. Rows of one are put into the ranks of the host while the next ones arrive;
// each costs a launch.
constexpr int kMostExchanges = 8;

// The least bytes of a rank's own rows that go by rails. They save an adapter the time of sending them to the
// other ranks of each host, and cost the host a call for each of those: 5 us, in which 45 GB/s send so much.
constexpr int64_t kLeastBytes = int64_t{256} << 10;

// The deadline of waits inside a host, in those of exchanges. A rank that waits there may wait for one whose
// exchange waits for a rank that does not come: that one is to be named, by whoever waits for it.
constexpr double kInsideDeadline = 1.5;

// The ranks of this rank's host as a group of their own.
GroupContext context_of_host(const GroupContext& context, const HostLayout& layout) {
  GroupContext found = context;
  found.rank = layout.local_rank();
  found.world_size = layout.ranks_per_host();
  found.stats = {};
  found.process_group_ranks.clear();
  found.job_ranks.clear();
  for (const int rank : layout.ranks_of(layout.host())) {
    found.process_group_ranks.push_back(context.process_group_rank(rank));
    found.job_ranks.push_back(context.job_rank(rank));
  }
  return found;
}

}  // namespace

class RailsTransport : public Transport {
 public:
  RailsTransport(GroupContext& context, std::unique_ptr<Exchange> exchange,
                 std::unique_ptr<Transport> straight, std::unique_ptr<WorkspaceGroup> host,
                 PeerProcesses processes, const HostLayout& layout, c10::Device device,
                 const DeviceLibrary& library, const GroupSettings& settings)
      : Transport(context),
        exchange_(std::move(exchange)),
        straight_(std::move(straight)),
        least_bytes_(settings.ring.chunk_bytes > 0 ? 0 : kLeastBytes),
        layout_(layout),
        of_host_(context_of_host(context, layout)),
        inside_(of_host_, std::move(host), std::move(processes), device, library, settings),
        streams_(device) {}

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  // Straight: a row goes to some ranks only, and is there after one message.
  std::unique_ptr<DealFlight> deal(const FlightDescriptor& descriptor, const DealtRows& rows) override {
    return straight_->deal(descriptor, rows);
  }
  std::string why_not_deal() const override { return straight_->why_not_deal(); }
  int ranks_of_rail() const override { return layout_.ranks_per_host(); }
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override {
    const auto flight = gather(rows_held_descriptor(descriptor, world_size()));
    std::vector<int64_t> held = gather_rows_held(*flight, descriptor.own_rows, rank(), world_size());
    streams_.synchronize();
    inside_.raise_if_failed();  // before anybody believes these numbers
    return held;
  }

  void flush() override {
    for (FlightSteps& steps : slots_) steps.end();
    inside_.flush();
    straight_->flush();
  }
  void leave() override { flush(); }
  bool crosses_hosts() const override { return true; }
  std::string description() const override {
    return "rails of " + exchange_->backend_name() + " between hosts, copy engines inside, " +
           std::to_string(world_size()) + " ranks on " + std::to_string(layout_.hosts()) + " hosts";
  }
  int64_t workspace_bytes() const override {
    return inside_.workspace_bytes() + straight_->workspace_bytes();
  }

 private:
  friend class RailsFlight;

  // The transport of a flight inside the host, which claims its slot there.
  DeviceTransport& inside() {
    of_host_.deadline_seconds = kInsideDeadline * context_.deadline_seconds;  // may have been set since
    return inside_;
  }
  // The exchanges of the flight that has claimed that slot inside the host.
  FlightSteps& claim(int slot, Op op) {
    slots_[slot].claim(*exchange_, op, ++last_number_);
    ++context_.stats.ops;
    return slots_[slot];
  }

  // Whether a flight goes by rails; the same on all ranks.
  bool goes_by_rails(const FlightDescriptor& descriptor) const {
    return rows_of_rank(descriptor.rows, world_size(), 0) * descriptor.row_bytes() >= least_bytes_;
  }

  std::unique_ptr<Exchange> exchange_;
  std::unique_ptr<Transport> straight_;  // for few bytes
  int64_t least_bytes_;
  HostLayout layout_;
  GroupContext of_host_;
  DeviceTransport inside_;
  DeviceStreams streams_;
  uint64_t last_number_ = 0;
  // Of the flights under way, and of their predecessors until these have been waited for.
  std::array<FlightSteps, PYRUNTIME_SLOTS> slots_;
};

// The common part of gathers and scatters: a flight inside the host, and exchanges on the rail.
class RailsFlight {
 public:
  RailsFlight(RailsTransport& transport, const FlightDescriptor& descriptor, int64_t bytes, int flags)
      : transport_(transport),
        inside_(transport.inside(), descriptor, bytes, flags, /*pieces=*/0),
        steps_(transport.claim(inside_.slot(), descriptor.op)) {}

  DeviceFlight& inside() { return inside_; }
  const DeviceFlight& inside() const { return inside_; }
  const HostLayout& layout() const { return transport_.layout_; }
  GroupContext& context() const { return transport_.context(); }
  int hosts() const { return layout().hosts(); }
  int host() const { return layout().host(); }
  // The host that is `distance` hosts after this rank's, and its counterpart there.
  int after(int distance) const { return (host() + distance + hosts()) % hosts(); }
  int counterpart(int distance) const { return layout().on_rail(after(distance)); }
  // The hosts from this rank's to `other`, forwards and backwards.
  int distance_to(int other) const { return (other - host() + hosts()) % hosts(); }
  int distance_from(int other) const { return (host() - other + hosts()) % hosts(); }

  // Begins exchanges after what the current stream has so far.
  void exchange(const std::vector<Passage>& passages) { steps_.begin(passages); }
  void await_exchange(int index) { steps_.await(index); }

  // The hosts after this rank's, up to which exchange number `exchange` of a flight goes, from 1 on.
  int end_of_exchange(int exchange) const {
    const int others = hosts() - 1;
    return others * exchange / std::min(kMostExchanges, others);
  }
  // Puts rows of every host, which this rank has or which arrive by the exchanges that were begun, into the
  // others of its host: `where(host)` is their place in all slots. Passage s brings those of the host that is
  // s after this one, and has the index `first` + s. They are announced by flags in the order of hosts, from
  // `first` on, also where there are none.
  template <class Where>
  void spread(int first, const Where& where) {
    std::vector<PyruntimePut> puts;
    const auto add = [&](int distance) {
      const auto [at, bytes] = where(after(distance));
      for (int step = 1; step < inside_.world_size(); ++step) {
        puts.push_back({inside_.at(at), bytes, inside_.peer_at(step), at, first + after(distance), 1});
      }
    };
    add(0);
    inside_.put_together(puts);
    const auto moving = inside_.streams().on_moving();
    for (int distance = 1, exchange = 1; distance < hosts(); ++exchange) {
      puts.clear();
      steps_.follow(first + distance);
      for (; distance <= end_of_exchange(exchange); ++distance) add(distance);
      inside_.put_together(puts);
    }
  }

  // Waits for rows that were spread by `owner`'s counterpart in this host, or that came by its exchange.
  void await_rows(int first, int owner) {
    const int host_of = layout().host_of(owner), local = layout().local_rank_of(owner);
    if (local != layout().local_rank()) return inside_.await(local, {first + host_of, 1});
    if (host_of != host()) await_exchange(first + distance_to(host_of));
  }

  // Peers may write into this rank's slot once all that came is summed, passed on and read.
  void finish() {
    inside_.await_puts();
    inside_.finish();
    CommStats& found = inside_.context().stats;
    CommStats& sums = context().stats;
    sums.bytes += found.bytes;
    sums.waiting_s += found.waiting_s;
    sums.moving_s += found.moving_s;
    found = {};
  }

 private:
  RailsTransport& transport_;
  DeviceFlight inside_;
  FlightSteps& steps_;
};

namespace {

// A gather: the slot contains the rows of all ranks.
class RailsGather : public GatherByRank {
 public:
  RailsGather(RailsTransport& transport, const FlightDescriptor& descriptor, int hosts)
      : GatherByRank(transport.context(), descriptor),
        flight_(transport, descriptor, descriptor.rows * descriptor.row_bytes(), hosts) {}

  at::Tensor memory(const Chunk& chunk) override {
    return flight_.inside().view(flight_.inside().at(flight_.inside().offset(chunk)), chunk);
  }
  void publish(const Chunk& /*own*/) override {
    for (int distance = 1, exchange = 1; distance < flight_.hosts(); ++exchange) {
      std::vector<Passage> passages;
      for (; distance <= flight_.end_of_exchange(exchange); ++distance) {
        const int from = flight_.counterpart(distance);
        passages.push_back(
            {distance, flight_.counterpart(-distance), memory(plan_.own()), from, memory(plan_.of(from))});
      }
      flight_.exchange(passages);
    }
    flight_.spread(0, [&](int host) {
      const Chunk& chunk = plan_.of(flight_.layout().on_rail(host));
      return std::pair(flight_.inside().offset(chunk), flight_.inside().bytes(chunk));
    });
    flight_.inside().end_puts();
  }
  void wait(const Chunk& chunk) override {
    if (chunk.rows > 0 && chunk.owner != plan_.own().owner) flight_.await_rows(0, chunk.owner);
  }
  void wait_together(const std::vector<Chunk>& chunks) override {
    if (chunks.size() + 1 != order().size()) return GatherFlight::wait_together(chunks);
    for (int distance = 1; distance < flight_.hosts(); ++distance) flight_.await_exchange(distance);
    flight_.inside().await_all({0, flight_.hosts()});
  }
  void finish() override { flight_.finish(); }

 private:
  RailsFlight flight_;
};

// A scatter: the slot contains the parts of the rail's rows by the ranks of this host, each [hosts, most
// rows], then the sums of this rank's rows by other hosts, and if requested the sums of all rows.
class RailsScatter : public ScatterByRank {
 public:
  RailsScatter(RailsTransport& transport, const FlightDescriptor& descriptor, bool all,
               const HostLayout& layout)
      : ScatterByRank(transport.context(), descriptor, all),
        part_bytes_(plan_.max_rows() * descriptor.row_bytes()),
        flight_(transport, descriptor,
                layout.hosts() * (layout.ranks_per_host() + 1) * part_bytes_ +
                    (all ? descriptor.rows * descriptor.row_bytes() : 0),
                2 * layout.hosts()),
        missing_(layout.hosts()),
        is_regular_(descriptor.rows % transport.world_size() == 0 &&
                    descriptor.rows * descriptor.row_bytes() > 0) {
    const int ranks = layout.ranks_per_host();
    for (int rank = 0; rank < transport.world_size(); ++rank) {
      is_regular_ = is_regular_ && rank == layout.rank_at(rank / ranks, rank % ranks);
    }
    for (const Chunk& chunk : order()) {
      if (chunk.rows > 0) ++missing_[layout.host_of(chunk.owner)];
    }
    begun_ = begin_of_op(flight_.inside().device());
  }

  at::Tensor part(const Chunk& chunk) override { return flight_.inside().view(leaving(chunk), chunk); }
  void publish(const Chunk& chunk) override {
    if (const auto put = put_of(chunk)) {
      flight_.inside().put(static_cast<const char*>(put->from), put->bytes, put->peer, put->offset,
                           {put->first, put->flags});
    }
    published(chunk);
    pass_on();
  }
  void publish_together(const std::vector<Chunk>& chunks) override {
    std::vector<PyruntimePut> puts;
    for (const Chunk& chunk : chunks) {
      if (const auto put = put_of(chunk)) puts.push_back(*put);
    }
    flight_.inside().put_together(puts);
    for (const Chunk& chunk : chunks) published(chunk);
    pass_on();
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    pass_on();  // where there are no rows
    const Chunk& own = plan_.own();
    const DeviceFlight& inside = flight_.inside();
    if (own.rows > 0) {
      Reading reading(flight_.context(), descriptor_.op, /*peer=*/-1, begun_, inside.device());
      flight_.inside().await_all({flight_.host(), 1});
      for (int host = 0; host < flight_.hosts(); ++host) {
        if (host != flight_.host()) flight_.await_exchange(flight_.distance_from(host));
      }
      reading.came((flight_.hosts() + inside.world_size() - 2) * inside.bytes(own));
      const Spending summing(flight_.context(), Entered::kSum, name_of(descriptor_.op), /*peer=*/-1,
                             inside.device());
      sum_of_host(flight_.host());
      std::vector<at::Tensor> of_hosts;
      for (int host = 0; host < flight_.hosts(); ++host) {
        of_hosts.push_back(host == flight_.host() ? inside.view(summed(host), own)
                                                  : inside.view(arriving(host), own));
      }
      const at::Tensor target = all_ ? sum(own) : out.view(of_hosts.front().sizes());
      sum_in_order(target, of_hosts, bias, &inside.library(), inside.streams().current());
    }
    if (all_) {
      for (int distance = 1, exchange = 1; distance < flight_.hosts(); ++exchange) {
        std::vector<Passage> passages;
        for (; distance <= flight_.end_of_exchange(exchange); ++distance) {
          const int from = flight_.counterpart(distance);
          passages.push_back({flight_.hosts() + distance, flight_.counterpart(-distance), sum(own), from,
                              sum(plan_.of(from))});
        }
        flight_.exchange(passages);
      }
      flight_.spread(flight_.hosts(), [&](int host) {
        const Chunk& chunk = plan_.of(flight_.layout().on_rail(host));
        return std::pair(sum_offset(chunk), inside.bytes(chunk));
      });
      flight_.inside().end_puts();
    }
  }

  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner == plan_.own().owner || chunk.rows == 0) return;
    flight_.await_rows(flight_.hosts(), chunk.owner);
  }
  at::Tensor sum(const Chunk& chunk) override {
    return flight_.inside().view(flight_.inside().at(sum_offset(chunk)), chunk);
  }
  void finish() override { flight_.finish(); }

 private:
  // The put of a part inside the host; none if this rank sums it.
  std::optional<PyruntimePut> put_of(const Chunk& chunk) {
    const HostLayout& layout = flight_.layout();
    const int local = layout.local_rank_of(chunk.owner), host = layout.host_of(chunk.owner);
    if (chunk.rows == 0 || local == layout.local_rank()) return std::nullopt;
    return PyruntimePut{
        leaving(chunk), flight_.inside().bytes(chunk), local, of_rank(layout.local_rank(), host), host, 1};
  }
  void published(const Chunk& chunk) {
    if (chunk.rows > 0) --missing_[flight_.layout().host_of(chunk.owner)];
  }
  // After the last put of the parts: what the stream that moves rows gets later, no slot has to wait for.
  void end_puts() {
    if (!all_ && !std::exchange(has_ended_, true)) flight_.inside().end_puts();
  }
  // Sums the parts of the rail's rows on hosts whose parts are all published, and sends the sums. All ranks
  // do it in the same exchanges and order, as a send ends only when its receive has begun.
  void pass_on() {
    const DeviceFlight& inside = flight_.inside();
    while (next_ < flight_.hosts()) {
      const int end = flight_.end_of_exchange(exchange_);
      for (int distance = next_; distance <= end; ++distance) {
        if (missing_[flight_.after(distance)] > 0) return;
      }
      inside.streams().move_after_current();
      const auto moving = inside.streams().on_moving();
      std::vector<Passage> passages;
      for (int distance = next_; distance <= end;) {
        const int host = flight_.after(distance);
        const int count = std::min(end + 1 - distance, flight_.hosts() - host);
        sum_of_hosts(host, count);
        for (const int last = distance + count; distance < last; ++distance) {
          const int to = flight_.counterpart(distance), from = flight_.counterpart(-distance);
          passages.push_back({distance, to, inside.view(summed(flight_.after(distance)), plan_.of(to)), from,
                              inside.view(arriving(flight_.after(-distance)), plan_.own())});
        }
      }
      flight_.exchange(passages);
      next_ = end + 1;
      ++exchange_;
    }
    if (std::ranges::all_of(missing_, [](int chunks) { return chunks == 0; })) end_puts();
  }
  // Waits on the current stream for the parts of the rail's rows on `count` hosts, and sums them.
  void sum_of_hosts(int first, int count) {
    const DeviceFlight& inside = flight_.inside();
    if (!is_regular_) {
      for (int host = first; host < first + count; ++host) {
        if (plan_.of(flight_.layout().on_rail(host)).rows == 0) continue;
        flight_.inside().follow_all({host, 1});
        sum_of_host(host);
      }
      return;
    }
    flight_.inside().follow_all({first, count});
    // This rank's parts lie among those of other rails.
    const int64_t part = part_bytes_ / descriptor_.line_bytes(), ranks = inside.world_size();
    const auto lines = [&](char* memory) { return inside.lines(memory, count * part); };
    char* const from = leaving(plan_.of(flight_.layout().on_rail(first)));
    lines(inside.at(of_rank(inside.rank(), first)))
        .view({count, part, descriptor_.width})
        .copy_(inside.lines(from, ((count - 1) * ranks + 1) * part)
                   .as_strided({count, part, descriptor_.width},
                               {ranks * part * descriptor_.width, descriptor_.width, 1}),
               /*non_blocking=*/true);
    std::vector<at::Tensor> parts;
    for (int local = 0; local < ranks; ++local) parts.push_back(lines(inside.at(of_rank(local, first))));
    sum_in_order(lines(summed(first)), parts, /*bias=*/{}, &inside.library(), inside.streams().current());
  }
  // Sums the parts of the rail's rows on that host, on the current stream.
  void sum_of_host(int host) {
    const DeviceFlight& inside = flight_.inside();
    const Chunk& chunk = plan_.of(flight_.layout().on_rail(host));
    std::vector<at::Tensor> parts;
    for (int local = 0; local < inside.world_size(); ++local) {
      const bool is_own = local == inside.rank();
      parts.push_back(inside.view(is_own ? leaving(chunk) : inside.at(of_rank(local, host)), chunk));
    }
    sum_in_order(inside.view(summed(host), chunk), parts, /*bias=*/{}, &inside.library(),
                 inside.streams().current());
  }

  int64_t of_rank(int local, int host) const { return (local * flight_.hosts() + host) * part_bytes_; }
  char* arriving(int host) const { return flight_.inside().at(of_rank(flight_.inside().world_size(), host)); }
  int64_t sum_offset(const Chunk& chunk) const {
    return of_rank(flight_.inside().world_size() + 1, 0) + flight_.inside().offset(chunk);
  }
  char* leaving(const Chunk& chunk) const { return staging() + flight_.inside().offset(chunk); }
  // The sum over this host of the rail's rows on that host.
  char* summed(int host) const {
    return staging() + plan_.rows() * descriptor_.row_bytes() + host * part_bytes_;
  }
  char* staging() const {
    return flight_.inside().staging(plan_.rows() * descriptor_.row_bytes() + flight_.hosts() * part_bytes_);
  }

  int64_t part_bytes_;
  RailsFlight flight_;
  std::vector<int> missing_;  // chunks of a host's rows that are not published
  bool has_ended_ = false;    // its puts
  int exchange_ = 1;          // the next exchange of sums
  bool is_regular_;           // all parts are of one size, and those of a rail at equal distances
  int next_ = 1;              // the next host to send a sum to, in hosts after this rank's
};

}  // namespace

std::unique_ptr<GatherFlight> RailsTransport::gather(const FlightDescriptor& descriptor) {
  if (!goes_by_rails(descriptor)) return straight_->gather(descriptor);
  return std::make_unique<RailsGather>(*this, descriptor, layout_.hosts());
}

std::unique_ptr<ScatterFlight> RailsTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  if (!goes_by_rails(descriptor)) return straight_->scatter(descriptor, all);
  return std::make_unique<RailsScatter>(*this, descriptor, all, layout_);
}

std::unique_ptr<Transport> make_rails_transport(GroupContext& context, std::unique_ptr<Exchange> exchange,
                                                std::unique_ptr<Transport> straight,
                                                std::unique_ptr<WorkspaceGroup> host, PeerProcesses processes,
                                                const HostLayout& layout, c10::Device device,
                                                const DeviceLibrary& library, const GroupSettings& settings) {
  return std::make_unique<RailsTransport>(context, std::move(exchange), std::move(straight), std::move(host),
                                          std::move(processes), layout, device, library, settings);
}

}  // namespace pyruntime
