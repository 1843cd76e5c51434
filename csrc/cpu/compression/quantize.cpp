#include "cpu/compression/quantize.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/compression/checks.h"
#include "cpu/layers/simd.h"

namespace pyruntime::cpu {

namespace {

using layers::float_bits;
using layers::load;
using layers::random_bits;

constexpr int kBlock = kQuantizedBlock;
constexpr int kPlane = kBlock / 8;           // bytes of a whole block's plane
constexpr int64_t kBlocksPerTask = 32;       // fixed, and large enough that waking a thread is worth it
constexpr uint32_t kInfinity = 0x7f800000u;  // as bits
constexpr float kStepsOf2Bits = 2;           // in mean magnitudes; close to the least loss on gradients
constexpr float kSmallest = 1e-30f;          // blocks below it become zero, and their values are lost

// value = (code * stride - middle) * step; codes are at most `top`.
struct Grid {
  int bits, stride, middle, top;

  static Grid of(int64_t bits) {
    if (bits == 1) return {1, 2, 1, 1};
    const int middle = (1 << (bits - 1)) - 1;
    return {static_cast<int>(bits), 1, middle, 2 * middle};
  }
};

// A block's step, and the factor from values to codes.
struct Step {
  float step, scale;
};

struct Noise {
  bool is_random;
  uint32_t seed, first;
};

int64_t blocks_of(int64_t count) {
  return (count + kBlock - 1) / kBlock;
}

// The offset of a block's codes, in bytes behind the steps.
int64_t codes_at(int64_t block, int64_t bits) {
  return block * kPlane * bits;
}

template <typename T>
PYRUNTIME_INLINE void read_block(float* x, const T* values, const float* residual, int count) {
  if (residual == nullptr) {
    PYRUNTIME_SIMD
    for (int i = 0; i < count; ++i) x[i] = load(values[i]);
  } else {
    PYRUNTIME_SIMD
    for (int i = 0; i < count; ++i) x[i] = load(values[i]) + residual[i];
  }
  for (int i = count; i < kBlock; ++i) x[i] = 0;
}

// Returns the bits of the largest magnitude; NaN and infinity have the largest bits.
PYRUNTIME_INLINE uint32_t largest_bits(const float* x) {
  uint32_t largest = 0;
  PYRUNTIME_SIMD_REDUCE(max, largest)
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// In an order of its own, so that all instruction sets, and devices, have the same bits: 64 sums of every
// 64th magnitude, then by halves.
PYRUNTIME_INLINE float sum_of_magnitudes(const float* x) {
  alignas(64) float sums[kPlane] = {};
  for (int at = 0; at < kBlock; at += kPlane) {
    PYRUNTIME_SIMD
    for (int i = 0; i < kPlane; ++i) sums[i] += std::fabs(x[at + i]);
  }
  for (int half = kPlane / 2; half > 0; half /= 2) {
    PYRUNTIME_SIMD
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// largest, mean: of the block's magnitudes.
PYRUNTIME_INLINE Step step_of(const Grid& grid, float largest, float mean, bool is_random) {
  if (largest < kSmallest) return {0, 0};
  float step = largest / static_cast<float>(grid.middle);
  if (!is_random && grid.bits == 1) step = mean;
  if (!is_random && grid.bits == 2) step = std::min(largest, kStepsOf2Bits * mean);
  return {step, 1 / (grid.bits == 1 ? 2 * largest : step)};
}

PYRUNTIME_INLINE int code_of(const Grid& grid, float x, float scale, float up) {
  int code = static_cast<int>(x * scale + (0.5f * static_cast<float>(grid.top) + up));
  code = code < 0 ? 0 : code;
  return code > grid.top ? grid.top : code;
}

PYRUNTIME_INLINE float value_of(const Grid& grid, int code, float step) {
  return static_cast<float>(code * grid.stride - grid.middle) * step;
}

// Replaces x by the rounding error.
PYRUNTIME_INLINE void encode_block(float* x, uint8_t* codes, const Grid& grid, const Step& of,
                                   const Noise& noise) {
  const auto encode = [&](int i, float up) __attribute__((always_inline)) {
    const int code = code_of(grid, x[i], of.scale, up);
    codes[i] = static_cast<uint8_t>(code);
    x[i] -= value_of(grid, code, of.step);
  };
  if (noise.is_random) {
    PYRUNTIME_SIMD
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t bits = random_bits(noise.seed, noise.first + static_cast<uint32_t>(i));
      encode(i, static_cast<float>(static_cast<int>(bits >> 8)) * 0x1p-24f);
    }
  } else {
    PYRUNTIME_SIMD
    for (int i = 0; i < kBlock; ++i) encode(i, 0.5f);
  }
}

// Returns ||x - Q(x)||^2 of a block, rounded to the nearest.
PYRUNTIME_INLINE float lost_of_block(const float* x, int count, const Grid& grid, const Step& of) {
  float sum = 0;
  PYRUNTIME_SIMD_REDUCE(+, sum)
  for (int i = 0; i < count; ++i) {
    const float lost = x[i] - value_of(grid, code_of(grid, x[i], of.scale, 0.5f), of.step);
    sum += lost * lost;
  }
  return sum;
}

// A whole block's plane. The compiler does not vectorize these operations in loops over bytes.
using Plane [[gnu::vector_size(kPlane)]] = uint8_t;

PYRUNTIME_INLINE void write_planes(uint8_t* planes, const uint8_t* codes, int bits) {
  Plane eighths[8];
  std::memcpy(eighths, codes, sizeof(eighths));
  for (int bit = 0; bit < bits; ++bit) {
    const uint8_t mask = static_cast<uint8_t>(1 << bit);
    Plane plane = {};
    for (int eighth = 0; eighth < 8; ++eighth) {
      const uint8_t flag = static_cast<uint8_t>(1 << eighth);
      plane |= (Plane)((eighths[eighth] & mask) != 0) & flag;
    }
    std::memcpy(planes + bit * kPlane, &plane, sizeof(plane));
  }
}

PYRUNTIME_INLINE void read_planes(uint8_t* codes, const uint8_t* planes, int bits) {
  Plane eighths[8] = {};
  for (int bit = 0; bit < bits; ++bit) {
    const uint8_t mask = static_cast<uint8_t>(1 << bit);
    Plane plane;
    std::memcpy(&plane, planes + bit * kPlane, sizeof(plane));
    for (int eighth = 0; eighth < 8; ++eighth) {
      const uint8_t flag = static_cast<uint8_t>(1 << eighth);
      eighths[eighth] |= (Plane)((plane & flag) != 0) & mask;
    }
  }
  std::memcpy(codes, eighths, sizeof(eighths));
}

// For the last, shorter block. size: bytes of a plane.
void write_short_planes(uint8_t* planes, const uint8_t* codes, int bits, int size) {
  std::memset(planes, 0, static_cast<size_t>(bits * size));
  for (int bit = 0; bit < bits; ++bit) {
    for (int i = 0; i < 8 * size; ++i) planes[bit * size + i % size] |= (codes[i] >> bit & 1) << (i / size);
  }
}

void read_short_planes(uint8_t* codes, const uint8_t* planes, int bits, int size) {
  std::memset(codes, 0, kBlock);
  for (int bit = 0; bit < bits; ++bit) {
    for (int i = 0; i < 8 * size; ++i) codes[i] |= (planes[bit * size + i % size] >> (i / size) & 1) << bit;
  }
}

// Quantizes `total` values that begin at a block; `steps` and `planes` point to the first block's.
struct QuantizeBlocks {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, float* residual, int64_t total, const Grid* grid_at,
                                   uint8_t* steps, uint8_t* planes, const Noise* noise_at) {
    const Grid grid = *grid_at;
    Noise noise = *noise_at;
    alignas(64) float x[kBlock];
    alignas(64) uint8_t codes[kBlock];
    for (int64_t at = 0; at < total; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, total - at)), size = (count + 7) / 8;
      read_block(x, values + at, residual == nullptr ? nullptr : residual + at, count);
      const uint32_t bits = largest_bits(x);
      float step = std::numeric_limits<float>::quiet_NaN();
      if (bits >= kInfinity) {
        std::memset(codes, 0, sizeof(codes));
        std::memset(x, 0, sizeof(x));  // no residual, or no later step would be finite
      } else {
        const float mean = grid.bits <= 2 ? sum_of_magnitudes(x) / static_cast<float>(count) : 0;
        const Step of = step_of(grid, layers::bits_float(bits), mean, noise.is_random);
        encode_block(x, codes, grid, of, noise);
        step = of.step;
      }
      std::memcpy(steps, &step, sizeof(step));
      if (count == kBlock) {
        write_planes(planes, codes, grid.bits);
      } else {
        write_short_planes(planes, codes, grid.bits, size);
      }
      if (residual != nullptr) std::memcpy(residual + at, x, static_cast<size_t>(count) * sizeof(float));
      steps += sizeof(step);
      planes += grid.bits * size;
      noise.first += kBlock;
    }
  }
};

struct DequantizeBlocks {
  static PYRUNTIME_INLINE void run(float* out, int64_t total, bool add, const Grid* grid_at,
                                   const uint8_t* steps, const uint8_t* planes) {
    const Grid grid = *grid_at;
    alignas(64) uint8_t codes[kBlock];
    for (int64_t at = 0; at < total; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, total - at)), size = (count + 7) / 8;
      if (count == kBlock) {
        read_planes(codes, planes, grid.bits);
      } else {
        read_short_planes(codes, planes, grid.bits, size);
      }
      float step;
      std::memcpy(&step, steps, sizeof(step));
      float* to = out + at;
      if (add) {
        PYRUNTIME_SIMD
        for (int i = 0; i < count; ++i) to[i] += value_of(grid, codes[i], step);
      } else {
        PYRUNTIME_SIMD
        for (int i = 0; i < count; ++i) to[i] = value_of(grid, codes[i], step);
      }
      steps += sizeof(step);
      planes += grid.bits * size;
    }
  }
};

// errors [grids] += the squared loss of these values.
struct MeasureBlocks {
  template <typename T>
  static PYRUNTIME_INLINE void run(const T* values, const float* residual, int64_t total, const Grid* grids,
                                   int64_t number, double* errors) {
    alignas(64) float x[kBlock];
    for (int64_t at = 0; at < total; at += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, total - at));
      read_block(x, values + at, residual == nullptr ? nullptr : residual + at, count);
      const uint32_t bits = largest_bits(x);
      if (bits >= kInfinity) {
        std::fill_n(errors, number, std::numeric_limits<double>::quiet_NaN());
        return;
      }
      const float mean = sum_of_magnitudes(x) / static_cast<float>(count);
      for (int64_t i = 0; i < number; ++i) {
        const Grid grid = grids[i];
        errors[i] += lost_of_block(x, count, grid, step_of(grid, layers::bits_float(bits), mean, false));
      }
    }
  }
};

// Calls f(first value, count, first step, first code) for every task; the last two are byte offsets.
template <typename F>
void for_blocks(int64_t count, int64_t bits, const F& f) {
  const int64_t blocks = blocks_of(count), codes = blocks * static_cast<int64_t>(sizeof(float));
  at::parallel_for(0, blocks, kBlocksPerTask, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kBlock, size = std::min(count, end * kBlock) - first;
    f(first, size, begin * static_cast<int64_t>(sizeof(float)), codes + codes_at(begin, bits));
  });
}

template <typename T>
void quantize_values(const at::Tensor& values, const Grid& grid, uint8_t* packed, float* residual,
                     const Noise& noise) {
  const T* data = values.const_data_ptr<T>();
  for_blocks(values.numel(), grid.bits, [&](int64_t first, int64_t size, int64_t steps, int64_t codes) {
    const Noise here{noise.is_random, noise.seed, noise.first + static_cast<uint32_t>(first)};
    layers::simd_run<QuantizeBlocks>(data + first, residual == nullptr ? nullptr : residual + first, size,
                                     &grid, packed + steps, packed + codes, &here);
  });
}

void check_bits(int64_t bits) {
  TORCH_CHECK_VALUE(bits >= 1 && bits <= 8, "quantize: bits=", bits, "; a value takes 1 to 8 bits.");
}

// Each task has its own errors, added in task order, so that the sum does not depend on threads.
template <typename T>
std::vector<double> errors_of(const at::Tensor& values, const std::vector<Grid>& grids,
                              const float* residual) {
  const T* data = values.const_data_ptr<T>();
  const int64_t count = values.numel(), per_task = kBlocksPerTask * kBlock;
  const int64_t tasks = (count + per_task - 1) / per_task, number = static_cast<int64_t>(grids.size());
  std::vector<double> found(static_cast<size_t>(tasks * number));
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * per_task;
      layers::simd_run<MeasureBlocks>(data + first, residual == nullptr ? nullptr : residual + first,
                                      std::min(per_task, count - first), grids.data(), number,
                                      found.data() + task * number);
    }
  });
  std::vector<double> errors(grids.size());
  for (size_t i = 0; i < found.size(); ++i) errors[i % grids.size()] += found[i];
  return errors;
}

}  // namespace

int64_t quantized_bytes(int64_t count, int64_t bits) {
  check_bits(bits);
  TORCH_CHECK_VALUE(count >= 0, "quantized_bytes: count=", count, "; there cannot be fewer than 0 values.");
  const int64_t whole = count / kBlock, rest = count % kBlock;
  return blocks_of(count) * static_cast<int64_t>(sizeof(float)) + codes_at(whole, bits) +
         (rest + 7) / 8 * bits;
}

void check_quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
                    const std::optional<at::Tensor>& residual) {
  check_values(values, residual, values.device(), "quantize");
  check_flat(packed, values.device(), at::kByte, "quantize", "packed");
  check_size(packed, quantized_bytes(values.numel(), bits), "quantize", "packed");
}

void check_dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out) {
  check_flat(out, out.device(), at::kFloat, "dequantize", "out");
  check_flat(packed, out.device(), at::kByte, "dequantize", "packed");
  check_size(packed, quantized_bytes(out.numel(), bits), "dequantize", "packed");
}

void quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
              const std::optional<at::Tensor>& residual,
              const std::optional<std::pair<int64_t, int64_t>>& rounding) {
  const Grid grid = Grid::of(bits);
  const auto [seed, first] = rounding.value_or(std::pair<int64_t, int64_t>{0, 0});
  const Noise noise{rounding.has_value(), static_cast<uint32_t>(seed), static_cast<uint32_t>(first)};
  auto* to = packed.mutable_data_ptr<uint8_t>();
  float* lost = residual ? residual->mutable_data_ptr<float>() : nullptr;
  switch (values.scalar_type()) {
    case at::kFloat:
      return quantize_values<float>(values, grid, to, lost, noise);
    case at::kBFloat16:
      return quantize_values<c10::BFloat16>(values, grid, to, lost, noise);
    default:
      return quantize_values<c10::Half>(values, grid, to, lost, noise);
  }
}

void dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out, bool add) {
  const Grid grid = Grid::of(bits);
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  auto* to = out.mutable_data_ptr<float>();
  for_blocks(out.numel(), bits, [&](int64_t first, int64_t size, int64_t steps, int64_t codes) {
    layers::simd_run<DequantizeBlocks>(to + first, size, add, &grid, from + steps, from + codes);
  });
}

std::vector<double> quantization_errors(const at::Tensor& values, const std::vector<int64_t>& bits,
                                        const std::optional<at::Tensor>& residual) {
  check_values(values, residual, at::kCPU, "quantization_errors");
  std::vector<Grid> grids;
  for (const int64_t each : bits) {
    check_bits(each);
    grids.push_back(Grid::of(each));
  }
  const float* before = residual ? residual->const_data_ptr<float>() : nullptr;
  switch (values.scalar_type()) {
    case at::kFloat:
      return errors_of<float>(values, grids, before);
    case at::kBFloat16:
      return errors_of<c10::BFloat16>(values, grids, before);
    default:
      return errors_of<c10::Half>(values, grids, before);
  }
}

}  // namespace pyruntime::cpu
