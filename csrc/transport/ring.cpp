#include "transport/ring.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "core/arbiter.h"
#include "core/deadline.h"
#include "core/failure_board.h"
#include "core/late_report.h"
#include "core/prompt_thread.h"
#include "cpu/reduce.h"
#include "transport/ring_flight.h"

namespace pyruntime {

namespace {

constexpr int kMaxPieces = 64;
constexpr int64_t kTileRows = 64;  // fewer rows than this make a GEMM slow
// Chunks too small to keep the link busy two at a time may be under way in as many bytes as the link carries
// in this many latencies.
constexpr double kWindowLatencies = 4.0;
constexpr int64_t kMostWindowBytes = 1 << 20;
// No link of a process group is faster than 1 TB/s; a measurement may be.
constexpr double kLeastSecondsPerByte = 1e-12;

// After a deadline: how long a neighbour may take to show that it runs, and how long to wait for the word of
// one who knows more. Together they stay below the second that a rank may take beyond its deadline.
constexpr double kAnswerSeconds = 0.2;
constexpr double kHearsaySeconds = 0.4;

// Tags of data: which opening of the group, which flight, which stream, which piece.
constexpr int kTagBase = 1 << 30;
constexpr int kProbeTag = kTagBase - 1;

// 9 bits of opening, 6 of flight, 1 of stream, 14 of piece.
int tag_of(int instance, uint64_t flight, int stream, size_t index) {
  return kTagBase | (instance % 512) << 21 | static_cast<int>(flight % 64) << 15 | stream << 14 |
         static_cast<int>(index);
}

// What the link may still read and write after its group has gone lives as long as the process.
void keep_for_good(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>();  // never destroyed: transfers outlive statics
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace

int ring_flags(int world_size, int hosts) {
  return (world_size + hosts) * kMaxPieces;
}

std::vector<int> ring_neighbours(const HostLayout& layout) {
  std::vector<int> neighbours;
  for (const RingStream& stream : ring_streams(layout.hosts(), layout.host(), 2)) {
    const int rank = layout.rank_at(stream.downstream, layout.local_rank());
    if (std::find(neighbours.begin(), neighbours.end(), rank) == neighbours.end()) neighbours.push_back(rank);
  }
  return neighbours;
}

int ring_pieces(int64_t bytes, int64_t rows, bool with_matmul, int hosts, const LinkCost& cost,
                const RingOptions& options) {
  const double transfer_s = static_cast<double>(bytes) * cost.seconds_per_byte;
  const double wanted = options.chunk_bytes > 0
                            ? static_cast<double>(bytes) / static_cast<double>(options.chunk_bytes)
                            : std::sqrt(transfer_s / cost.latency_s);
  int64_t pieces = std::clamp<int64_t>(std::llround(std::ceil(wanted)), 1, kMaxPieces);
  const int streams = hosts > 2 ? 2 : 1;
  pieces = (pieces + streams - 1) / streams * streams;
  if (with_matmul && options.chunk_bytes == 0) {
    pieces = std::min(pieces, std::max<int64_t>(1, rows / kTileRows) / streams * streams);
  }
  return static_cast<int>(std::max<int64_t>(streams, pieces));
}

class RingTransport : public Transport {
 public:
  RingTransport(GroupContext& context, RingParts parts, const RingOptions& options,
                const std::function<std::vector<double>(const std::vector<double>&)>& agree)
      : Transport(context), parts_(std::move(parts)), options_(options), pid_(getpid()) {
    if (options_.chunk_bytes == 0) settle_cost(agree);
    for (const RingStream& stream : ring_streams(layout().hosts(), layout().host(), 2)) {
      upstream(stream);  // makes its receiver
      windows_[stream.downstream] = &arbiter().window_to(parts_.host_names[stream.downstream]);
    }
    for (auto& [peer, line] : parts_.lines) {
      arbiter().listen(line->fd(), [this, peer = peer, line = line.get()] {
        return line->receive([this, peer](const ControlMessage& message) { handle(peer, message); }) ||
               closed_by(peer);
      });
    }
    for (auto& [peer, receiver] : receivers_) {
      receiver.thread = std::thread([this, peer = peer, &receiver = receiver] { receive(peer, receiver); });
      pthread_setname_np(receiver.thread.native_handle(), "pyr-receive");
    }
  }

  ~RingTransport() override {
    for (const auto& lanes : lanes_) {
      for (const auto& lane : lanes) arbiter().remove(lane);
    }
    for (auto& [peer, line] : parts_.lines) {
      arbiter().forget(line->fd());
      line->send(message(ControlMessage::kBye, 0, 0, 0));
    }
    closing_.store(true);
    for (auto& [peer, receiver] : receivers_) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (receiver.current != nullptr) {
          context_.link_is_broken = true;
          abort(*receiver.current);
        }
      }
      receiver.noticed.notify_all();
      receiver.thread.join();
    }
    // What was under way when an op failed. The link may still read and write that memory, so it stays: the
    // group cannot be opened again, and the job ends or makes its process groups anew.
    for (auto& slot : slots_) {
      if (!slot.flight) continue;
      for (auto& stream : slot.flight->streams()) {
        for (const StreamState::Sent& sent : stream->under_way) {
          arbiter().give_up(window_to(stream->stream.downstream), sent.bytes);
          context_.link_is_broken = true;
        }
      }
    }
    if (context_.link_is_broken) {
      for (SlotState& slot : slots_) {
        keep_for_good(std::move(slot.flight));
        keep_for_good(std::make_shared<Scratch>(std::move(slot.scratch)));
      }
      keep_for_good(std::shared_ptr<HostWorkspace>(std::move(parts_.workspace)));
    }
  }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override;

  void flush() override {
    const auto sent = [this] {
      return std::all_of(slots_.begin(), slots_.end(), [](const SlotState& slot) {
        return !slot.flight || slot.flight->all_acknowledged();
      });
    };
    // After a failure there is nothing to wait for: some of it will never be published.
    const auto possible = [this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failed_.load() || !poisoned_.empty()) throw std::runtime_error("failed");
    };
    try {
      wait_until(sent, context_.deadline_seconds, possible);
    } catch (const std::exception&) {
      // The group has failed, and whoever waits for this rank has been told why.
    }
  }

  void leave() override {
    flush();
    for (auto& [peer, line] : parts_.lines) line->send(message(ControlMessage::kBye, 0, 0, 0));
  }

  bool crosses_hosts() const override { return true; }
  std::string description() const override {
    std::ostringstream text;
    if (layout().ranks_per_host() > 1) {
      text << "hierarchical: " << layout().hosts() << " hosts of " << layout().ranks_per_host()
           << " ranks, symmetric memory inside a host and " << link_name() << " between them";
    } else {
      text << "ring over " << link_name() << ", " << layout().hosts() << " hosts";
    }
    if (options_.chunk_bytes > 0) {
      text << ", chunks of about " << options_.chunk_bytes << " bytes";
    } else {
      text.precision(3);
      text << ", measured " << cost_.latency_s * 1e6 << " us and " << 1e-6 / cost_.seconds_per_byte
           << " MB/s";
    }
    return text.str();
  }
  int64_t workspace_bytes() const override {
    int64_t total = parts_.workspace->bytes();
    for (const SlotState& slot : slots_) total += slot.scratch.bytes();
    return total;
  }

  const HostLayout& layout() const { return parts_.layout; }

  // Waits for something that a peer does; `site` says what, for messages.
  void await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
             const std::function<std::string()>& what) {
    if (arrived()) return;
    const ScopedSeconds waiting(context_.stats.waiting_s);
    const auto site = [&] {
      std::ostringstream text;
      text << name_of(flight.descriptor().op) << " (op " << flight.host().number() << " of group '"
           << context_.name << "'), rank " << context_.own_rank() << " waiting for rank "
           << context_.told(peer) << " to " << what();
      return text.str();
    };
    LateReport report(context_.deadline_seconds, site);
    // What comes by way of another rank of this host does not depend on this rank's neighbours.
    const bool by_own_rail = layout().local_rank_of(peer) == layout().local_rank();
    const auto possible = [&] {
      raise_if_failed();
      if (by_own_rail) raise_if_deserted();
      report.look();
    };
    if (wait_until(arrived, context_.deadline_seconds, possible)) return;
    const std::string culprit = silent_neighbour(flight.number());
    if (culprit.empty()) {
      // Whoever is stuck is no neighbour of this rank; one that is will say so, and its word is better.
      if (wait_until(arrived, kHearsaySeconds, possible)) return;
    }
    fail_timeout(site() + ": not within the deadline of " + seconds_text() + " s (expected op " +
                 std::to_string(flight.number()) + ", seen: " + neighbours_text() + ")" + culprit + ".");
  }

  void published() { arbiter().wake(); }
  // An op was left by an exception: the peers may wait for chunks that never come.
  void poison(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (poisoned_.empty()) poisoned_ = failure_.message.empty() ? why : failure_.message;
  }

 private:
  // What one flight sends on one stream.
  class FlightLane : public Lane {
   public:
    FlightLane(RingTransport& transport, std::shared_ptr<RingFlight> flight, StreamState& stream)
        : transport_(transport), flight_(std::move(flight)), stream_(stream) {}

    TrafficClass traffic_class() const override { return transport_.context_.traffic_class; }
    SendWindow& window() override { return transport_.window_to(stream_.stream.downstream); }
    bool ready() override {
      return stream_.credit.load(std::memory_order_acquire) && flight_->part_is_ready(stream_, head());
    }
    int64_t bytes() const override { return head().bytes; }
    void send() override { transport_.send_head(*flight_, stream_); }
    bool done() override {
      return stream_.next_send == stream_.sends.size() || transport_.failed_.load() ||
             transport_.closing_.load();
    }
    bool needs_polling() override {
      return transport_.layout().ranks_per_host() > 1 && head().phase == RingPhase::kScatter &&
             (head().after < 0 || stream_.arrived[head().after].load(std::memory_order_acquire));
    }

   private:
    const Hop& head() const { return stream_.sends[stream_.next_send]; }

    RingTransport& transport_;
    std::shared_ptr<RingFlight> flight_;
    StreamState& stream_;
  };

  // Takes in what one neighbour sends, in the order in which it says that it sends.
  struct Receiver {
    std::thread thread;
    std::condition_variable noticed;
    std::deque<std::pair<uint64_t, std::pair<int, size_t>>> notices;  // (flight, (stream, index))
    PendingTransfer* current = nullptr;
  };

  struct SlotState {
    std::shared_ptr<RingFlight> flight;  // the latest to work in it
    Scratch scratch;
  };

  struct Begun {
    uint64_t last = 0;
    std::map<uint64_t, FlightDescriptor> early;  // flights that this rank has not begun yet
  };

  friend class RingGather;
  friend class RingScatter;

  Arbiter& arbiter() const { return *parts_.arbiter; }
  int rank_of_host(int host) const { return layout().rank_at(host, layout().local_rank()); }
  Receiver& upstream(const RingStream& stream) { return receivers_[rank_of_host(stream.upstream)]; }
  SendWindow& window_to(int host) { return *windows_.at(host); }
  std::string link_name() const { return parts_.link->name(); }
  std::string seconds_text() const {
    std::ostringstream text;
    text << context_.deadline_seconds;
    return text.str();
  }

  static ControlMessage message(ControlMessage::Kind kind, int stream, uint64_t flight, uint64_t index) {
    ControlMessage result{};
    result.kind = kind;
    result.stream = stream;
    result.flight = flight;
    result.index = index;
    return result;
  }

  int pieces_for(const FlightDescriptor& descriptor) const {
    const int64_t rows =
        rows_of_rank(descriptor.rows, world_size(), std::max(0, descriptor.holder), descriptor.holder);
    const bool with_matmul = descriptor.op == Op::kAllGatherMatmul ||
                             descriptor.op == Op::kMatmulReduceScatter ||
                             descriptor.op == Op::kMatmulAllReduce;
    return ring_pieces(rows * descriptor.row_bytes(), rows * descriptor.row_blocks * descriptor.inner,
                       with_matmul, layout().hosts(), cost_, options_);
  }

  // `announced` is what the ranks compare.
  std::shared_ptr<RingFlight> begin(FlightKind kind, const FlightDescriptor& descriptor, int pieces,
                                    const FlightDescriptor& announced) {
    TORCH_CHECK(getpid() == pid_, "Group '", context_.name, "' was opened by process ", pid_,
                " and is used by its fork ", getpid(), "; start ranks as processes of their own.");
    raise_if_broken();
    const SlotState& slot = slots_[(last_number_ + 1) % kSlots];
    TORCH_CHECK(!slot.flight || slot.flight->finished(), "Group '", context_.name, "' already has ", kSlots,
                " ops in flight; finish one before beginning ", name_of(announced.op), ".");
    const uint64_t number = ++last_number_;
    try {
      return begin(number, kind, descriptor, pieces, announced);
    } catch (const std::exception& error) {
      // The peers will count this op.
      poison(std::string(name_of(announced.op)) + " could not begin: " + first_line(error.what()));
      throw;
    }
  }

  std::shared_ptr<RingFlight> begin(uint64_t number, FlightKind kind, const FlightDescriptor& descriptor,
                                    int pieces, const FlightDescriptor& announced) {
    SlotState& slot = slots_[number % kSlots];
    await_slot(slot, number);
    const bool own_wire = kind != FlightKind::kGather && options_.wire != c10::ScalarType::Undefined &&
                          descriptor.scalar_type() != c10::ScalarType::Double;
    auto flight = std::make_shared<RingFlight>(context_, layout(), kind, descriptor, pieces,
                                               own_wire ? options_.wire : descriptor.scalar_type());
    flight->lay_out(parts_.workspace->begin(announced, flight->workspace_bytes()), slot.scratch);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      slot.flight = flight;
      announced_[number % kSlots] = announced;
    }
    post_receives(*flight);
    introduce(*flight, announced);
    add_lanes(flight);
    return flight;
  }

  // The memory of flight number - kSlots is free when its rows have been read here and have left.
  void await_slot(SlotState& slot, uint64_t number) {
    if (!slot.flight) return;
    const RingFlight& previous = *slot.flight;
    for (const auto& stream : slot.flight->streams()) {
      const auto sent = [&] { return stream->acknowledged.load() == stream->sends.size(); };
      await(sent, previous, rank_of_host(stream->stream.downstream), [&] {
        return "take chunk " + std::to_string(stream->acknowledged.load()) + " of op " +
               std::to_string(number - kSlots);
      });
    }
    lanes_[number % kSlots].clear();  // the arbiter has let go of them too: nothing is left to send
  }

  void post_receives(RingFlight& flight) {
    for (auto& stream : flight.streams()) {
      const int peer = rank_of_host(stream->stream.upstream);
      for (size_t i = 0; i < stream->receives.size(); ++i) {
        const Hop& hop = stream->receives[i];
        stream->receiving[i] = parts_.link->receive(
            hop.memory, hop.bytes, peer, tag_of(parts_.instance, flight.number(), stream->stream.index, i));
      }
    }
  }

  // Tells the neighbours that this rank has begun the flight and has room, and looks whether they have.
  void introduce(RingFlight& flight, const FlightDescriptor& announced) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [peer, begun] : begun_) {
        const auto early = begun.early.find(flight.number());
        if (early == begun.early.end()) continue;
        meet(peer, flight, early->second);
        begun.early.erase(early);
      }
    }
    for (auto& [peer, line] : parts_.lines) {
      ControlMessage hello = message(ControlMessage::kBegin, 0, flight.number(), 0);
      hello.descriptor = announced;
      line->send(hello);  // a broken line is noticed by the thread that listens to it
    }
  }

  void add_lanes(const std::shared_ptr<RingFlight>& flight) {
    for (auto& stream : flight->streams()) {
      if (stream->sends.empty()) continue;
      auto lane = std::make_shared<FlightLane>(*this, flight, *stream);
      lanes_[flight->number() % kSlots].push_back(lane);
      arbiter().add(lane);
    }
  }

  // --- the arbiter's thread

  void handle(int peer, const ControlMessage& message) {
    switch (message.kind) {
      case ControlMessage::kBegin: {
        const std::lock_guard<std::mutex> lock(mutex_);
        Begun& begun = begun_[peer];
        begun.last = std::max(begun.last, message.flight);
        const SlotState& slot = slots_[message.flight % kSlots];
        if (slot.flight && slot.flight->number() == message.flight) {
          meet(peer, *slot.flight, message.descriptor);
        } else {
          begun.early[message.flight] = message.descriptor;
        }
        return;
      }
      case ControlMessage::kNotice: {
        const std::lock_guard<std::mutex> lock(mutex_);
        Receiver& receiver = receivers_[peer];
        receiver.notices.push_back({message.flight, {message.stream, message.index}});
        receiver.noticed.notify_one();
        return;
      }
      case ControlMessage::kArrived:
        return acknowledge(message);
      case ControlMessage::kProbe:
        parts_.lines.at(peer)->send(this->message(ControlMessage::kAnswer, 0, message.flight, 0));
        return;
      case ControlMessage::kAnswer: {
        const std::lock_guard<std::mutex> lock(mutex_);
        answered_[peer] = message.flight;
        return;
      }
      case ControlMessage::kBye: {
        const std::lock_guard<std::mutex> lock(mutex_);
        said_bye_[peer] = true;
        return;
      }
      default:
        return lose(peer, "sent a message that is no message of this version");
    }
  }

  // Under the lock.
  void meet(int peer, RingFlight& flight, const FlightDescriptor& theirs) {
    const FlightDescriptor& ours = announced_[flight.number() % kSlots];
    if (!ours.agrees_with(theirs)) {
      std::ostringstream text;
      text << "Ranks disagree on op " << flight.number() << " of group '" << context_.name << "': rank "
           << context_.own_rank() << " called " << ours.text() << " and rank " << context_.told(peer)
           << " called " << theirs.text()
           << "; all ranks must call the same ops with the same shapes and dtypes, in the same order.";
      set_failure({CommErrorKind::kDisagree, text.str(), context_.name});
      return;
    }
    for (auto& stream : flight.streams()) {
      if (rank_of_host(stream->stream.downstream) == peer)
        stream->credit.store(true, std::memory_order_release);
    }
  }

  void send_head(RingFlight& flight, StreamState& stream) {
    const size_t index = stream.next_send++;
    const Hop& hop = stream.sends[index];
    const int peer = rank_of_host(stream.stream.downstream);
    stream.under_way.push_back({nullptr, hop.bytes, monotonic_seconds()});
    try {
      const void* data = flight.prepare(stream, hop);
      if (hop.phase == RingPhase::kScatter) flight.count_prepared();
      parts_.lines.at(peer)->send(
          message(ControlMessage::kNotice, stream.stream.index, flight.number(), index));
      stream.under_way.back().transfer = parts_.link->send(
          data, hop.bytes, peer, tag_of(parts_.instance, flight.number(), stream.stream.index, index));
    } catch (const std::exception& error) {
      lose(peer, std::string("cannot be sent to: ") + first_line(error.what()));
    }
  }

  void acknowledge(const ControlMessage& message) {
    std::shared_ptr<RingFlight> flight = flight_of(message.flight);
    if (!flight || message.stream >= static_cast<int>(flight->streams().size())) return;
    StreamState& stream = *flight->streams()[message.stream];
    if (stream.under_way.empty()) return;
    StreamState::Sent sent = std::move(stream.under_way.front());
    stream.under_way.pop_front();
    try {
      // It has arrived, so this returns at once; it is what frees the send.
      sent.transfer->wait(context_.deadline_seconds);
    } catch (const std::exception& error) {
      lose(rank_of_host(stream.stream.downstream), first_line(error.what()));
    }
    arbiter().acknowledge(context_.traffic_class, window_to(stream.stream.downstream), sent.bytes,
                          monotonic_seconds() - sent.at);
    stream.acknowledged.fetch_add(1);
  }

  bool closed_by(int peer) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_[peer] = true;
      const auto bye = said_bye_.find(peer);
      if (bye != said_bye_.end() && bye->second) return false;
    }
    lose(peer, "has ended: its connection closed");
    return false;
  }

  // --- the receivers' threads

  void receive(int peer, Receiver& receiver) {
    make_this_thread_prompt();
    while (true) {
      std::shared_ptr<RingFlight> flight;
      StreamState* stream = nullptr;
      size_t index = 0;
      std::unique_ptr<PendingTransfer> pending;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        receiver.noticed.wait(lock, [&] { return closing_.load() || !receiver.notices.empty(); });
        if (closing_.load()) return;
        const auto [number, where] = receiver.notices.front();
        receiver.notices.pop_front();
        const SlotState& slot = slots_[number % kSlots];
        if (slot.flight && slot.flight->number() == number &&
            where.first < static_cast<int>(slot.flight->streams().size())) {
          flight = slot.flight;
          stream = flight->streams()[where.first].get();
          index = where.second;
          if (index < stream->receives.size()) pending = std::move(stream->receiving[index]);
        }
        receiver.current = pending.get();
      }
      if (!pending) {
        lose(peer, "announced a chunk that this rank does not expect");
        return;
      }
      bool arrived = false;
      std::string problem;
      try {
        arrived = pending->wait(-1);
      } catch (const std::exception& error) {
        problem = first_line(error.what());
      }
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        receiver.current = nullptr;
      }
      if (closing_.load()) return;
      if (!arrived) {
        lose(peer, "broke off while it sent: " + problem);
        return;
      }
      stream->arrived[index].store(true, std::memory_order_release);
      flight->announce(stream->receives[index]);
      parts_.lines.at(peer)->send(
          message(ControlMessage::kArrived, stream->stream.index, flight->number(), index));
      arbiter().wake();  // it may have to travel on
    }
  }

  // --- failures

  static void abort(PendingTransfer& transfer) {
    try {
      transfer.abort();
    } catch (const std::exception&) {
      // A backend that cannot; its wait ends when the connection does.
    }
  }

  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  std::shared_ptr<RingFlight> flight_of(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SlotState& slot = slots_[number % kSlots];
    return slot.flight && slot.flight->number() == number ? slot.flight : nullptr;
  }

  void lose(int peer, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string host = layout().ranks_per_host() > 1 || layout().hosts() < world_size()
                           ? " on host " + std::to_string(layout().host_of(peer))
                           : "";
    set_failure({CommErrorKind::kPeerLost, "rank " + std::to_string(context_.told(peer)) + host + " " + what,
                 context_.name});
  }

  // Under the lock. The first one counts.
  void set_failure(Failure failure) {
    if (failed_.load()) return;
    failure_ = std::move(failure);
    failed_.store(true);
  }

  // In the thread of an op that waits.
  void raise_if_failed() {
    if (!failed_.load()) return;
    Failure failure;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
    }
    if (failure.kind == CommErrorKind::kPeerLost) {
      const std::shared_ptr<RingFlight> flight = flight_of(last_number_);
      const std::string op = flight ? std::string(name_of(flight->descriptor().op)) + " (op " +
                                          std::to_string(last_number_) + " of group '" + context_.name + "')"
                                    : "group '" + context_.name + "'";
      failure.message = op + ", rank " + std::to_string(context_.own_rank()) + ": " + failure.message + ".";
    }
    raise_for_all(failure);
  }

  // Nobody is left who could send what an op waits for.
  void raise_if_deserted() {
    std::string who;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [peer, line] : parts_.lines) {
        if (closed_.count(peer) == 0) return;
        who += (who.empty() ? "rank " : " and rank ") + std::to_string(context_.told(peer));
      }
      set_failure({CommErrorKind::kPeerLost,
                   who + " closed the group, or ended, before this op: ranks must call the same ops",
                   context_.name});
    }
    raise_if_failed();
  }

  [[noreturn]] void fail_timeout(const std::string& text) {
    const Failure failure{CommErrorKind::kTimeout, text, context_.name};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      set_failure(failure);
    }
    raise_for_all(failure);
  }

  // Before an op. A peer that was lost between two ops is told of as such, once.
  void raise_if_broken() {
    std::string why;
    bool first = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failed_.load() && poisoned_.empty()) return;
      first = poisoned_.empty();
      if (first) poisoned_ = failure_.message;
      why = poisoned_;
    }
    if (first) raise_if_failed();
    raise_comm_error(CommErrorKind::kBroken,
                     "Group '" + context_.name +
                         "' cannot go on: its ranks are out of step since an earlier error (" + why +
                         "); close it on all ranks and start anew.");
  }

  // Says who of the neighbours holds the ring up, as far as this rank can tell; empty if it is none of them.
  std::string silent_neighbour(uint64_t number) {
    uint64_t round;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [peer, line] : parts_.lines) {
        if (begun_[peer].last < number)
          return "; rank " + std::to_string(context_.told(peer)) + " has not begun it";
      }
      round = ++probe_round_;
    }
    for (const auto& [peer, line] : parts_.lines) line->send(message(ControlMessage::kProbe, 0, round, 0));
    int silent = -1;
    const auto all_answered = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      silent = -1;
      for (const auto& [peer, line] : parts_.lines) {
        if (answered_[peer] < round) silent = peer;
      }
      return silent < 0;
    };
    if (wait_until(all_answered, kAnswerSeconds, [] {})) return "";
    return "; rank " + std::to_string(context_.told(silent)) + " does not answer: it is stopped, or cut off";
  }

  std::string neighbours_text() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::ostringstream text;
    for (const auto& [peer, line] : parts_.lines) {
      const auto found = begun_.find(peer);
      text << (text.tellp() > 0 ? ", " : "") << "rank " << context_.told(peer) << " last began op "
           << (found == begun_.end() ? 0 : found->second.last);
    }
    return text.str();
  }

  // --- the link's cost

  // Measured once for a set of hosts; all ranks must know it, or all measure.
  void settle_cost(const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
    std::string hosts;
    for (const std::string& name : parts_.host_names) hosts += name + "\n";
    const std::optional<std::pair<double, double>> known = arbiter().known_cost(hosts);
    const LinkCost own = known ? LinkCost{known->first, known->second} : LinkCost{0, 0};
    const std::vector<double> agreed = agree({known ? 0.0 : 1.0, own.latency_s, own.seconds_per_byte});
    if (agreed[0] == 0) {
      cost_ = {agreed[1], agreed[2]};
    } else {
      measure(agree);
      arbiter().remember_cost(hosts, {cost_.latency_s, cost_.seconds_per_byte});
    }
    arbiter().ensure_window_bytes(std::min(
        kMostWindowBytes, static_cast<int64_t>(kWindowLatencies * cost_.latency_s / cost_.seconds_per_byte)));
  }

  // Every rank sends to its neighbour downstream and receives from the one upstream, so the link is measured
  // as it will be used. The time of a small message is the latency; the slope from there to one that takes
  // about kProbeSeconds gives the seconds per byte. The least of a few each, as whatever else the machine
  // does only ever adds; then the slowest rank's for all.
  void measure(const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
    constexpr int64_t kSmall = 1 << 10, kMedium = 1 << 16, kLargest = 1 << 22;
    constexpr double kProbeSeconds = 20e-3;
    constexpr int kRepeats = 8;
    std::vector<char> out(kLargest, 1), in(kLargest);
    const auto least = [&](int64_t bytes) {
      double seconds = exchange_probe(in, out, bytes);
      for (int i = 1; i < kRepeats; ++i) seconds = std::min(seconds, exchange_probe(in, out, bytes));
      return seconds;
    };
    const std::vector<double> first = agree({least(kSmall), least(kMedium)});
    const double scale = std::max(1.0, kProbeSeconds / first[1]);
    const int64_t large = std::min(kLargest, static_cast<int64_t>(scale * kMedium));
    const double latency = std::max(10e-6, first[0]);
    const double slope = (least(large) - first[0]) / static_cast<double>(large - kSmall);
    cost_ = {latency, std::max(kLeastSecondsPerByte, agree({slope})[0])};
  }

  double exchange_probe(std::vector<char>& in, const std::vector<char>& out, int64_t bytes) {
    const RingStream stream = ring_streams(layout().hosts(), layout().host(), 2).front();
    const double start = monotonic_seconds();
    auto coming = parts_.link->receive(in.data(), bytes, rank_of_host(stream.upstream), kProbeTag);
    auto going = parts_.link->send(out.data(), bytes, rank_of_host(stream.downstream), kProbeTag);
    try {
      coming->wait(context_.deadline_seconds);
      going->wait(context_.deadline_seconds);
    } catch (const std::exception& error) {
      const bool late = monotonic_seconds() - start >= context_.deadline_seconds;
      raise_for_all({late ? CommErrorKind::kTimeout : CommErrorKind::kPeerLost,
                     "opening group '" + context_.name + "', rank " + std::to_string(context_.own_rank()) +
                         " measuring the link to its neighbours: " + first_line(error.what()),
                     context_.name});
    }
    return monotonic_seconds() - start;
  }

  RingParts parts_;
  RingOptions options_;
  LinkCost cost_;
  pid_t pid_;
  uint64_t last_number_ = 0;
  std::array<std::vector<std::shared_ptr<Lane>>, kSlots> lanes_;  // of the flights in the slots
  std::map<int, SendWindow*> windows_;                            // by neighbouring host

  std::mutex mutex_;  // guards what follows; never held while calling the arbiter
  std::array<SlotState, kSlots> slots_;
  std::array<FlightDescriptor, kSlots> announced_;  // of the flights in the slots
  std::map<int, Begun> begun_;                      // by neighbour
  std::map<int, Receiver> receivers_;
  uint64_t probe_round_ = 0;
  std::map<int, uint64_t> answered_;  // the latest probe, by neighbour
  std::map<int, bool> said_bye_;
  std::map<int, bool> closed_;
  Failure failure_;
  std::string poisoned_;  // why no op may begin any more; empty while they may
  std::atomic<bool> failed_{false};
  std::atomic<bool> closing_{false};
};

namespace {

at::Tensor view(char* memory, const FlightDescriptor& descriptor, const Chunk& chunk) {
  const auto options = at::TensorOptions().dtype(descriptor.scalar_type());
  if (chunk.rows * descriptor.row_elements() == 0) return at::empty(descriptor.sizes_of(chunk), options);
  return at::from_blob(memory, descriptor.sizes_of(chunk), options);
}

}  // namespace

class RingGather : public GatherFlight {
 public:
  RingGather(RingTransport& transport, std::shared_ptr<RingFlight> flight)
      : transport_(transport), flight_(std::move(flight)), own_(flight_->own_chunks()) {}
  ~RingGather() override {
    if (!flight_->finished()) {
      transport_.poison(std::string(name_of(flight_->descriptor().op)) + " ended before it was finished");
    }
  }

  const std::vector<Chunk>& order() const override { return flight_->order(); }
  const std::vector<Chunk>& own() const override { return own_; }
  at::Tensor memory(const Chunk& chunk) override {
    return view(flight_->rows_at(chunk), flight_->descriptor(), chunk);
  }
  void publish(const Chunk& chunk) override {
    flight_->host().publish(flight_->rows_flag(chunk.owner, chunk.piece));
    transport_.published();
  }
  void wait(const Chunk& chunk) override {
    const int local = transport_.layout().local_rank_of(chunk.owner);
    if (local != transport_.layout().local_rank()) flight_->host().meet(local);
    for (const int piece : flight_->pieces_of(chunk)) {
      if (flight_->is_empty(chunk.owner, piece)) continue;
      const int flag = flight_->rows_flag(chunk.owner, piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_, chunk.owner,
                       [&] { return "send chunk " + std::to_string(piece) + " of its rows"; });
    }
  }
  void finish() override { flight_->finish(); }

 private:
  RingTransport& transport_;
  std::shared_ptr<RingFlight> flight_;
  std::vector<Chunk> own_;
};

class RingScatter : public ScatterFlight {
 public:
  RingScatter(RingTransport& transport, std::shared_ptr<RingFlight> flight)
      : transport_(transport), flight_(std::move(flight)) {}
  ~RingScatter() override {
    if (!flight_->finished()) {
      transport_.poison(std::string(name_of(flight_->descriptor().op)) + " ended before it was finished");
    }
  }

  const std::vector<Chunk>& order() const override { return flight_->order(); }
  at::Tensor part(const Chunk& chunk) override {
    return view(flight_->part_at(own_local(), chunk), flight_->descriptor(), chunk);
  }
  void publish(const Chunk& chunk) override {
    for (const int piece : flight_->pieces_of(chunk)) {
      flight_->host().publish(flight_->part_flag(chunk.owner, piece));
    }
    transport_.published();
  }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const at::Tensor row_bias = bias.defined() ? bias.contiguous() : bias;
    for (const Chunk& piece : flight_->own_chunks()) {
      if (!flight_->is_empty(piece.owner, piece.piece)) {
        await_parts(piece);
        sum_piece(piece, out, row_bias);
      }
      if (flight_->kind() == FlightKind::kScatterAll) {
        flight_->host().publish(flight_->sum_flag(piece.owner, piece.piece));
        transport_.published();
      }
    }
  }

  const std::vector<Chunk>& sums_order() const override { return flight_->sums_order(); }
  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner == transport_.rank()) return;
    const int local = transport_.layout().local_rank_of(chunk.owner);
    for (const int piece : flight_->pieces_of(chunk)) {
      if (flight_->is_empty(chunk.owner, piece)) continue;
      const int flag = flight_->sum_flag(chunk.owner, piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_, chunk.owner,
                       [&] { return "send chunk " + std::to_string(piece) + " of its sums"; });
    }
  }
  at::Tensor sum(const Chunk& chunk) override {
    return view(flight_->rows_at(chunk), flight_->descriptor(), chunk);
  }
  void finish() override { flight_->finish(); }

 private:
  int own_local() const { return transport_.layout().local_rank(); }

  void await_parts(const Chunk& piece) {
    for (int local = 0; local < transport_.layout().ranks_per_host(); ++local) {
      if (local == own_local()) continue;
      flight_->host().meet(local);
      const int flag = flight_->part_flag(piece.owner, piece.piece);
      transport_.await([&] { return flight_->host().ready(local, flag); }, *flight_,
                       transport_.layout().rank_at(transport_.layout().host(), local),
                       [&] { return "write its part of chunk " + std::to_string(piece.piece); });
    }
    const RingFlight::OwnPartial& partial = flight_->own_partial(piece.piece);
    const int sender = transport_.layout().rank_at(partial.stream->stream.upstream, own_local());
    transport_.await([&] { return partial.stream->arrived[partial.index].load(std::memory_order_acquire); },
                     *flight_, sender,
                     [&] { return "send the sum of chunk " + std::to_string(piece.piece); });
  }

  void sum_piece(const Chunk& piece, const at::Tensor& out, const at::Tensor& bias) {
    const FlightDescriptor& descriptor = flight_->descriptor();
    const bool in_place = flight_->kind() == FlightKind::kScatterAll;
    const ScopedSeconds moving(transport_.stats().moving_s);
    const int64_t count = piece.rows * descriptor.inner * descriptor.width;  // of one block
    const int64_t out_block = in_place ? count : out.size(1) * out.size(2);
    const int64_t within = piece.begin - flight_->plan().own().begin;
    char* target = in_place ? flight_->part_at(own_local(), piece)
                            : static_cast<char*>(out.data_ptr()) +
                                  within * descriptor.inner * descriptor.width * out.element_size();
    const auto element = static_cast<int64_t>(c10::elementSize(descriptor.scalar_type()));
    const auto wire_element = static_cast<int64_t>(c10::elementSize(flight_->wire()));
    for (int64_t block = 0; block < descriptor.row_blocks; ++block) {
      std::vector<const void*> parts;
      for (int local = 0; local < transport_.layout().ranks_per_host(); ++local) {
        parts.push_back(flight_->part_at(local, piece) + block * count * element);
      }
      cpu::sum_over_ranks({descriptor.scalar_type(), parts, count,
                           bias.defined() ? bias.const_data_ptr() : nullptr, descriptor.width,
                           flight_->own_partial(piece.piece).memory + block * count * wire_element,
                           flight_->wire(), target + block * out_block * element, descriptor.scalar_type()});
    }
    transport_.stats().bytes += piece.rows * descriptor.row_elements() * wire_element;
  }

  RingTransport& transport_;
  std::shared_ptr<RingFlight> flight_;
};

std::unique_ptr<GatherFlight> RingTransport::gather(const FlightDescriptor& descriptor) {
  return std::make_unique<RingGather>(
      *this, begin(FlightKind::kGather, descriptor, pieces_for(descriptor), descriptor));
}

std::unique_ptr<ScatterFlight> RingTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  return std::make_unique<RingScatter>(*this, begin(all ? FlightKind::kScatterAll : FlightKind::kScatter,
                                                    descriptor, pieces_for(descriptor), descriptor));
}

// A gather of one number from each rank.
std::vector<int64_t> RingTransport::rows_held(const FlightDescriptor& descriptor) {
  const FlightDescriptor numbers{
      descriptor.op, static_cast<int32_t>(c10::ScalarType::Long), world_size(), 1, 1, 1, false, 1};
  RingGather flight(*this, begin(FlightKind::kGather, numbers, layout().hosts() > 2 ? 2 : 1, descriptor));
  for (const Chunk& chunk : flight.own()) {
    if (chunk.rows > 0) flight.memory(chunk).fill_(descriptor.own_rows);
    flight.publish(chunk);
  }
  std::vector<int64_t> held(world_size());
  for (const Chunk& chunk : flight.order()) {
    if (chunk.owner != rank()) flight.wait(chunk);
    if (chunk.rows > 0) held[chunk.owner] = flight.memory(chunk).item<int64_t>();
  }
  flight.finish();
  return held;
}

std::unique_ptr<Transport> make_ring_transport(
    GroupContext& context, RingParts parts, const RingOptions& options,
    const std::function<std::vector<double>(const std::vector<double>&)>& agree) {
  return std::make_unique<RingTransport>(context, std::move(parts), options, agree);
}

}  // namespace pyruntime
