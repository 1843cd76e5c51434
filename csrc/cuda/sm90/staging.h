// How half of a result is staged in shared memory, between the registers of wgmma and the bulk copies of TMA.
// Numbers alone, so that it is tested without a GPU.
#pragma once

#include "units.h"

namespace pyruntime::sm90 {

// It lies as TMA takes it: boxes of 64 columns, 128 bytes a row, in which the 16-byte pieces of
// row r change places by r mod 8, against conflicts of banks (CUDA driver API, CU_TENSOR_MAP_SWIZZLE_128B).
constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kHalfRows * kBoxColumns * 2;

// Byte of a piece: 8 elements of a row.
PYRUNTIME_HOST_DEVICE int staged_at(int row, int piece) {
  return piece / 8 * kBoxBytes + row * 128 + ((piece % 8) ^ (row % 8)) * 16;
}

// wgmma leaves a thread 4 sums of every 8 columns (PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16"): two neighbours in row lane / 4 of the 16 rows of its warp, then two 8 rows
// below. That is what stmatrix takes four at a time: 8x8 elements each, of which lane l gives two neighbours
// in row l / 4; lane 8 i + r says where row r of the i-th goes. Here these are the upper and the lower 8 rows
// of one piece, and those of the next.

// `thread` is one of a warpgroup, `piece` the first of the two.
PYRUNTIME_HOST_DEVICE int stored_row(int thread) {
  return thread / 32 * 16 + thread % 16;
}
PYRUNTIME_HOST_DEVICE int stored_piece(int thread, int piece) {
  return piece + thread % 32 / 16;
}

// The first of the thread's two neighbouring columns in a piece.
PYRUNTIME_HOST_DEVICE int summed_column(int thread, int piece) {
  return piece * 8 + thread % 4 * 2;
}

}  // namespace pyruntime::sm90
