// A tile of one operand of a GEMM in shared memory: the place of each element, and the part that each thread
// loads. The pipelines load it (pipeline_async.cuh, pipeline_registers.cuh).
#pragma once

#include "cuda/compat.h"
#include "cuda/portable/numbers.cuh"

namespace pyruntime::portable {

// Elements of k in a tile.
#if PYRUNTIME_CDNA
constexpr int kDepth = 32;  // two stages leave room for the large tiles' results
#else
constexpr int kDepth = 64;
#endif

// The part of an operand for one tile of the GEMM: `rows` rows of A (columns of B) from `data` on.
template <class T>
struct Operand {
  const T* data;
  int64_t pitch;  // elements from line to line
  int rows;
};

// kAlongK: k is contiguous in memory, and a line is a row. Otherwise a line has the elements of all rows at
// one k. In shared memory a line is a sequence of 16-byte chunks, whose index is xored with the line's
// number. So the same chunk of 8 consecutive lines is in 8 different groups of banks; lines of 4 chunks share
// the banks in pairs. CDNA reads columns from lines of all rows, 128 bytes of a line at a time, without
// swizzle.
template <class T, bool kAlongK, int kRows, int kThreads>
struct OperandTile {
  static constexpr int kTileRows = kRows;
  static constexpr int kLines = kAlongK ? kRows : kDepth;
  static constexpr int kChunks = (kAlongK ? kDepth : kRows) / 8;
  static constexpr int kLineBytes = kChunks * 16;
  static constexpr int kBytes = kLines * kLineBytes;
  // Distance between the lines of one thread; a multiple of 8, so that they are swizzled alike.
  static constexpr int kStep = kThreads / kChunks;
  static constexpr int kParts = kLines / kStep;
  static constexpr int kLinesAcrossBanks = kChunks < 8 ? 8 / kChunks : 1;
#if PYRUNTIME_CDNA
  static constexpr bool kSwizzled = kAlongK;
#else
  static constexpr bool kSwizzled = true;
#endif
  static_assert(kChunks % 8 == 0 || kChunks == 4);
  static_assert(kThreads % kChunks == 0 && kStep % 8 == 0 && kLines % kStep == 0);

  static PYRUNTIME_DEVICE int offset(int line, int chunk) {
    return (line * kChunks + (kSwizzled ? chunk ^ line % 8 / kLinesAcrossBanks : chunk)) * 16;
  }

  // Returns the offset of element (row, k); k and row are multiples of what is read at once.
  static PYRUNTIME_DEVICE int offset_of(int row, int k) {
    return kAlongK ? offset(row, k / 8) + k % 8 * 2 : offset(k, row / 8) + row % 8 * 2;
  }

  // Returns the offset of this thread's part i.
  static PYRUNTIME_DEVICE int offset_of_part(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return offset(thread / kChunks, thread % kChunks) + i * kStep * kChunks * 16;
  }

  // Calls use(i, to, source, count) for each of a thread's kParts parts; called by all threads. A part is 8
  // elements at offset `to` of the tile: the first `count` exist, at `source`, and the others are zero.
  // `depth` of the remaining k exist.
  template <int kUnroll, class Use>
  static PYRUNTIME_DEVICE void each_part(const Operand<T>& from, int first_k, int depth, const Use& use) {
    const int first_line = static_cast<int>(threadIdx.x) / kChunks,
              chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int lines = (kAlongK ? from.rows : depth) - first_line;
    const int length = (kAlongK ? depth : from.rows) - chunk * 8;
    const int count = length < 0 ? 0 : length > 8 ? 8 : length;
    const T* source =
        from.data + (kAlongK ? first_k : first_k * from.pitch) + first_line * from.pitch + chunk * 8;
#pragma unroll kUnroll
    for (int i = 0; i < kParts; ++i) {
      use(i, offset_of_part(i), source, i * kStep < lines ? count : 0);
      source += kStep * from.pitch;
    }
  }
};

template <class T>
PYRUNTIME_DEVICE bool takes_vectors(const Operand<T>& operand) {
  return is_aligned(operand.data) && operand.pitch % Vector<T>::kCount == 0;
}

// Loads the elements of a part one by one: slow, but correct for any alignment.
template <class T>
PYRUNTIME_DEVICE Vector<T> load_elements(const T* source, int count) {
  Vector<T> vector;
#pragma unroll
  for (int e = 0; e < 8; ++e) vector.values[e] = e < count ? source[e] : T{0};
  return vector;
}

}  // namespace pyruntime::portable
