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

PYRUNTIME_KERNEL(32, 1)
await_leave_to_put(PYRUNTIME_PARAMETER Group group, int peer) {
  if (threadIdx.x == 0 && !wait_for_credit(group, peer, group.control().puts + 1)) {
    stop_before_copy(group, peer);
  }
}

constexpr int kFlagThreads = 128;

PYRUNTIME_KERNEL(kFlagThreads, 1)
raise_flags(PYRUNTIME_PARAMETER Group group, int origin, int peer, int first, int flags) {
  // After a failed wait the copy has still been made, but no flag tells the peer to read it.
  if (has_failed(group)) return;
  const uint64_t epoch = group.control().puts + 1;
  device::release_system();
  for (int i = static_cast<int>(threadIdx.x); i < flags; i += kFlagThreads) {
    device::store_relaxed_system(group.flag(peer, origin, first + i), epoch);
  }
}

PYRUNTIME_KERNEL(32, 1)
count_puts(PYRUNTIME_PARAMETER Group group) {
  if (threadIdx.x == 0 && !has_failed(group)) ++group.control().puts;
}

PYRUNTIME_KERNEL(kFlagThreads, 1)
await_flags(PYRUNTIME_PARAMETER Group group, int peer, int first, int flags) {
  for (int index = first + static_cast<int>(threadIdx.x); index < first + flags; index += kFlagThreads) {
    const uint64_t* flag = group.flag(group.rank, peer, index);
    if (!wait_for(group, flag, group.control().epochs + 1, peer, index)) return;
  }
}

void check_chunk(const Group& group, int32_t peer, int32_t first, int32_t flags) {
  require(peer >= 0 && peer < group.world_size() && peer != group.rank, "peer=", peer, " of rank ",
          group.rank, " in a group of ", group.world_size(), "; name one of the others.");
  require(first >= 0 && flags >= 1 && flags <= group.layout.flags - first, "flags ", first, " to ",
          int64_t{first} + flags, "; this workspace has ", group.layout.flags, " a rank.");
}

// Checks a copy and enqueues wait(group, stream), the copy and the flags of `origin` on `stream`.
template <class Wait>
void put_chunk(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t origin, int32_t peer,
               int64_t offset, int32_t first, int32_t flags, void* stream, const Wait& wait) {
  const Group view = checked_group(group, PYRUNTIME_OP_PUSH);
  check_chunk(view, peer, first, flags);
  require(bytes >= 0 && offset >= 0 && bytes <= view.layout.slot_bytes - offset, "bytes ", offset, " to ",
          offset + bytes, " of a slot of ", view.layout.slot_bytes, "; make a larger workspace.");
  require(from != nullptr || bytes == 0, "the chunk is a null pointer.");
  const auto on = static_cast<runtime::Stream>(stream);
  wait(view, on);
  if (bytes > 0) runtime::copy(view.data<unsigned char>(peer) + offset, from, bytes, on);
  PYRUNTIME_LAUNCH(raise_flags, 1, kFlagThreads, 0, on, view, origin, peer, first, flags);
}

}  // namespace
}  // namespace pyruntime::portable

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t first, int32_t flags, void* stream) {
  return guarded("put", [&] {
    const int32_t origin = group == nullptr ? 0 : group->rank;
    put_chunk(group, from, bytes, origin, peer, offset, first, flags, stream,
              [&](const Group& view, runtime::Stream on) {
                PYRUNTIME_LAUNCH(await_leave_to_put, 1, 32, 0, on, view, peer);
              });
  });
}

int pyruntime_pass_on(const PyruntimeGroup* group, int32_t origin, int64_t bytes, int32_t peer,
                      int64_t offset, int32_t first, int32_t flags, void* stream) {
  return guarded("pass_on", [&] {
    const Group here = checked_group(group, PYRUNTIME_OP_PUSH);
    check_chunk(here, origin, first, flags);
    require(origin != peer, "peer=", peer, " is whose piece it is; pass it on to another.");
    put_chunk(group, here.data<unsigned char>(here.rank) + offset, bytes, origin, peer, offset, first, flags,
              stream, [&](const Group& view, runtime::Stream on) {
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
    PYRUNTIME_LAUNCH(await_flags, 1, kFlagThreads, 0, stream, view, peer, first, flags);
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
