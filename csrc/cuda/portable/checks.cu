#include "checks.h"

namespace pyruntime::portable {

namespace {
thread_local std::string last_sentence = "no error";
}

int remember_error(int code, const std::string& sentence) {
  last_sentence = sentence;
  return code;
}

void check_device(const char* op) {
  if (const char* error = runtime::last_error()) {
    throw DeviceError(std::string(op) + ": the device said '" + error +
                      "'; if it is not about this launch, an earlier kernel failed.");
  }
}

void check_workspace(const PyruntimeWorkspace* shape) {
  require(shape != nullptr, "the workspace's shape is a null pointer.");
  require(shape->world_size >= 1 && shape->world_size <= PYRUNTIME_MOST_RANKS,
          "world_size=", shape->world_size, "; a group has 1 to ", PYRUNTIME_MOST_RANKS, " ranks.");
  require(shape->flags >= 1, "a workspace with ", shape->flags, " flags a rank; it needs at least one.");
  require(shape->slot_bytes >= 0, "slot_bytes=", shape->slot_bytes, "; it must not be negative.");
}

Group checked_group(const PyruntimeGroup* group, PyruntimeOp op) {
  require(group != nullptr, "the group is a null pointer.");
  check_workspace(&group->shape);
  const PyruntimeWorkspace& shape = group->shape;
  require(group->rank >= 0 && group->rank < shape.world_size, "rank=", group->rank, " in a group of ",
          shape.world_size, " ranks.");
  require(group->slot >= 0 && group->slot < PYRUNTIME_SLOTS, "slot=", group->slot, "; there are slots 0 to ",
          PYRUNTIME_SLOTS - 1, ".");
  require(group->deadline_ns > 0, "deadline_ns=", group->deadline_ns,
          "; every wait needs a deadline above 0 nanoseconds.");
  require(group->pieces >= 0 && group->pieces <= shape.flags, "pieces=", group->pieces,
          "; this workspace has ", shape.flags, " flags a rank, and 0 means all of them.");
  require(group->workspaces != nullptr, "the list of workspaces is a null pointer.");
  Group made{};
  made.layout = {shape.world_size, shape.flags, shape.slot_bytes};
  made.rank = group->rank;
  made.slot = group->slot;
  made.op = op;
  made.pieces = group->pieces == 0 ? shape.flags : group->pieces;
  made.deadline_ns = static_cast<uint64_t>(group->deadline_ns);
  for (int rank = 0; rank < shape.world_size; ++rank) {
    require(is_aligned(group->workspaces[rank]) && group->workspaces[rank] != nullptr,
            "the workspace of rank ", rank, " lies at ", group->workspaces[rank],
            "; it must be mapped, at a multiple of 16 bytes.");
    made.bases[rank] = static_cast<unsigned char*>(group->workspaces[rank]);
  }
  return made;
}

void check_dtype(int32_t dtype, bool with_fp32) {
  require(dtype == PYRUNTIME_BF16 || dtype == PYRUNTIME_FP16 || (with_fp32 && dtype == PYRUNTIME_FP32),
          "dtype=", dtype, "; use 0 (bf16)", with_fp32 ? ", 1 (fp16) or 2 (fp32)." : " or 1 (fp16).");
}

void check_pitch(const char* name, int64_t pitch, int64_t width) {
  require(pitch >= width, name, "=", pitch, ", but a row has ", width, " elements.");
}

void check_matmul(const PyruntimeMatmul* matmul) {
  require(matmul != nullptr, "the GEMM is a null pointer.");
  check_dtype(matmul->dtype, /*with_fp32=*/false);
  const int32_t layout = matmul->layout;
  require(layout == PYRUNTIME_NT || layout == PYRUNTIME_NN, "layout=", layout, "; use 0 (NT) or 1 (NN).");
  require(matmul->tiles == PYRUNTIME_TILES_SMALL || matmul->tiles == PYRUNTIME_TILES_LARGE,
          "tiles=", matmul->tiles, "; use 0 (small), 1 (large) or what pyruntime_choose_tiles() says.");
  const auto is_size = [](int64_t size) { return size >= 0 && size < int64_t{1} << 31; };
  require(is_size(matmul->m) && is_size(matmul->n) && is_size(matmul->k), "m=", matmul->m, ", n=", matmul->n,
          ", k=", matmul->k, "; sizes must not be negative, and below 2^31.");
  require(matmul->most_blocks >= 0 && matmul->spare_blocks >= 0, "most_blocks=", matmul->most_blocks,
          ", spare_blocks=", matmul->spare_blocks, "; neither may be negative (0: as many blocks as fit).");
  check_pitch("lda", matmul->lda, matmul->k);
  check_pitch("ldb", matmul->ldb, layout == PYRUNTIME_NT ? matmul->k : matmul->n);
  check_pitch("ldc", matmul->ldc, matmul->n);
  require(matmul->b != nullptr || matmul->n == 0 || matmul->k == 0, "b is a null pointer.");
}

int blocks_for(int64_t pieces_of_work, int32_t most_blocks, int per_multiprocessor) {
  const int64_t fit =
      most_blocks > 0 ? most_blocks : static_cast<int64_t>(runtime::multiprocessors()) * per_multiprocessor;
  const int64_t blocks = pieces_of_work < fit ? pieces_of_work : fit;
  return blocks < 1 ? 1 : static_cast<int>(blocks);
}

}  // namespace pyruntime::portable

using namespace pyruntime::portable;

int pyruntime_interface(void) {
  return PYRUNTIME_INTERFACE;
}

const char* pyruntime_error(void) {
  return last_sentence.c_str();
}
