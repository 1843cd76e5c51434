// Moves chunks, computed and read by another library's GEMMs, with copy engines between waits and signals:
// the basis of the chunked tier.
#include "checks.h"

namespace pyruntime::portable {

namespace {

// Kernels of one block before and after a copy engine's copy into a peer's slot, in the copy's stream. Puts
// run ahead of their flights, and so have their own count.

// Waits for a piece of `origin` that this rank passes on. All earlier pieces have then arrived, so if one
// rank is missing, the error names that one.
PYRUNTIME_KERNEL(32, 1)
await_to_pass_on(PYRUNTIME_PARAMETER Group group, int origin, int first, int flags, int peer) {
  if (threadIdx.x != 0) return;
  const uint64_t epoch = group.control().puts + 1;
  for (int index = first; index < first + flags; ++index) {
    if (!wait_for(group, group.flag(group.rank, origin, index), epoch, origin, index)) {
      return stop_before_copy(group, peer);
    }
  }
  if (!wait_for_credit(group, peer, epoch)) stop_before_copy(group, peer);
}

// The flags of some puts.
struct Signals {
  struct One {
    int32_t peer, first, flags;
  } of[PYRUNTIME_MOST_RANKS];
  int count;
};

constexpr int kFlagThreads = 128;

PYRUNTIME_KERNEL(kFlagThreads, 1)
await_leave_to_put(PYRUNTIME_PARAMETER Group group, Signals puts) {
  for (int i = static_cast<int>(threadIdx.x); i < puts.count; i += kFlagThreads) {
    const int peer = puts.of[i].peer;
    if (!wait_for_credit(group, peer, group.control().puts + 1)) stop_before_copy(group, peer);
  }
}

PYRUNTIME_KERNEL(kFlagThreads, 1)
raise_flags(PYRUNTIME_PARAMETER Group group, int origin, Signals puts) {
  // After a failed wait the copy has still been made, but no flag tells the peer to read it.
  if (has_failed(group)) return;
  const uint64_t epoch = group.control().puts + 1;
  device::release_system();
  for (int put = 0; put < puts.count; ++put) {
    const Signals::One& one = puts.of[put];
    for (int i = static_cast<int>(threadIdx.x); i < one.flags; i += kFlagThreads) {
      device::store_relaxed_system(group.flag(one.peer, origin, one.first + i), epoch);
    }
  }
}

PYRUNTIME_KERNEL(32, 1)
count_puts(PYRUNTIME_PARAMETER Group group) {
  if (threadIdx.x == 0 && !has_failed(group)) ++group.control().puts;
}

// Waits for the flags of `peers` ranks, which follow one another from `peer` on.
PYRUNTIME_KERNEL(kFlagThreads, 1)
await_flags(PYRUNTIME_PARAMETER Group group, int peer, int peers, int first, int flags) {
  for (int i = static_cast<int>(threadIdx.x); i < peers * flags; i += kFlagThreads) {
    const int from = (peer + i / flags) % group.world_size(), index = first + i % flags;
    const uint64_t* flag = group.flag(group.rank, from, index);
    if (!wait_for(group, flag, group.control().epochs + 1, from, index)) return;
  }
}

void check_flags(const Group& group, int32_t first, int32_t flags) {
  require(first >= 0 && flags >= 1 && flags <= group.layout.flags - first, "flags ", first, " to ",
          int64_t{first} + flags, "; this workspace has ", group.layout.flags, " a rank.");
}

void check_chunk(const Group& group, int32_t peer, int32_t first, int32_t flags) {
  require(peer >= 0 && peer < group.world_size() && peer != group.rank, "peer=", peer, " of rank ",
          group.rank, " in a group of ", group.world_size(), "; name one of the others.");
  check_flags(group, first, flags);
}

// Checks copies and enqueues wait(group, signals, stream), the copies and the flags of `origin` on `stream`.
template <class Wait>
void put_chunks(const PyruntimeGroup* group, const PyruntimePut* puts, int32_t count, int32_t origin,
                void* stream, const Wait& wait) {
  const Group view = checked_group(group, PYRUNTIME_OP_PUSH);
  require(count >= 1 && count <= PYRUNTIME_MOST_RANKS && puts != nullptr, count, " puts; make 1 to ",
          int{PYRUNTIME_MOST_RANKS}, " at once.");
  Signals signals;
  signals.count = count;
  for (int i = 0; i < count; ++i) {
    const PyruntimePut& put = puts[i];
    check_chunk(view, put.peer, put.first, put.flags);
    require(put.bytes >= 0 && put.offset >= 0 && put.bytes <= view.layout.slot_bytes - put.offset, "bytes ",
            put.offset, " to ", put.offset + put.bytes, " of a slot of ", view.layout.slot_bytes,
            "; make a larger workspace.");
    require(put.from != nullptr || put.bytes == 0, "the chunk is a null pointer.");
    signals.of[i] = {put.peer, put.first, put.flags};
  }
  const auto on = static_cast<runtime::Stream>(stream);
  wait(view, signals, on);
  for (int i = 0; i < count; ++i) {
    const PyruntimePut& put = puts[i];
    if (put.bytes > 0)
      runtime::copy(view.data<unsigned char>(put.peer) + put.offset, put.from, put.bytes, on);
  }
  PYRUNTIME_LAUNCH(raise_flags, 1, kFlagThreads, 0, on, view, origin, signals);
}

}  // namespace
}  // namespace pyruntime::portable

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t first, int32_t flags, void* stream) {
  const PyruntimePut put{from, bytes, peer, offset, first, flags};
  return pyruntime_put_together(group, &put, 1, stream);
}

int pyruntime_put_together(const PyruntimeGroup* group, const PyruntimePut* puts, int32_t count,
                           void* stream) {
  return guarded("put", [&] {
    const int32_t origin = group == nullptr ? 0 : group->rank;
    put_chunks(group, puts, count, origin, stream,
               [](const Group& view, const Signals& signals, runtime::Stream on) {
                 PYRUNTIME_LAUNCH(await_leave_to_put, 1, kFlagThreads, 0, on, view, signals);
               });
  });
}

int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                      int64_t offset, int32_t first, int32_t flags, void* stream) {
  return guarded("pass_on", [&] {
    const Group here = checked_group(group, PYRUNTIME_OP_PUSH);
    check_chunk(here, origin, first, flags);
    require(origin != peer, "peer=", peer, " is whose piece it is; pass it on to another.");
    const PyruntimePut put{here.data<unsigned char>(here.rank) + offset, bytes, peer, offset, first, flags};
    put_chunks(group, &put, 1, origin, stream, [&](const Group& view, const Signals&, runtime::Stream on) {
      PYRUNTIME_LAUNCH(await_to_pass_on, 1, 32, 0, on, view, origin, first, flags, peer);
    });
  });
}

int pyruntime_end_puts(const PyruntimeGroup* group, void* stream) {
  return guarded("end_puts", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_PUSH);
    PYRUNTIME_LAUNCH(count_puts, 1, 32, 0, stream, view);
  });
}

int pyruntime_await(const PyruntimeGroup* group, int32_t peer, int32_t first, int32_t flags, void* stream) {
  return guarded("await", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    check_chunk(view, peer, first, flags);
    PYRUNTIME_LAUNCH(await_flags, 1, kFlagThreads, 0, stream, view, peer, /*peers=*/1, first, flags);
  });
}

int pyruntime_await_all(const PyruntimeGroup* group, int32_t first, int32_t flags, void* stream) {
  return guarded("await_all", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    check_flags(view, first, flags);
    const int others = view.world_size() - 1;
    PYRUNTIME_LAUNCH(await_flags, 1, kFlagThreads, 0, stream, view, view.rank + 1, others, first, flags);
  });
}

int pyruntime_slot_data(const PyruntimeGroup* group, void** data) {
  return guarded("slot_data", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    require(data != nullptr, "there is nowhere to write the answer.");
    *data = view.data<void>(view.rank);
  });
}

int pyruntime_is_capturing(void* stream) {
  return runtime::is_capturing(static_cast<runtime::Stream>(stream)) ? 1 : 0;
}

int pyruntime_multiprocessors(void) {
  return runtime::multiprocessors();
}
