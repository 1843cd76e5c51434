#include <cstdio>

#include "checks.h"
#include "workspace.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kMostReads = 1000;

PYRUNTIME_KERNEL(32, 1)
finish_slot(PYRUNTIME_PARAMETER Group group) {
  if (threadIdx.x == 0 && !has_failed(group)) close_slot(group, group.control().epochs + 1);
}

}  // namespace

int64_t pyruntime_workspace_bytes(const PyruntimeWorkspace* shape) {
  int64_t bytes = 0;
  const int code = guarded("workspace_bytes", [&] {
    check_workspace(shape);
    bytes = WorkspaceLayout{shape->world_size, shape->flags, shape->slot_bytes}.bytes();
  });
  return code == PYRUNTIME_OK ? bytes : -code;
}

int pyruntime_prepare_workspace(const PyruntimeWorkspace* shape, void* workspace, void* stream) {
  return guarded("prepare_workspace", [&] {
    check_workspace(shape);
    require(workspace != nullptr && is_aligned(workspace), "the workspace lies at ", workspace,
            "; it must be mapped, at a multiple of 16 bytes.");
    const WorkspaceLayout layout{shape->world_size, shape->flags, shape->slot_bytes};
    const auto on = static_cast<runtime::Stream>(stream);
    auto* base = static_cast<unsigned char*>(workspace);
    runtime::set_zero(base, kHeaderBytes, on);
    for (int slot = 0; slot < PYRUNTIME_SLOTS; ++slot) {
      runtime::set_zero(base + layout.slot_at(slot), layout.data_at(), on);
    }
  });
}

int pyruntime_finish(const PyruntimeGroup* group, void* stream) {
  return guarded("finish", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    PYRUNTIME_LAUNCH(finish_slot, 1, 32, 0, stream, view);
  });
}

int pyruntime_failure(const PyruntimeGroup* group, PyruntimeFailure* out, void* stream) {
  return guarded("failure", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    require(out != nullptr, "there is nowhere to write the record.");
    const auto on = static_cast<runtime::Stream>(stream);
    WorkspaceHeader header;
    runtime::copy_now(&header, view.bases[view.rank], sizeof(header), on);
    check_device("failure");
    if (header.failure.state == PYRUNTIME_NO_FAILURE && header.stopped_by != 0) {
      const auto first = static_cast<int>(header.stopped_by) - 1;
      require(first < view.world_size(), "this rank was stopped by rank ", first, " of ", view.world_size(),
              "; something else has written over the workspace.");
      // That rank may still be writing its record. This rank's own kernels have ended; its host stopped them.
      const int most = first == view.rank ? 0 : kMostReads;
      for (int reads = 0; reads < most && header.failure.state != PYRUNTIME_FAILED; ++reads) {
        runtime::copy_now(&header, view.bases[first], sizeof(header), on);
      }
    }
    *out = header.failure;
  });
}

int pyruntime_new_stream(void** stream) {
  return guarded("new_stream", [&] {
    require(stream != nullptr, "there is nowhere to write the stream.");
    runtime::Stream made{};
    runtime::make_stream(&made);
    *stream = made;
  });
}

int pyruntime_stop(const PyruntimeGroup* group, void* stream) {
  return guarded("stop", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_WAIT);
    // A copy and no kernel: those that wait may fill the device.
    const uint64_t by = view.rank + 1;
    runtime::copy_now(&view.header(view.rank).stopped_by, &by, sizeof(by),
                      static_cast<runtime::Stream>(stream));
  });
}

int pyruntime_describe_failure(const PyruntimeFailure* failure, char* out, int64_t size) {
  return guarded("describe_failure", [&] {
    require(failure != nullptr && out != nullptr && size > 0, "there is no record, or nowhere to write.");
    static const char* const kOps[] = {"wait", "push of rows", "all_gather_matmul", "matmul_reduce_scatter",
                                       "multicast of rows"};
    const char* op = failure->op >= 0 && failure->op < 5 ? kOps[failure->op] : "unknown op";
    const auto bytes = static_cast<size_t>(size);
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    if (failure->state == PYRUNTIME_NO_FAILURE) {
      std::snprintf(out, bytes, "nothing failed");
    } else if (failure->chunk == kCredit) {
      std::snprintf(
          out, bytes,
          "%s, rank %d waiting for rank %d to have done with slot %d (expected epoch %llu, seen %llu): "
          "the deadline has passed.",
          op, failure->rank, failure->peer, failure->slot, number(failure->expected), number(failure->seen));
    } else {
      std::snprintf(
          out, bytes,
          "%s, rank %d waiting for rank %d to send chunk %d into slot %d (expected epoch %llu, seen %llu): "
          "the deadline has passed.",
          op, failure->rank, failure->peer, failure->chunk, failure->slot, number(failure->expected),
          number(failure->seen));
    }
  });
}
