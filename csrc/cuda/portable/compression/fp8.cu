// Packs rows into e4m3, with a power of two for each 128 values, and unpacks them: the format, and bit for
// bit the arithmetic, of csrc/cpu/compression/fp8.h. Each step is exact or rounded once. A block is one group
// of lanes, which reads its values once.
#include "cuda/portable/checks.h"
#include "cuda/portable/compression/lanes.cuh"
#include "cuda/portable/layers/rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kGroups = kThreads / kLanes;
constexpr int kBlock = 128;
constexpr int kEach = kBlock / kLanes;  // values of a lane
constexpr int kNotFinite = 255;         // the exponent of a block that is not finite

PYRUNTIME_HOST_DEVICE int64_t blocks_of(int64_t width) {
  return (width + kBlock - 1) / kBlock;
}

// Rounds a value of magnitude at most 448 to the nearest, ties to even.
PYRUNTIME_DEVICE uint32_t to_e4m3(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  // Adding 2^14 rounds to multiples of 2^-9, the step of values below 2^-6.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0x1p14f) - 0x46800000u;
  return (bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? subnormal : normal);
}

PYRUNTIME_DEVICE float from_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t subnormal = float_bits(static_cast<float>(magnitude) * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + 0x3c000000u;
  return bits_float((magnitude < 8 ? subnormal : normal) | (code & 0x80u) << 24);
}

// The biased exponent of the least power of two that times 448 is at least the largest magnitude. 0: all
// values become 0.
PYRUNTIME_DEVICE int scale_of(uint32_t largest) {
  if (largest >= kInfinityBits) return kNotFinite;
  const int exponent = static_cast<int>(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  return exponent > 0 ? exponent : 0;
}

PYRUNTIME_DEVICE float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(exponent) << 23);
}

template <class T>
struct alignas(kEach * sizeof(T)) Together {
  T values[kEach];
};

// A group's block of a row.
struct Block {
  int64_t row, number, first;  // first: its first value in the row
  int count;                   // 0: there is no block left

  PYRUNTIME_DEVICE Block(int64_t at, int64_t rows, int64_t width) {
    const int64_t blocks = blocks_of(width);
    const bool is_there = at < rows * blocks;
    const Split place = split(is_there ? at : 0, blocks);
    row = place.quotient;
    number = place.remainder;
    first = number * kBlock;
    count = !is_there ? 0 : width - first < kBlock ? static_cast<int>(width - first) : kBlock;
  }
};

// kTogether: whether a lane has kEach consecutive values, which are one access; else every 32nd.
template <bool kTogether>
PYRUNTIME_DEVICE int place_of(int lane, int e) {
  return kTogether ? lane * kEach + e : lane + e * kLanes;
}

template <class T, bool kTogether>
PYRUNTIME_DEVICE void load(const T* block, int count, int lane, float (&x)[kEach]) {
  if constexpr (kTogether) {
    Together<T> read{};
    if (lane * kEach < count) read = *reinterpret_cast<const Together<T>*>(block + lane * kEach);
#pragma unroll
    for (int e = 0; e < kEach; ++e) x[e] = to_float(read.values[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int place = place_of<false>(lane, e);
      x[e] = place < count ? to_float(block[place]) : 0.0f;
    }
  }
}

template <class T, bool kTogether>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
pack_blocks(const T* values, int64_t rows, int64_t width, uint8_t* packed) {
  const int64_t blocks = blocks_of(width), total = rows * blocks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  for (int64_t begin = 0; begin < total; begin += static_cast<int64_t>(gridDim.x) * kGroups) {
    const Block block(begin + group, rows, width);
    float x[kEach];
    load<T, kTogether>(values + block.row * width + block.first, block.count, lane, x);
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) largest = larger(largest, magnitude_bits(x[e]));
    const int exponent = scale_of(largest_of_lanes(largest));
    if (block.count == 0) continue;
    const bool is_zero = exponent == 0 || exponent == kNotFinite;
    const float inverse = power_of_two(254 - exponent);
    uint8_t* codes = packed + block.row * (width + blocks) + block.first;
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const uint32_t code = is_zero ? 0 : to_e4m3(x[e] * inverse);
      const int place = place_of<kTogether>(lane, e);
      if (kTogether) {
        word |= code << (8 * e);
      } else if (place < block.count) {
        codes[place] = static_cast<uint8_t>(code);
      }
    }
    if (kTogether && lane * kEach < block.count) *reinterpret_cast<uint32_t*>(codes + lane * kEach) = word;
    if (lane == 0)
      packed[block.row * (width + blocks) + width + block.number] = static_cast<uint8_t>(exponent);
  }
}

// A block that is not finite has an infinite scale and codes of 0; their product is NaN.
template <class T, bool kTogether>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
unpack_blocks(const uint8_t* packed, int64_t rows, int64_t width, T* values) {
  const int64_t blocks = blocks_of(width), total = rows * blocks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  for (int64_t at = group; at < total; at += static_cast<int64_t>(gridDim.x) * kGroups) {
    const Block block(at, rows, width);
    const uint8_t* row = packed + block.row * (width + blocks);
    const float scale = power_of_two(row[width + block.number]);
    T* out = values + block.row * width + block.first;
    if constexpr (kTogether) {
      if (lane * kEach >= block.count) continue;
      const uint32_t word = *reinterpret_cast<const uint32_t*>(row + block.first + lane * kEach);
      Together<T> written;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        written.values[e] = round_to<T>(from_e4m3(word >> (8 * e) & 0xffu) * scale);
      }
      *reinterpret_cast<Together<T>*>(out + lane * kEach) = written;
    } else {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int place = place_of<false>(lane, e);
        if (place < block.count) out[place] = round_to<T>(from_e4m3(row[block.first + place]) * scale);
      }
    }
  }
}

// Whether lanes may access kEach values, and as many codes, at once.
template <class T>
bool can_take_together(const T* values, int64_t width, const uint8_t* packed) {
  const bool starts = reinterpret_cast<uintptr_t>(values) % sizeof(Together<T>) == 0 &&
                      reinterpret_cast<uintptr_t>(packed) % kEach == 0;
  return starts && width % kEach == 0 && blocks_of(width) % kEach == 0;
}

// Checks the arguments and calls use(zero of the element, whether lanes take values together, grid's blocks).
template <class Use>
void with_blocks(const void* values, int32_t dtype, int64_t rows, int64_t width, const uint8_t* packed,
                 const Use& use) {
  check_dtype(dtype, /*with_fp32=*/true);
  require(rows >= 0 && width >= 0, "rows=", rows, ", width=", width, "; neither may be negative.");
  if (rows == 0 || width == 0) return;
  require(values != nullptr && packed != nullptr, "the values or the packed rows are a null pointer.");
  const int64_t groups = rows * blocks_of(width);
  const int grid = blocks_for((groups + kGroups - 1) / kGroups, 0, kBlocksPerMultiprocessor);
  with_element(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (can_take_together(static_cast<const T*>(values), width, packed)) {
      use(zero, std::true_type(), grid);
    } else {
      use(zero, std::false_type(), grid);
    }
  });
}

}  // namespace

int pyruntime_pack_fp8(const void* values, int32_t dtype, int64_t rows, int64_t width, uint8_t* packed,
                       void* stream) {
  return guarded("pack_fp8", [&] {
    with_blocks(values, dtype, rows, width, packed, [&](auto zero, auto together, int grid) {
      using T = decltype(zero);
      const auto kernel = pack_blocks<T, decltype(together)::value>;
      PYRUNTIME_LAUNCH(kernel, grid, kThreads, 0, stream, static_cast<const T*>(values), rows, width, packed);
    });
  });
}

int pyruntime_unpack_fp8(const uint8_t* packed, int64_t rows, int64_t width, void* values, int32_t dtype,
                         void* stream) {
  return guarded("unpack_fp8", [&] {
    with_blocks(values, dtype, rows, width, packed, [&](auto zero, auto together, int grid) {
      using T = decltype(zero);
      const auto kernel = unpack_blocks<T, decltype(together)::value>;
      PYRUNTIME_LAUNCH(kernel, grid, kThreads, 0, stream, packed, rows, width, static_cast<T*>(values));
    });
  });
}
