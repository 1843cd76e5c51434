// A rank's workspace as every rank addresses it, and the waits and signals on it. This is the only
// implementation of the protocol in csrc/cuda/protocol.md.
//
//   header               this rank's failure record; `stopped_by`: the rank that failed first, plus 1
//   slots 0 to PYRUNTIME_SLOTS - 1, each
//     SlotControl        the owner's counters
//     credits [P]        u64, written by peer p: it has read that epoch of its own slot, so this rank may
//                        write the next there
//     flags [P][flags]   u64, written by peer p (or for it, around rings): that piece or signal of that
//                        epoch is here
//     data
#pragma once

#include "cuda/compat.h"
#include "cuda/launchers.h"

namespace pyruntime::portable {

struct alignas(128) WorkspaceHeader {
  PyruntimeFailure failure;
  alignas(64) uint64_t stopped_by;
};

constexpr int64_t kHeaderBytes = sizeof(WorkspaceHeader);

// Local to its owner. An epoch counts the uses of a slot. The device counts, so a captured graph can be
// replayed.
struct SlotControl {
  uint64_t epochs;  // flights that ended here
  uint64_t puts;    // flights whose puts into others' slots have ended; ahead of `epochs`
  uint32_t ticket;  // blocks of a flight that have ended
  uint32_t unused[27];
};
static_assert(sizeof(SlotControl) == 128);

struct WorkspaceLayout {
  int32_t world_size, flags;
  int64_t slot_bytes;

  static constexpr PYRUNTIME_HOST_DEVICE int64_t round_up(int64_t bytes) { return (bytes + 127) / 128 * 128; }

  PYRUNTIME_HOST_DEVICE int64_t credits_at() const { return sizeof(SlotControl); }
  PYRUNTIME_HOST_DEVICE int64_t flags_at() const { return round_up(credits_at() + 8 * world_size); }
  PYRUNTIME_HOST_DEVICE int64_t data_at() const {
    return round_up(flags_at() + 8 * static_cast<int64_t>(world_size) * flags);
  }
  PYRUNTIME_HOST_DEVICE int64_t slot_at(int slot) const {
    return kHeaderBytes + slot * (data_at() + round_up(slot_bytes));
  }
  PYRUNTIME_HOST_DEVICE int64_t bytes() const { return slot_at(PYRUNTIME_SLOTS); }
};

// A kernel's view of the group.
struct Group {
  WorkspaceLayout layout;
  int32_t rank, slot, op;
  int32_t pieces;  // pieces of each rank's rows in a gather
  uint64_t deadline_ns;
  unsigned char* bases[PYRUNTIME_MOST_RANKS];

  PYRUNTIME_HOST_DEVICE int world_size() const { return layout.world_size; }
  PYRUNTIME_HOST_DEVICE unsigned char* slot_of(int owner) const {
    return bases[owner] + layout.slot_at(slot);
  }
  PYRUNTIME_HOST_DEVICE SlotControl& control() const {
    return *reinterpret_cast<SlotControl*>(slot_of(rank));
  }
  // credit(), flag(): in `owner`'s slot, written by `writer`.
  PYRUNTIME_HOST_DEVICE uint64_t* credit(int owner, int writer) const {
    return reinterpret_cast<uint64_t*>(slot_of(owner) + layout.credits_at()) + writer;
  }
  PYRUNTIME_HOST_DEVICE uint64_t* flag(int owner, int writer, int index) const {
    return reinterpret_cast<uint64_t*>(slot_of(owner) + layout.flags_at()) +
           static_cast<int64_t>(writer) * layout.flags + index;
  }
  template <class T>
  PYRUNTIME_HOST_DEVICE T* data(int owner) const {
    return reinterpret_cast<T*>(slot_of(owner) + layout.data_at());
  }
  PYRUNTIME_HOST_DEVICE WorkspaceHeader& header(int owner) const {
    return *reinterpret_cast<WorkspaceHeader*>(bases[owner]);
  }
};

// ---- waiting; by one thread ----

PYRUNTIME_DEVICE bool has_failed(const Group& group) {
  return device::load_acquire_system(&group.header(group.rank).stopped_by) != 0;
}

// Records the cause, which is this rank's first failure, and tells all ranks to stop. This rank is told last:
// its other streams proceed to their copies as soon as they know.
PYRUNTIME_DEVICE void record_failure(const Group& group, int peer, int chunk, uint64_t expected,
                                     uint64_t seen) {
  PyruntimeFailure& failure = group.header(group.rank).failure;
  if (atomicCAS(&failure.state, PYRUNTIME_NO_FAILURE, PYRUNTIME_FAILURE_CLAIMED) != PYRUNTIME_NO_FAILURE) {
    return;
  }
  failure.op = group.op;
  failure.rank = group.rank;
  failure.peer = peer;
  failure.chunk = chunk;
  failure.slot = group.slot;
  failure.expected = expected;
  failure.seen = seen;
  device::fence_system();
  atomicCAS(&failure.state, PYRUNTIME_FAILURE_CLAIMED, PYRUNTIME_FAILED);
  for (int step = 1; step <= group.world_size(); ++step) {
    const int peer = (group.rank + step) % group.world_size();
    device::store_release_system(&group.header(peer).stopped_by, group.rank + 1);
  }
}

// Tells `peer` to stop before a copy into its slot. A copy engine cannot be stopped, so the copy follows even
// a failed wait. The peer is told whichever rank failed, and even if that rank's record is incomplete, so
// that it does not read spoilt data. This rank is told too, and then raises no flag behind the copy.
PYRUNTIME_DEVICE void stop_before_copy(const Group& group, int peer) {
  uint64_t by = device::load_acquire_system(&group.header(group.rank).stopped_by);
  if (by == 0) by = group.rank + 1;
  device::store_release_system(&group.header(peer).stopped_by, by);
  device::store_release_system(&group.header(group.rank).stopped_by, by);
}

// Waits until *flag >= expected. Returns false after the deadline or another failure: the caller must then
// write nothing more.
PYRUNTIME_DEVICE bool wait_for(const Group& group, const uint64_t* flag, uint64_t expected, int peer,
                               int chunk) {
  if (device::load_acquire_system(flag) >= expected) return !has_failed(group);
  const uint64_t start = device::global_time_ns();
  for (;;) {
    device::nap();
    // The clock is read before the flag, so a thread that slept past its deadline still checks once more.
    const uint64_t waited = device::global_time_ns() - start;
    const uint64_t seen = device::load_acquire_system(flag);
    if (seen >= expected) return !has_failed(group);
    if (has_failed(group)) return false;
    if (waited > group.deadline_ns) {
      record_failure(group, peer, chunk, expected, seen);
      return false;
    }
  }
}

constexpr int kCredit = -1;  // in place of a chunk: the credit to write

// Waits for the credit to write epoch `epoch` into the peer's slot.
PYRUNTIME_DEVICE bool wait_for_credit(const Group& group, int peer, uint64_t epoch) {
  return wait_for(group, group.credit(group.rank, peer), epoch - 1, peer, kCredit);
}

// ---- ending ----

// Tells the peers that this rank has read the whole slot, and counts the epoch.
PYRUNTIME_DEVICE void close_slot(const Group& group, uint64_t epoch) {
  group.control().epochs = epoch;
  for (int step = 1; step < group.world_size(); ++step) {
    const int peer = (group.rank + step) % group.world_size();
    device::store_release_system(group.credit(peer, group.rank), epoch);
  }
}

// Called by one thread of every block of a flight after all threads of the block. The last block closes the
// slot and resets the ticket. After a failure the slot stays open for good: a peer that proceeded could
// overwrite what is still being read.
PYRUNTIME_DEVICE void end_block(const Group& group, uint64_t epoch) {
  uint32_t& ticket = group.control().ticket;
  device::fence_device();
  // Not atomicInc(): on memory that others may write, AMD GPUs drop all but additions and exchanges.
  const bool last = atomicAdd(&ticket, 1) == gridDim.x - 1;
  if (last) ticket = 0;
  device::fence_device();
  if (last && !has_failed(group)) close_slot(group, epoch);
}

// Called by all threads of all blocks of a flight.
PYRUNTIME_DEVICE void end_flight(const Group& group, uint64_t epoch) {
  device::publishing_barrier();
  if (threadIdx.x == 0) end_block(group, epoch);
}

}  // namespace pyruntime::portable
