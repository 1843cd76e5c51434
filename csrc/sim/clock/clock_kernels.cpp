// The library of device kernels (csrc/cuda/launchers.h) in virtual time: each launch takes its time on its
// stream and changes nothing.
//
// Ranks of one program do the same, turned by their number. So the message that comes from a rank is the one
// that its program sends equally far, and arrives at the same time: await() of peer q looks for the put of
// q's program over the distance q - rank. A put waits for its peer to have finished the slot's former flight,
// which is when the peer's program has.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/launchers.h"
#include "cuda/sm90/launchers.h"
#include "sim/clock/launches.h"
#include "sim/clock/mirrors.h"
#include "sim/clock/programs.h"
#include "sim/streams.h"

namespace sim {
namespace {

constexpr int64_t kHeaderBytes = 4096;
constexpr const char* kLink = "inside a host";

struct Arrival {
  double begun, arrived;  // begun: when the sender had all that it needed
};

struct Put {
  int32_t distance, first, flags;
  Arrival at;
};

struct Slot {
  std::vector<Put> puts;  // of the flight under way
  double finished = 0;    // the former flight
  int64_t flights = 0;    // so many have been finished
};

struct Slots {
  std::mutex mutex;
  std::map<std::pair<const void*, int32_t>, Slot> all;  // by workspace and number
};

Slots& slots() {
  static auto* instance = new Slots();
  return *instance;
}

std::string& error() {
  thread_local std::string text;
  return text;
}

int refuse(const std::string& why) {
  error() = why;
  return PYRUNTIME_INVALID;
}

Timeline& timeline(void* stream) {
  return static_cast<Queue*>(stream)->timeline();
}

double latency() {
  return Clock::instance().seconds({std::string("latency ") + kLink, {}});
}

const void* own(const PyruntimeGroup& group) {
  return group.workspaces[group.rank];
}

std::string name_of(const PyruntimeGroup& group) {
  return group_of_memory(own(group)).name;
}

std::string words(const PyruntimeGroup& group) {
  return (group.pieces > 0 ? "rows of " : "parts of ") + name_of(group);
}

// The program of a rank of the group.
int program_of(const PyruntimeGroup& group, int32_t rank) {
  const std::vector<int>& ranks = Programs::instance().ranks_of(name_of(group));
  return ranks.empty() ? Programs::instance().own() : Programs::instance().of_rank(ranks.at(rank));
}

bool has_other_programs(const PyruntimeGroup& group) {
  return Programs::instance().are_several(Programs::instance().ranks_of(name_of(group)));
}

int32_t distance(const PyruntimeGroup& group, int32_t from, int32_t to) {
  const int32_t ranks = group.shape.world_size;
  return ((from - to) % ranks + ranks) % ranks;
}

Slot& slot_of(const PyruntimeGroup& group) {  // with the lock
  return slots().all[{own(group), group.slot}];
}

int64_t flight_of(const PyruntimeGroup& group) {
  const std::lock_guard<std::mutex> lock(slots().mutex);
  return slot_of(group).flights;
}

// Returns the key under which programs tell each other something of one flight.
std::string key_of(const PyruntimeGroup& group, int64_t flight, const std::string& what) {
  const PlaceOfMemory place = group_of_memory(own(group));
  return place.name + "/" + std::to_string(place.generation) + "/" + std::to_string(group.slot) + "/" +
         std::to_string(flight) + "/" + what;
}

std::string of_put(int32_t distance, int32_t flag) {
  return "put/" + std::to_string(distance) + "/" + std::to_string(flag);
}

int64_t data_at(const PyruntimeWorkspace& shape) {
  const int64_t flags = int64_t{PYRUNTIME_SLOTS} * shape.world_size * shape.flags * 8;
  return (kHeaderBytes + flags + 4095) / 4096 * 4096;
}

// Returns when all that this program puts over that distance under these flags has arrived; below 0: it has
// not put its own yet.
Arrival arrival(const Slot& slot, int32_t distance, int32_t first, int32_t flags) {
  Arrival last{-1, -1};
  for (const Put& put : slot.puts) {
    const bool is_asked =
        put.distance == distance && put.first < first + flags && first < put.first + put.flags;
    if (is_asked && put.at.arrived > last.arrived) last = put.at;
  }
  return last;
}

Arrival arrival_from(const PyruntimeGroup& group, int32_t peer, int32_t first, int32_t flags) {
  const int32_t far = distance(group, peer, group.rank);
  const int program = program_of(group, peer);
  if (program == Programs::instance().own()) {
    const std::lock_guard<std::mutex> lock(slots().mutex);
    return arrival(slot_of(group), far, first, flags);
  }
  Arrival last{-1, -1};
  const int64_t flight = flight_of(group);
  for (int32_t flag = first; flag < first + flags; ++flag) {
    const auto heard = Programs::instance().hear(key_of(group, flight, of_put(far, flag)), program);
    if (heard.at(1) > last.arrived) last = {heard.at(0), heard.at(1)};
  }
  return last;
}

// Makes a stream wait for what comes from a peer: first for the peer's work, if it is of another program.
void await(Timeline& timeline, const PyruntimeGroup& group, int32_t peer, const Arrival& at) {
  if (program_of(group, peer) != Programs::instance().own()) {
    timeline.until(at.begun, kWorkOfAnother + name_of(group), /*is_asked=*/false);
  }
  timeline.until(at.arrived, words(group), /*is_asked=*/false);
}

// Makes a stream wait for what a peer puts; returns a code of launchers.h.
int await_put(const PyruntimeGroup& group, int32_t peer, int32_t first, int32_t flags, void* stream) {
  const Arrival at = arrival_from(group, peer, first, flags);
  if (at.arrived < 0) {
    return refuse("rank " + std::to_string(group.rank) + " waits for rank " + std::to_string(peer) +
                  " before it has sent what that rank would send; ranks that differ cannot be mirrored.");
  }
  await(timeline(stream), group, peer, at);
  return PYRUNTIME_OK;
}

// Returns when the peer has finished the former flight of the slot.
double finished_by(const PyruntimeGroup& group, int32_t peer) {
  const int program = program_of(group, peer);
  Slot slot;
  {
    const std::lock_guard<std::mutex> lock(slots().mutex);
    slot = slot_of(group);
  }
  if (program == Programs::instance().own() || slot.flights == 0) return slot.finished;
  return Programs::instance().hear(key_of(group, slot.flights - 1, "finished"), program).at(0);
}

void note_put(const PyruntimeGroup& group, int32_t peer, int32_t first, int32_t flags, Arrival at) {
  const int32_t far = distance(group, group.rank, peer);
  int64_t flight = 0;
  {
    const std::lock_guard<std::mutex> lock(slots().mutex);
    Slot& slot = slot_of(group);
    slot.puts.push_back({far, first, flags, at});
    flight = slot.flights;
  }
  if (!has_other_programs(group)) return;
  for (int32_t flag = first; flag < first + flags; ++flag) {
    Programs::instance().say(key_of(group, flight, of_put(far, flag)), {at.begun, at.arrived});
  }
}

void note_finished(const PyruntimeGroup& group, double moment) {
  int64_t flight = 0;
  {
    const std::lock_guard<std::mutex> lock(slots().mutex);
    Slot& slot = slot_of(group);
    flight = slot.flights;
    slot = {{}, moment, flight + 1};
  }
  if (has_other_programs(group)) Programs::instance().say(key_of(group, flight, "finished"), {moment});
}

// The share of one rank's rows in a GEMM over the rows of all.
double seconds_of_part(const PyruntimeGroup& group, const PyruntimeMatmul& matmul) {
  const Work all{"gemm", {matmul.m, matmul.n, matmul.k, 1, size_of(matmul.dtype)}};
  return Clock::instance().seconds(all) / group.shape.world_size;
}

}  // namespace
}  // namespace sim

extern "C" {

int pyruntime_interface(void) {
  return PYRUNTIME_INTERFACE;
}

const char* pyruntime_error(void) {
  return sim::error().c_str();
}

int64_t pyruntime_workspace_bytes(const PyruntimeWorkspace* shape) {
  return sim::data_at(*shape) + PYRUNTIME_SLOTS * shape->slot_bytes;
}

int pyruntime_prepare_workspace(const PyruntimeWorkspace* shape, void*, void* stream) {
  return sim::touch(stream, "prepare_workspace", sim::data_at(*shape));
}

int pyruntime_failure(const PyruntimeGroup*, PyruntimeFailure* out, void*) {
  std::memset(out, 0, sizeof(*out));
  return PYRUNTIME_OK;
}

int pyruntime_new_stream(void** stream) {
  *stream = &sim::queue(sim::own_stream(sim::current_device()));
  return PYRUNTIME_OK;
}

int pyruntime_stop(const PyruntimeGroup*, void*) {
  return PYRUNTIME_OK;
}

int pyruntime_describe_failure(const PyruntimeFailure*, char* out, int64_t size) {
  std::strncpy(out, "a wait failed in virtual time.", size - 1);
  return PYRUNTIME_OK;
}

int pyruntime_choose_tiles(int64_t, int64_t, int64_t) {
  return PYRUNTIME_TILES_LARGE;
}

// ---- chunks

int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t first, int32_t flags, void* stream) {
  const PyruntimePut put{from, bytes, peer, offset, first, flags};
  return pyruntime_put_together(group, &put, 1, stream);
}

int pyruntime_put_together(const PyruntimeGroup* group, const PyruntimePut* puts, int32_t count,
                           void* stream) {
  sim::Timeline& timeline = sim::timeline(stream);
  double free = 0;
  for (int i = 0; i < count; ++i) free = std::max(free, sim::finished_by(*group, puts[i].peer));
  sim::launch(stream, "await_leave_to_put", {"signal", {}});
  const double begun = timeline.done();
  timeline.until(free, "the slot of a peer of " + sim::name_of(*group), /*is_asked=*/false);
  for (int i = 0; i < count; ++i) {
    if (puts[i].bytes > 0) timeline.transfer(sim::words(*group), {"put", {puts[i].bytes}}, sim::kLink);
  }
  sim::launch(stream, "raise_flags", {"signal", {}});
  for (int i = 0; i < count; ++i) {
    const sim::Arrival at{begun, timeline.done() + sim::latency()};
    sim::note_put(*group, puts[i].peer, puts[i].first, puts[i].flags, at);
  }
  return PYRUNTIME_OK;
}

int pyruntime_pass_on(const PyruntimeGroup*, int32_t, int64_t, int32_t, int64_t, int32_t, int32_t, void*) {
  return sim::refuse("rows that go around rings have no model in virtual time; leave comm.rings out.");
}

int pyruntime_end_puts(const PyruntimeGroup*, void* stream) {
  return sim::launch(stream, "end_puts", {"signal", {}});
}

int pyruntime_await(const PyruntimeGroup* group, int32_t peer, int32_t first, int32_t flags, void* stream) {
  sim::launch(stream, "await", {"signal", {}});
  return sim::await_put(*group, peer, first, flags, stream);
}

int pyruntime_await_all(const PyruntimeGroup* group, int32_t first, int32_t flags, void* stream) {
  sim::launch(stream, "await", {"signal", {}});
  for (int32_t step = 1; step < group->shape.world_size; ++step) {
    const int32_t peer = (group->rank + step) % group->shape.world_size;
    if (const int code = sim::await_put(*group, peer, first, flags, stream)) return code;
  }
  return PYRUNTIME_OK;
}

int pyruntime_finish(const PyruntimeGroup* group, void* stream) {
  sim::launch(stream, "finish", {"signal", {}});
  sim::note_finished(*group, sim::timeline(stream).done() + sim::latency());
  return PYRUNTIME_OK;
}

int pyruntime_slot_data(const PyruntimeGroup* group, void** data) {
  *data = static_cast<char*>(group->workspaces[group->rank]) + sim::data_at(group->shape) +
          group->slot * group->shape.slot_bytes;
  return PYRUNTIME_OK;
}

int pyruntime_is_capturing(void*) {
  return 0;
}

int pyruntime_multiprocessors(void) {
  return static_cast<int>(sim::Clock::instance().seconds({"multiprocessors", {}}));
}

// ---- what has no model yet

int pyruntime_can_multicast(void) {
  return sim::refuse("multicast has no model in virtual time.");
}

int pyruntime_put_to_all(const PyruntimeGroup*, void*, int64_t, int64_t, int32_t, int32_t, void*) {
  return pyruntime_can_multicast();
}

int pyruntime_sum_copies(const PyruntimeGroup*, void*, void*, int64_t, int64_t, int32_t, const void*, int64_t,
                         void*) {
  return pyruntime_can_multicast();
}

int pyruntime_await_leave(const PyruntimeGroup*, void*) {
  return pyruntime_can_multicast();
}

// ---- fused GEMMs: one launch, whose parts come one after the other, each a rank's rows

int pyruntime_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul, void* stream) {
  const int32_t ranks = group->shape.world_size;
  const double part = sim::seconds_of_part(*group, *matmul);
  sim::Timeline& timeline = sim::timeline(stream);
  sim::launch(stream, "all_gather_matmul", {});
  for (int32_t step = 0; step < ranks; ++step) {
    if (step > 0) {
      const int32_t peer = (group->rank + step) % ranks;
      const sim::Arrival at = sim::arrival_from(*group, peer, 0, std::max(1, group->pieces));
      if (at.arrived < 0) return sim::refuse("a fused gather begins before this rank has sent its own rows.");
      sim::await(timeline, *group, peer, at);
    }
    timeline.go_on("all_gather_matmul", part);
  }
  return PYRUNTIME_OK;
}

int pyruntime_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                    void* stream) {
  if (sim::has_other_programs(*group)) {
    return sim::refuse("a fused scatter among ranks that do not do the same has no model in virtual time.");
  }
  const int32_t ranks = group->shape.world_size;
  const double part = sim::seconds_of_part(*group, *matmul), latency = sim::latency();
  const int64_t bytes = matmul->m / ranks * matmul->n * sim::size_of(matmul->dtype);
  const double sending = sim::Clock::instance().seconds({"store", {bytes}});
  sim::Timeline& timeline = sim::timeline(stream);
  sim::launch(stream, "matmul_reduce_scatter", {});
  double arrived = 0;  // all that this rank's peers have sent: as much, as late, as it sends them
  for (int32_t step = 1; step < ranks; ++step) {
    timeline.go_on("matmul_reduce_scatter", part);
    arrived = timeline.store(sending, sim::kLink) + latency;
  }
  timeline.go_on("matmul_reduce_scatter", part);
  timeline.until(arrived, sim::words(*group), /*is_asked=*/false);
  timeline.go_on("reduce", sim::Clock::instance().seconds({"bytes", {ranks * bytes}}));
  sim::note_finished(*group, timeline.done() + latency);
  return PYRUNTIME_OK;
}

int pyruntime_sm90_is_on_device(void) {
  return PYRUNTIME_OK;
}

int pyruntime_sm90_choose_tiles(int64_t, int64_t, int64_t, int64_t, int32_t) {
  return PYRUNTIME_TILES_LARGE;
}

int pyruntime_sm90_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                     void* stream) {
  return pyruntime_all_gather_matmul(group, matmul, stream);
}

int pyruntime_sm90_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                         void* stream) {
  return pyruntime_matmul_reduce_scatter(group, matmul, stream);
}

}  // extern "C"
