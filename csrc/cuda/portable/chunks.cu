// Chunks that another library computes and reads, moved by copy engines between waits and signals of one
// thread each: what the chunked engine stands on.
#include "checks.h"
#include "puts.cuh"

namespace pyruntime::portable {

namespace {

PYRUNTIME_KERNEL(32, 1)
await_flag(PYRUNTIME_PARAMETER Group group, int peer, int index) {
  if (threadIdx.x != 0) return;
  wait_for(group, group.flag(group.rank, peer, index), group.control().epochs + 1, peer, index);
}

void check_chunk(const Group& group, int32_t peer, int32_t index) {
  require(peer >= 0 && peer < group.world_size() && peer != group.rank, "peer=", peer, " of rank ",
          group.rank, " in a group of ", group.world_size(), "; name one of the others.");
  require(index >= 0 && index < group.layout.flags, "index=", index, "; this workspace has ",
          group.layout.flags, " flags a rank.");
}

}  // namespace
}  // namespace pyruntime::portable

using namespace pyruntime;
using namespace pyruntime::portable;

int pyruntime_put(const PyruntimeGroup* group, const void* from, int64_t bytes, int32_t peer, int64_t offset,
                  int32_t index, void* stream) {
  return guarded("put", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_PUSH);
    check_chunk(view, peer, index);
    require(bytes >= 0 && offset >= 0 && bytes <= view.layout.slot_bytes - offset, "bytes ", offset, " to ",
            offset + bytes, " of a slot of ", view.layout.slot_bytes, "; make a larger workspace.");
    require(from != nullptr || bytes == 0, "the chunk is a null pointer.");
    const auto on = static_cast<runtime::Stream>(stream);
    PYRUNTIME_LAUNCH(await_leave_to_put, 1, 32, 0, on, view, peer);
    if (bytes > 0) {
      runtime::copy_rows(view.data<unsigned char>(peer) + offset, bytes, from, bytes, bytes, 1, on);
    }
    PYRUNTIME_LAUNCH(raise_flag, 1, 32, 0, on, view, peer, index);
  });
}

int pyruntime_end_puts(const PyruntimeGroup* group, void* stream) {
  return guarded("end_puts", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_PUSH);
    PYRUNTIME_LAUNCH(count_puts, 1, 32, 0, static_cast<runtime::Stream>(stream), view);
  });
}

int pyruntime_await(const PyruntimeGroup* group, int32_t peer, int32_t index, void* stream) {
  return guarded("await", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    check_chunk(view, peer, index);
    PYRUNTIME_LAUNCH(await_flag, 1, 32, 0, static_cast<runtime::Stream>(stream), view, peer, index);
  });
}

int pyruntime_slot_data(const PyruntimeGroup* group, void** data) {
  return guarded("slot_data", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    require(data != nullptr, "there is nowhere to write the answer.");
    *data = view.data<void>(view.rank);
  });
}
