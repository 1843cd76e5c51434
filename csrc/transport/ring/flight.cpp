#include "transport/ring/flight.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "cpu/reduce.h"

namespace pyruntime {

namespace {

// GEMMs of this many rows lose 1 to 2 % against one of all rows; 128 rows 6 %, 64 rows 12 % (bf16, Zen 4).
constexpr int64_t kFastRows = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace

RingFlight::RingFlight(const HostLayout& layout, FlightKind kind, const FlightDescriptor& descriptor,
                       const FlightDescriptor& announced, ChunkPlan plan, c10::ScalarType wire)
    : layout_(layout),
      kind_(kind),
      descriptor_(descriptor),
      announced_(announced),
      plan_(std::move(plan)),
      wire_(wire) {
  const int most = pieces_at_once();
  if (kind == FlightKind::kGather) {
    order_ = joined(ring_gather_order(layout, plan_, most));
  } else {
    order_ = joined(ring_scatter_order(layout, plan_, most));
    // This rank's sums are read whole; the others' are announced piece by piece.
    sums_order_ = ring_gather_order(layout, plan_, most);
    if (descriptor.row_blocks > 1) {
      sums_order_.erase(sums_order_.begin());
      const std::vector<Chunk> own = own_chunks();
      sums_order_.insert(sums_order_.begin(), own.begin(), own.end());
    }
  }
}

// Enough pieces for a GEMM that is as fast as a large one. Blocks keep pieces apart in memory.
int RingFlight::pieces_at_once() const {
  if (descriptor_.row_blocks > 1) return 1;
  const int64_t rows = std::max<int64_t>(1, plan_.max_rows() * descriptor_.inner / plan_.pieces());
  return static_cast<int>(std::max<int64_t>(1, kFastRows / rows));
}

// The pieces of this host's ranks are there at once: if they form one matrix, they are visited together.
std::vector<Chunk> RingFlight::joined(std::vector<Chunk> order) const {
  if (descriptor_.row_blocks > 1) return order;
  std::vector<Chunk> result;
  for (const Chunk& chunk : order) {
    if (chunk.is_whole() || layout_.host_of(chunk.owner) != layout_.host()) {
      result.push_back(chunk);
    } else if (chunk.piece == 0) {
      result.push_back(plan_.of(chunk.owner));
    }
  }
  return result;
}

std::vector<Chunk> RingFlight::own_chunks() const {
  std::vector<Chunk> own;
  for (int piece = 0; piece < plan_.pieces(); ++piece) own.push_back(plan_.piece(plan_.own().owner, piece));
  return own;
}

int64_t RingFlight::workspace_bytes() const {
  return kind_ == FlightKind::kGather ? layout_.hosts() * plan_.max_rows() * descriptor_.row_bytes()
                                      : descriptor_.rows * descriptor_.row_bytes();
}

int64_t RingFlight::wire_bytes(int owner, int piece, bool partial) const {
  const c10::ScalarType dtype = partial ? wire_ : descriptor_.scalar_type();
  return plan_.piece(owner, piece).rows * descriptor_.row_elements() *
         static_cast<int64_t>(c10::elementSize(dtype));
}

void RingFlight::lay_out(std::unique_ptr<HostFlight> host, Scratch& scratch) {
  host_ = std::move(host);
  own_partials_.resize(plan_.pieces());
  for (RingStream& stream : ring_streams(layout_.hosts(), layout_.host(), plan_.pieces())) {
    streams_.push_back(std::make_unique<StreamState>());
    StreamState& state = *streams_.back();
    state.stream = std::move(stream);
    if (kind_ == FlightKind::kGather) {
      add_hops(state, RingPhase::kGather, /*sums=*/false);
    } else {
      add_hops(state, RingPhase::kScatter, /*sums=*/false);
      if (kind_ == FlightKind::kScatterAll) add_hops(state, RingPhase::kGather, /*sums=*/true);
    }
    state.arrived = std::make_unique<std::atomic<bool>[]>(state.receives.size());
    state.travelled.resize(state.receives.size());
    state.receiving.resize(state.receives.size());
  }
  for (const auto& state : streams_) {
    for (const Hop& hop : state->sends) to_prepare_ += hop.phase == RingPhase::kScatter ? 1 : 0;
  }
  // Partial sums arrive in memory of this process, and leave from it if they cannot be made in place.
  int64_t total = 0;
  const bool in_place = layout_.ranks_per_host() == 1 && wire_ == descriptor_.scalar_type();
  for (const auto& state : streams_) {
    for (const Hop& hop : state->receives) total += hop.memory == nullptr ? aligned(hop.bytes) : 0;
    for (const Hop& hop : state->sends) total += hop.memory == nullptr && !in_place ? aligned(hop.bytes) : 0;
  }
  char* next = scratch.claim(total);
  for (auto& state : streams_) {
    for (size_t i = 0; i < state->receives.size(); ++i) {
      Hop& hop = state->receives[i];
      if (hop.memory == nullptr) hop.memory = std::exchange(next, next + aligned(hop.bytes));
      if (hop.phase == RingPhase::kScatter && hop.owner_host == layout_.host()) {
        own_partials_[hop.piece] = {hop.memory, state.get(), i};
      }
    }
    for (Hop& hop : state->sends) {
      if (hop.memory != nullptr) continue;
      const Chunk chunk = plan_.piece(layout_.on_rail(hop.owner_host), hop.piece);
      hop.memory =
          in_place ? part_at(layout_.local_rank(), chunk) : std::exchange(next, next + aligned(hop.bytes));
    }
  }
}

// `sums`: the second phase of an all_reduce, in which sums travel as rows do in a gather.
void RingFlight::add_hops(StreamState& state, RingPhase phase, bool sums) {
  const int rail = layout_.local_rank();
  const bool partial = phase == RingPhase::kScatter;
  std::map<std::pair<int, int>, int> receive_of;
  const auto make = [&](const RingItem& item) {
    const int owner = layout_.rank_at(item.owner_host, rail);
    Hop hop{phase, item.owner_host, item.piece, wire_bytes(owner, item.piece, partial), nullptr, -1};
    if (!partial && hop.bytes > 0) {
      const Chunk chunk = plan_.piece(owner, item.piece);
      hop.memory = sums ? part_at(rail, chunk) : rows_at(chunk);
    }
    return hop;
  };
  for (const RingItem& item : ring_receives(phase, state.stream, layout_.hosts())) {
    Hop hop = make(item);
    if (hop.bytes == 0) continue;  // the neighbour skips it too
    receive_of[{item.owner_host, item.piece}] = static_cast<int>(state.receives.size());
    state.receives.push_back(hop);
  }
  for (const RingItem& item : ring_sends(phase, state.stream, layout_.hosts(), layout_.host())) {
    Hop hop = make(item);
    if (hop.bytes == 0) continue;
    const auto before = receive_of.find({item.owner_host, item.piece});
    if (before != receive_of.end()) hop.after = before->second;
    state.sends.push_back(hop);
  }
}

char* RingFlight::rows_at(const Chunk& chunk) {
  if (kind_ != FlightKind::kGather) return part_at(layout_.local_rank_of(chunk.owner), chunk);
  char* base = host_->memory(layout_.local_rank_of(chunk.owner));
  const int64_t within = chunk.begin - plan_.of(chunk.owner).begin;
  return base + (layout_.host_of(chunk.owner) * plan_.max_rows() + within) * descriptor_.row_bytes();
}

char* RingFlight::part_at(int local_rank, const Chunk& chunk) {
  return host_->memory(local_rank) + chunk.begin * descriptor_.row_bytes();
}

int RingFlight::rows_flag(int owner, int piece) const {
  const int first = kind_ == FlightKind::kGather ? 0 : plan_.world_size();
  return (first + layout_.host_of(owner)) * plan_.pieces() + piece;
}

std::vector<int> RingFlight::pieces_of(const Chunk& chunk) const {
  std::vector<int> pieces(chunk.is_whole() ? plan_.pieces() : chunk.pieces);
  std::iota(pieces.begin(), pieces.end(), chunk.is_whole() ? 0 : chunk.piece);
  return pieces;
}

Travelled RingFlight::travelled(const Chunk& chunk) const {
  Travelled last;
  if (!Ledger::is_on() || layout_.local_rank_of(chunk.owner) != layout_.local_rank()) return last;
  const std::vector<int> pieces = pieces_of(chunk);
  for (const auto& stream : streams_) {
    for (size_t i = 0; i < stream->receives.size(); ++i) {
      const Hop& hop = stream->receives[i];
      if (hop.phase == RingPhase::kGather && hop.owner_host == layout_.host_of(chunk.owner) &&
          std::ranges::find(pieces, hop.piece) != pieces.end() &&
          stream->travelled[i].arrived > last.arrived) {
        last = stream->travelled[i];
      }
    }
  }
  return last;
}

bool RingFlight::part_is_ready(const StreamState& stream, const Hop& hop) const {
  if (hop.after >= 0 && !stream.arrived[hop.after].load(std::memory_order_acquire)) return false;
  const int rail = layout_.local_rank();
  const int owner = layout_.rank_at(hop.owner_host, rail);
  if (hop.phase == RingPhase::kScatter) {
    for (int local = 0; local < layout_.ranks_per_host(); ++local) {
      if (!host_->ready(local, part_flag(owner, hop.piece))) return false;
    }
    return true;
  }
  if (hop.after >= 0) return true;
  return host_->ready(rail, rows_flag(owner, hop.piece));
}

const void* RingFlight::prepare(StreamState& stream, const Hop& hop) {
  if (hop.phase != RingPhase::kScatter) return hop.memory;
  const int rail = layout_.local_rank();
  const Chunk chunk = plan_.piece(layout_.rank_at(hop.owner_host, rail), hop.piece);
  const char* partial = hop.after < 0 ? nullptr : stream.receives[hop.after].memory;
  std::vector<const void*> parts;
  for (int local = 0; local < layout_.ranks_per_host(); ++local) parts.push_back(part_at(local, chunk));
  if (parts.size() == 1 && partial == nullptr && hop.memory == parts[0]) return hop.memory;
  cpu::sum_over_ranks({descriptor_.scalar_type(), parts, chunk.rows * descriptor_.row_elements(), nullptr, 1,
                       partial, wire_, hop.memory, wire_});
  return hop.memory;
}

void RingFlight::announce(const Hop& hop) {
  if (hop.phase == RingPhase::kGather) {
    host_->publish(rows_flag(layout_.on_rail(hop.owner_host), hop.piece));
  }
}

void RingFlight::give_credit(int peer) {
  for (auto& stream : streams_) {
    if (layout_.on_rail(stream->stream.downstream) == peer)
      stream->credit.store(true, std::memory_order_release);
  }
}

bool RingFlight::all_acknowledged() const {
  return std::ranges::all_of(streams_, [](const auto& stream) { return stream->all_acknowledged(); });
}

void RingFlight::finish() {
  finished_.store(true);
  count_prepared();
}

// The host's ranks may write to their parts again once this rank's op has read them and made its sums.
void RingFlight::count_prepared() {
  if (to_prepare_.fetch_sub(1) == 1) host_->finish();
}

void FlightSlots::put(const std::shared_ptr<RingFlight>& flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  of(flight->number()).flight = flight;
}

std::shared_ptr<RingFlight> FlightSlots::find(uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<RingFlight>& flight = slots_[number % kSlots].flight;
  return flight && flight->number() == number ? flight : nullptr;
}

}  // namespace pyruntime
