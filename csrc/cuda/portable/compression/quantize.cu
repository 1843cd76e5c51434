// Quantizes values to 1 to 8 bits, block by block, fused with error feedback, and back: the format and the
// arithmetic of csrc/cpu/compression/quantize.cpp, the bits of CPUs that multiply and add in one rounding
// (FMA), which is asked for by name where compilers may choose. A block is one group of lanes, which reads
// its values once; a lane has two bytes of each plane, that is 16 values.
#include "cuda/portable/checks.h"
#include "cuda/portable/compression/lanes.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kGroups = kThreads / kLanes;
constexpr int kBlock = 512;
constexpr int kPlane = kBlock / 8;       // bytes of a whole block's plane
constexpr int kBytes = kPlane / kLanes;  // of a plane that a lane has
constexpr int kEach = 8 * kBytes;        // values of a lane
constexpr int kStepBytes = 4;
constexpr uint32_t kNan = 0x7fc00000u;
constexpr float kStepsOf2Bits = 2;   // in mean magnitudes
constexpr float kSmallest = 1e-30f;  // blocks below it become zero, and their values are lost

// value = (code * stride - middle) * step; codes are at most `top`.
struct Codes {
  int bits, stride, middle, top;
};

Codes codes_of(int bits) {
  if (bits == 1) return {1, 2, 1, 1};
  const int middle = (1 << (bits - 1)) - 1;
  return {bits, 1, middle, 2 * middle};
}

// A block's step, and the factor from values to codes.
struct Step {
  float step, scale;
};

// largest, mean: of the block's magnitudes.
PYRUNTIME_DEVICE Step step_of(const Codes& codes, float largest, float mean, bool is_random) {
  if (largest < kSmallest) return {0, 0};
  float step = largest / static_cast<float>(codes.middle);
  if (!is_random && codes.bits == 1) step = mean;
  if (!is_random && codes.bits == 2) step = largest < kStepsOf2Bits * mean ? largest : kStepsOf2Bits * mean;
  return {step, 1 / (codes.bits == 1 ? 2 * largest : step)};
}

PYRUNTIME_DEVICE int code_of(const Codes& codes, float x, float scale, float up) {
  const int code = static_cast<int>(fmaf(x, scale, 0.5f * static_cast<float>(codes.top) + up));
  return code < 0 ? 0 : code > codes.top ? codes.top : code;
}

// The value of a code, in steps.
PYRUNTIME_DEVICE float steps_of(const Codes& codes, int code) {
  return static_cast<float>(code * codes.stride - codes.middle);
}

// A group's block.
struct Block {
  int64_t number;
  int count, plane;  // plane: bytes of each of its planes

  PYRUNTIME_DEVICE Block(int64_t at, int64_t values) : number(at) {
    const int64_t left = values - at * kBlock;
    count = left <= 0 ? 0 : left < kBlock ? static_cast<int>(left) : kBlock;
    plane = (count + 7) / 8;
  }
  PYRUNTIME_DEVICE int64_t first() const { return number * kBlock; }
  // The place of the value that bit `bit` of the lane's byte number `byte` belongs to.
  PYRUNTIME_DEVICE int place(int lane, int bit, int byte) const { return bit * plane + lane + byte * kLanes; }
};

PYRUNTIME_HOST_DEVICE int64_t blocks_of(int64_t count) {
  return (count + kBlock - 1) / kBlock;
}

// The planes of a block, behind the steps of all.
PYRUNTIME_DEVICE int64_t planes_at(int64_t block, int64_t count, int bits) {
  return blocks_of(count) * kStepBytes + block * kPlane * bits;
}

template <class T>
struct Operands {
  const T* values;
  float* residual;
  uint8_t* packed;
  int64_t count;
  Codes codes;
  bool is_random;
  uint32_t seed, first;

  PYRUNTIME_DEVICE float x(int64_t i) const {
    const float value = to_float(values[i]);
    return residual == nullptr ? value : value + residual[i];
  }
  PYRUNTIME_DEVICE float up(int64_t i) const {
    if (!is_random) return 0.5f;
    const uint32_t bits = random_bits(seed, first + static_cast<uint32_t>(i));
    return static_cast<float>(bits >> 8) * 0x1p-24f;
  }
};

// Returns the magnitudes' largest and, in the CPU's order, their sum: of 64 sums of every 64th, by halves.
template <class T>
PYRUNTIME_DEVICE uint32_t load(const Operands<T>& o, const Block& block, int lane, float (&x)[kEach],
                               float* sum) {
  uint32_t largest = 0;
  float low = 0, high = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int place = lane + e * kLanes;
    x[e] = place < block.count ? o.x(block.first() + place) : 0.0f;
    largest = larger(largest, magnitude_bits(x[e]));
    (e % 2 == 0 ? low : high) += fabsf(x[e]);
  }
  if (block.plane < kPlane) {  // the last block: a lane's codes belong to other values
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int byte = e % kBytes, place = block.place(lane, e / kBytes, byte);
      const bool is_there = lane + byte * kLanes < block.plane && place < block.count;
      x[e] = is_there ? o.x(block.first() + place) : 0.0f;
    }
  }
  *sum = sum_of_lanes(low + high);
  return largest_of_lanes(largest);
}

template <class T>
PYRUNTIME_DEVICE void encode(const Operands<T>& o, const Block& block, int lane, const float (&x)[kEach],
                             const Step& of, bool is_finite) {
  uint8_t* planes = o.packed + planes_at(block.number, o.count, o.codes.bits);
#pragma unroll
  for (int byte = 0; byte < kBytes; ++byte) {
    const int at = lane + byte * kLanes;
    if (at >= block.plane) continue;
    uint32_t codes[8];
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const float value = x[bit * kBytes + byte];
      const int place = block.place(lane, bit, byte);
      const int64_t i = block.first() + place;
      const int code = is_finite ? code_of(o.codes, value, of.scale, o.up(i)) : 0;
      codes[bit] = static_cast<uint32_t>(code);
      if (o.residual != nullptr && place < block.count) {
        // No residual of what is not finite, or no later step would be.
        o.residual[i] = is_finite ? fmaf(-steps_of(o.codes, code), of.step, value) : 0.0f;
      }
    }
    for (int plane = 0; plane < o.codes.bits; ++plane) {
      uint32_t flags = 0;
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) flags |= (codes[bit] >> plane & 1u) << bit;
      planes[plane * block.plane + at] = static_cast<uint8_t>(flags);
    }
  }
}

template <class T>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
quantize_blocks(PYRUNTIME_PARAMETER Operands<T> parameter) {
  const Operands<T>& o = device::first_parameter(parameter);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  const int64_t blocks = blocks_of(o.count);
  for (int64_t begin = 0; begin < blocks; begin += static_cast<int64_t>(gridDim.x) * kGroups) {
    const Block block(begin + group, o.count);
    float x[kEach], sum;
    const uint32_t largest = load(o, block, lane, x, &sum);
    device::warp_barrier();  // other lanes have read the residuals that this one writes
    if (block.count == 0) continue;
    const bool is_finite = largest < kInfinityBits;
    const float mean = sum / static_cast<float>(block.count);
    const Step of = is_finite ? step_of(o.codes, bits_float(largest), mean, o.is_random) : Step{0, 0};
    encode(o, block, lane, x, of, is_finite);
    const uint32_t step = is_finite ? float_bits(of.step) : kNan;
    if (lane < kStepBytes) {  // by bytes: packed values may begin anywhere
      o.packed[block.number * kStepBytes + lane] = static_cast<uint8_t>(step >> (8 * lane));
    }
  }
}

PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
dequantize_blocks(const uint8_t* packed, Codes codes, float* out, int64_t count, bool add) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  const int64_t blocks = blocks_of(count);
  for (int64_t at = group; at < blocks; at += static_cast<int64_t>(gridDim.x) * kGroups) {
    const Block block(at, count);
    uint32_t step_bits = 0;
#pragma unroll
    for (int byte = 0; byte < kStepBytes; ++byte) {
      step_bits |= static_cast<uint32_t>(packed[at * kStepBytes + byte]) << (8 * byte);
    }
    const float step = bits_float(step_bits);
    const uint8_t* planes = packed + planes_at(at, count, codes.bits);
#pragma unroll
    for (int byte = 0; byte < kBytes; ++byte) {
      const int here = lane + byte * kLanes;
      if (here >= block.plane) continue;
      uint32_t code[8] = {};
      for (int plane = 0; plane < codes.bits; ++plane) {
        const uint32_t flags = planes[plane * block.plane + here];
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) code[bit] |= (flags >> bit & 1u) << plane;
      }
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) {
        const int place = block.place(lane, bit, byte);
        if (place >= block.count) continue;
        float* to = out + block.first() + place;
        const float steps = steps_of(codes, static_cast<int>(code[bit]));
        *to = add ? fmaf(steps, step, *to) : steps * step;
      }
    }
  }
}

int grid_of(int64_t count) {
  return blocks_for((blocks_of(count) + kGroups - 1) / kGroups, 0, kBlocksPerMultiprocessor);
}

void check_codes(int32_t bits, int64_t count) {
  require(bits >= 1 && bits <= 8, "bits=", bits, "; a value takes 1 to 8 bits.");
  require(count >= 0, "count=", count, "; it must not be negative.");
}

}  // namespace

int pyruntime_quantize(const PyruntimeQuantized* quantized, void* stream) {
  return guarded("quantize", [&] {
    require(quantized != nullptr, "the operands are a null pointer.");
    const PyruntimeQuantized& q = *quantized;
    check_dtype(q.dtype, /*with_fp32=*/true);
    check_codes(q.bits, q.count);
    if (q.count == 0) return;
    require(q.values != nullptr && q.packed != nullptr, "the values or the packed codes are a null pointer.");
    with_element(q.dtype, [&](auto zero) {
      using T = decltype(zero);
      const Operands<T> o{static_cast<const T*>(q.values),
                          q.residual,
                          q.packed,
                          q.count,
                          codes_of(q.bits),
                          q.is_random != 0,
                          q.seed,
                          q.first};
      const auto kernel = quantize_blocks<T>;
      PYRUNTIME_LAUNCH(kernel, grid_of(q.count), kThreads, 0, stream, o);
    });
  });
}

int pyruntime_dequantize(const uint8_t* packed, int32_t bits, float* out, int64_t count, int32_t add,
                         void* stream) {
  return guarded("dequantize", [&] {
    check_codes(bits, count);
    if (count == 0) return;
    require(packed != nullptr && out != nullptr, "the packed codes or the result are a null pointer.");
    PYRUNTIME_LAUNCH(dequantize_blocks, grid_of(count), kThreads, 0, stream, packed, codes_of(bits), out,
                     count, add != 0);
  });
}
