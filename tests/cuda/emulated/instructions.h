// Emulates the GPUs' matrix instructions lane by lane from their manuals, so that tests execute the index
// arithmetic around them: ldmatrix and mma of the PTX ISA (sections "ldmatrix", "Matrix Fragments for
// mma.m16n8k16"), v_mfma_f32_16x16x16 of CDNA (AMD's matrix instruction calculator). Sums are fp32, in the
// order of k; the hardware's order is not documented.
#pragma once

#include <cstdint>
#include <cstring>

#include "grid.h"

namespace pyruntime::host {

inline int lane() {
  return static_cast<int>(current->thread.x) % kWarpSize;
}

// Loads four 8x8 matrices of 16-bit elements: lanes 8i to 8i + 7 give the row addresses of matrix i. Lane l
// receives element (l / 4, 2 (l % 4)) and the one to its right of each matrix, transposed if kTransposed.
template <bool kTransposed>
void load_matrices(uint32_t (&out)[4], const void* row) {
  const unsigned char* table = warp_exchange(&row, sizeof(row));
  const auto element = [&](int matrix, int r, int c) {
    const uint16_t* address;
    std::memcpy(&address, table + (8 * matrix + r) * kMostExchangedBytes, sizeof(address));
    return address[c];
  };
  const int r = lane() / 4, c = lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = kTransposed ? element(i, c, r) : element(i, r, c);
    const uint32_t high = kTransposed ? element(i, c + 1, r) : element(i, r, c + 1);
    out[i] = low | high << 16;
  }
}

// D += A B, A 16x16, B 16x8. `convert` turns 16 bits into a float.
template <class Convert>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Convert convert) {
  struct Given {
    float a[8], b[4];
  } given;
  for (int i = 0; i < 8; ++i) given.a[i] = convert(static_cast<uint16_t>(a[i / 2] >> i % 2 * 16));
  for (int i = 0; i < 4; ++i) given.b[i] = convert(static_cast<uint16_t>(b[i / 2] >> i % 2 * 16));
  const unsigned char* table = warp_exchange(&given, sizeof(given));
  const auto of = [&](int from) {
    return reinterpret_cast<const Given*>(table + from * kMostExchangedBytes);
  };
  const int row = lane() / 4, column = lane() % 4 * 2;
  for (int k = 0; k < 16; ++k) {
    const Given* of_row = of(row * 4 + k % 8 / 2);
    const float low = of_row->a[k / 8 * 4 + k % 2], high = of_row->a[k / 8 * 4 + 2 + k % 2];
    for (int i = 0; i < 2; ++i) {
      const float right = of((column + i) * 4 + k % 8 / 2)->b[k / 8 * 2 + k % 2];
      d[i] += low * right;
      d[2 + i] += high * right;
    }
  }
}

// D += A B, all 16x16, on 64 lanes with 4 consecutive k each.
template <class Convert>
void mfma_16x16x16(float (&d)[4], const uint16_t (&a)[4], const uint16_t (&b)[4], Convert convert) {
  struct Given {
    float a[4], b[4];
  } given;
  for (int e = 0; e < 4; ++e) {
    given.a[e] = convert(a[e]);
    given.b[e] = convert(b[e]);
  }
  const unsigned char* table = warp_exchange(&given, sizeof(given));
  const auto of = [&](int from) {
    return reinterpret_cast<const Given*>(table + from * kMostExchangedBytes);
  };
  for (int r = 0; r < 4; ++r) {
    const int row = 4 * (lane() / 16) + r, column = lane() % 16;
    for (int k = 0; k < 16; ++k) {
      d[r] += of(row + 16 * (k / 4))->a[k % 4] * of(column + 16 * (k / 4))->b[k % 4];
    }
  }
}

}  // namespace pyruntime::host
