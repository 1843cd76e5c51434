// A tile of one operand of a product, on its way from global to shared memory, with what lies beyond the
// edges read as zero.
#pragma once

#include "compat.h"
#include "numbers.cuh"

namespace pyruntime::portable {

constexpr int kDepth = 64;  // of k in a tile

// The part of an operand that one tile of the product needs: `rows` rows of A (columns of B) from `data` on.
template <class T>
struct Operand {
  const T* data;
  int64_t pitch;  // elements from line to line
  int rows;
};

// kAlongK: k is contiguous in memory, and a line is a row; otherwise a line is what all rows have at one k.
// Lines lie in shared memory as 16-byte chunks, whose place is exclusive-ored with the line's number: the
// same chunk of 8 lines that follow each other then lies in 8 different groups of banks.
template <class T, bool kAlongK, int kRows, int kThreads>
struct OperandTile {
  static constexpr int kLines = kAlongK ? kRows : kDepth;
  static constexpr int kChunks = (kAlongK ? kDepth : kRows) / 8;
  static constexpr int kBytes = kLines * kChunks * 16;
  static_assert(kChunks % 8 == 0);

  static PYRUNTIME_DEVICE int offset(int line, int chunk) {
    return (line * kChunks + (chunk ^ line % 8)) * 16;
  }

  // Where element (row, k) lies; k and row are multiples of what is read at once.
  static PYRUNTIME_DEVICE int offset_of(int row, int k) {
    return kAlongK ? offset(row, k / 8) + k % 8 * 2 : offset(k, row / 8) + row % 8 * 2;
  }

  // By all threads. `depth` of the k that are left exist. With `aligned` (the data and its pitch are
  // multiples of 16 bytes) the copy is asynchronous, otherwise element by element, which is slow and always
  // right.
  static PYRUNTIME_DEVICE void load(unsigned char* to, const Operand<T>& from, int first_k, int depth,
                                    bool aligned) {
    const int first_line = static_cast<int>(threadIdx.x) / kChunks,
              chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int lines = (kAlongK ? from.rows : depth) - first_line;
    const int length = (kAlongK ? depth : from.rows) - chunk * 8;
    const int count = length < 0 ? 0 : length > 8 ? 8 : length;
    const T* source =
        from.data + (kAlongK ? first_k : first_k * from.pitch) + first_line * from.pitch + chunk * 8;
    unsigned char* target = to + offset(first_line, chunk);
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kLines / kStep; ++i) {
        const int bytes = i * kStep < lines ? count * 2 : 0;
        // Nothing is read where nothing exists, but the address has to be one that does.
        device::copy_async(target + i * kStep * kChunks * 16, bytes > 0 ? source : from.data, bytes);
        source += kStep * from.pitch;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kLines / kStep; ++i) {
        store_elements(target + i * kStep * kChunks * 16, source, i * kStep < lines ? count : 0);
        source += kStep * from.pitch;
      }
    }
  }

 private:
  // The lines that a thread takes part in lie so far apart; a multiple of 8, so that they are swizzled alike.
  static constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kStep % 8 == 0 && kLines % kStep == 0);

  static PYRUNTIME_DEVICE void store_elements(unsigned char* target, const T* source, int count) {
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < 8; ++e) vector.values[e] = e < count ? source[e] : T{0};
    store_vector(reinterpret_cast<T*>(target), vector);
  }
};

}  // namespace pyruntime::portable
