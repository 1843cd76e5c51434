// The layout of half a result staged in shared memory, between the registers of wgmma and the bulk copies of
// TMA. Only numbers, so that it is tested without a GPU.
#pragma once

#include "units.h"

namespace pyruntime::sm90 {

// The layout is TMA's: boxes of 64 columns, 128 bytes a row. The 16-byte pieces of row r are permuted by r
// mod 8, against bank conflicts (CUDA driver API, CU_TENSOR_MAP_SWIZZLE_128B).
constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kHalfRows * kBoxColumns * 2;

// Returns the byte offset of a piece, 8 elements of a row.
PYRUNTIME_HOST_DEVICE int staged_at(int row, int piece) {
  return piece / 8 * kBoxBytes + row * 128 + ((piece % 8) ^ (row % 8)) * 16;
}

// wgmma leaves each thread 4 sums of every 8 columns (PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16"): two neighbours in row lane / 4 of its warp's 16 rows, and two 8 rows below.
// stmatrix takes these four at a time: from 8x8 elements lane l gives two neighbours in row l / 4, and lane 8
// i + r gives the address of row r of the i-th matrix. Here the matrices are the upper and lower 8 rows of
// one piece, and those of the next.

// thread: within a warpgroup; piece: the first of the two.
PYRUNTIME_HOST_DEVICE int stored_row(int thread) {
  return thread / 32 * 16 + thread % 16;
}
PYRUNTIME_HOST_DEVICE int stored_piece(int thread, int piece) {
  return piece + thread % 32 / 16;
}

// Returns the first of the thread's two neighbouring columns in a piece.
PYRUNTIME_HOST_DEVICE int summed_column(int thread, int piece) {
  return piece * 8 + thread % 4 * 2;
}

}  // namespace pyruntime::sm90
