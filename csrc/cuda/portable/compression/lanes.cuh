// Groups of 32 lanes, each with a block of values of its own: a warp, or half a wave of AMD's GPUs. All lanes
// of a warp take part in every exchange, also those of a group that has no block left.
#pragma once

#include "cuda/portable/numbers.cuh"

namespace pyruntime::portable {

constexpr int kLanes = 32;
constexpr uint32_t kInfinityBits = 0x7f800000u;

PYRUNTIME_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  device::copy_bits(&bits, &value, sizeof(bits));
  return bits;
}

PYRUNTIME_DEVICE float bits_float(uint32_t bits) {
  float value;
  device::copy_bits(&value, &bits, sizeof(value));
  return value;
}

PYRUNTIME_DEVICE uint32_t larger(uint32_t one, uint32_t other) {
  return one > other ? one : other;
}

// The bits of the magnitude; NaN and infinity have the largest.
PYRUNTIME_DEVICE uint32_t magnitude_bits(float value) {
  return float_bits(value) & 0x7fffffffu;
}

// The largest of the group's lanes.
PYRUNTIME_DEVICE uint32_t largest_of_lanes(uint32_t bits) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    bits = larger(bits, float_bits(device::shuffle_xor(bits_float(bits), mask)));
  }
  return bits;
}

// The sum of the group's lanes, by halves: the same bits in all of them.
PYRUNTIME_DEVICE float sum_of_lanes(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += device::shuffle_xor(value, mask);
  return value;
}

}  // namespace pyruntime::portable
