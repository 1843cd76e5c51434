// GEMMs in bf16 by AVX512-BF16. What they promise: packed_matrix.h.
#include "cpu/packed_matrix.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define PYRUNTIME_PACKED_MATRIX
#include <cpuid.h>
#include <immintrin.h>
// gcc 12 takes what its own header leaves undefined on purpose for an oversight.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace pyruntime::cpu {

#ifdef PYRUNTIME_PACKED_MATRIX

#define PYRUNTIME_TARGET \
  __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#define PYRUNTIME_TARGET_INLINE PYRUNTIME_TARGET static inline __attribute__((always_inline))

namespace {

using Bf16 = c10::BFloat16;

constexpr int64_t kPanel = 64;  // columns
constexpr int kLanes = 16;      // fp32 sums, or pairs along k, in a vector
constexpr int kVectors = kPanel / kLanes;
// 6 rows of 4 sums, 4 vectors of b and one of a are 29 of 32 registers.
constexpr int kRows = 6;
constexpr int64_t kGroup = 16 * kRows;  // rows that one thread takes with one panel

bool has_instructions() {
  static const bool found = [] {
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kAmxBf16 = 1U << 22;
    const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0;
    return !has_amx && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }();
  return found;
}

// --- packing

// out[j * out_row + i] = in[i * in_row + j], 16 x 16.
PYRUNTIME_TARGET_INLINE void transpose(const int32_t* in, int64_t in_row, int32_t* out, int64_t out_row) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * in_row);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 q + c], quarter l: column 4 l + c of rows 4 q to 4 q + 3.
  constexpr int kEven = 0x88, kOdd = 0xdd;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], kEven);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], kOdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], kEven);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], kOdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], kEven);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], kOdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], kEven);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], kOdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_row, r[i]);
}

// A panel of b whose columns are contiguous, `column` elements apart.
PYRUNTIME_TARGET void pack_columns(const Bf16* b, int64_t column, int64_t depth, int64_t width,
                                   int32_t* panel) {
  const int64_t whole = depth / 2, all = (depth + 1) / 2;
  alignas(64) int32_t padded[kLanes * kLanes];
  for (int64_t pair = 0; pair < all; pair += kLanes) {
    for (int64_t n = 0; n < kPanel; n += kLanes) {
      const int64_t columns = std::clamp<int64_t>(width - n, 0, kLanes);
      const Bf16* from = b + n * column + 2 * pair;
      int32_t* to = panel + pair * kPanel + n;
      if (columns == kLanes && pair + kLanes <= whole && column % 2 == 0 &&
          reinterpret_cast<uintptr_t>(from) % sizeof(int32_t) == 0) {
        transpose(reinterpret_cast<const int32_t*>(from), column / 2, to, kPanel);
        continue;
      }
      std::memset(padded, 0, sizeof(padded));
      const int64_t pairs = std::min<int64_t>(kLanes, all - pair);
      const int64_t elements = std::min<int64_t>(2 * pairs, depth - 2 * pair);
      for (int64_t i = 0; i < columns; ++i) {
        std::memcpy(padded + i * kLanes, from + i * column, elements * sizeof(Bf16));
      }
      for (int64_t j = 0; j < pairs; ++j) {
        for (int64_t i = 0; i < kLanes; ++i) to[j * kPanel + i] = padded[i * kLanes + j];
      }
    }
  }
}

// A panel of b whose rows are contiguous, `row` elements apart.
PYRUNTIME_TARGET void pack_rows(const Bf16* b, int64_t row, int64_t depth, int64_t width, int32_t* panel) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // Lane i: element i of the first, then of the second; and element 16 + i.
  const __m512i low =
      _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x200000));
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x100010));
  for (int64_t k = 0; k < depth; k += 2, panel += kPanel) {
    for (int64_t n = 0; n < kPanel; n += 2 * kLanes) {
      const int64_t columns = std::clamp<int64_t>(width - n, 0, 2 * kLanes);
      const auto mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
      const Bf16* from = b + k * row + n;
      const __m512i first = _mm512_maskz_loadu_epi16(mask, from);
      const __m512i second =
          k + 1 < depth ? _mm512_maskz_loadu_epi16(mask, from + row) : _mm512_setzero_si512();
      _mm512_storeu_si512(panel + n, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(panel + n + kLanes, _mm512_permutex2var_epi16(first, high, second));
    }
  }
}

// --- multiplying

// Some rows of a product with one panel. Distances between a's pairs along k, and between its rows, are in
// pairs; those of out's rows in elements.
struct Strip {
  const int32_t* a;
  int64_t a_row, a_pair;
  int64_t pairs;  // without the half of an odd k
  bool has_half;
  const int32_t* panel;
  int64_t columns;  // of the panel that out has
  const Bf16* bias;
  Bf16* out;
  int64_t out_row;
  bool accumulate;
};

PYRUNTIME_TARGET_INLINE __m512 load(const Bf16* from, __mmask16 mask) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

template <int Rows>
PYRUNTIME_TARGET void multiply_rows(const Strip& strip) {
  __m512 sum[Rows][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_setzero_ps();
  }
  const int32_t *a = strip.a, *b = strip.panel;
  const int64_t a_row = strip.a_row, a_pair = strip.a_pair;
  for (int64_t pair = 0; pair < strip.pairs; ++pair, a += a_pair, b += kPanel) {
    __m512i right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = _mm512_loadu_si512(b + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      int32_t both;
      std::memcpy(&both, a + i * a_row, sizeof(both));
      const __m512i left = _mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
      }
    }
  }
  if (strip.has_half) {
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      uint16_t last;
      std::memcpy(&last, a + i * a_row, sizeof(last));
      const __m512i left = _mm512_set1_epi32(last);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)_mm512_loadu_si512(b + j * kLanes));
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const int64_t columns = std::clamp<int64_t>(strip.columns - j * kLanes, 0, kLanes);
    const auto mask = static_cast<__mmask16>((1U << columns) - 1);
    const __m512 bias = strip.bias != nullptr ? load(strip.bias + j * kLanes, mask) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      Bf16* out = strip.out + i * strip.out_row + j * kLanes;
      __m512 value = sum[i][j];
      if (strip.bias != nullptr) value = _mm512_add_ps(value, bias);
      if (strip.accumulate) value = _mm512_add_ps(value, load(out, mask));
      _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(value));
    }
  }
}

void multiply_some(int rows, const Strip& strip) {
  switch (rows) {
    case 6:
      return multiply_rows<6>(strip);
    case 5:
      return multiply_rows<5>(strip);
    case 4:
      return multiply_rows<4>(strip);
    case 3:
      return multiply_rows<3>(strip);
    case 2:
      return multiply_rows<2>(strip);
    default:
      return multiply_rows<1>(strip);
  }
}

void check_out(const at::Tensor& out, int64_t width) {
  TORCH_INTERNAL_ASSERT(out.dim() == 2 && out.size(1) == width && out.scalar_type() == at::kBFloat16 &&
                        (out.stride(1) == 1 || width <= 1));
}

}  // namespace

bool PackedMatrix::can_hold(const at::Tensor& b) {
  return b.device().is_cpu() && b.scalar_type() == at::kBFloat16 && b.dim() == 2 && has_instructions();
}

PackedMatrix::PackedMatrix(const at::Tensor& b)
    : depth_(b.size(0)), width_(b.size(1)), by_columns_(b.stride(0) == 1 && b.size(0) > 1) {
  TORCH_INTERNAL_ASSERT(can_hold(b));
  source_ = by_columns_ || b.stride(1) == 1 ? b : b.contiguous();
  panels_ = at::empty({(width_ + kPanel - 1) / kPanel, (depth_ + 1) / 2, kPanel, 2},
                      b.options().memory_format(at::MemoryFormat::Contiguous));
}

int32_t* PackedMatrix::panel(int64_t index) const {
  auto* panel = static_cast<int32_t*>(panels_.mutable_data_ptr()) + index * panels_.size(1) * kPanel;
  if (!source_.defined() || depth_ == 0) return panel;
  const int64_t first = index * kPanel, columns = std::min(kPanel, width_ - first);
  const Bf16* from = source_.const_data_ptr<Bf16>();
  if (by_columns_) {
    pack_columns(from + first * source_.stride(1), source_.stride(1), depth_, columns, panel);
  } else {
    pack_rows(from + first, source_.stride(0), depth_, columns, panel);
  }
  return panel;
}

template <typename Work>
void PackedMatrix::for_panels(int64_t rows, const Work& work) const {
  // What is packed is multiplied while it is in the cache; later there is no need that one thread has a
  // panel.
  const int64_t group = source_.defined() ? std::max<int64_t>(rows, 1) : kGroup;
  const int64_t groups = (rows + group - 1) / group;
  at::parallel_for(0, panels_.size(0) * groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % groups * group;
      work(i / groups, panel(i / groups), begin, std::min(begin + group, rows));
    }
  });
  if (groups > 0) source_.reset();
}

void PackedMatrix::pack() const {
  for_panels(1, [](int64_t, const int32_t*, int64_t, int64_t) {});
}

void PackedMatrix::multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& bias,
                            bool accumulate) const {
  TORCH_INTERNAL_ASSERT(a.dim() == 2 && a.size(1) == depth_ && a.size(0) == out.size(0));
  check_out(out, width_);
  // Pairs lie at one distance only where rows have an even number of elements.
  const bool is_read_as_is = a.stride(1) == 1 && (a.size(0) == 1 || a.stride(0) % 2 == 0);
  if (!is_read_as_is) {
    at::Tensor rows = at::empty({a.size(0), depth_ + depth_ % 2}, a.options()).narrow(1, 0, depth_);
    rows.copy_(a);
    return multiply(out, rows, bias, accumulate);
  }
  const at::Tensor added = bias.defined() ? bias.contiguous() : bias;
  const int64_t rows = out.size(0);
  const auto* left = reinterpret_cast<const int32_t*>(a.const_data_ptr<Bf16>());
  const Bf16* adds = added.defined() ? added.const_data_ptr<Bf16>() : nullptr;
  Bf16* to = out.data_ptr<Bf16>();
  const int64_t a_row = rows == 1 ? 0 : a.stride(0) / 2;
  for_panels(rows, [&](int64_t index, const int32_t* panel, int64_t begin, int64_t end) {
    const int64_t column = index * kPanel;
    Strip strip{left + begin * a_row,
                a_row,
                1,
                depth_ / 2,
                depth_ % 2 == 1,
                panel,
                std::min(kPanel, width_ - column),
                adds != nullptr ? adds + column : nullptr,
                to + begin * out.stride(0) + column,
                out.stride(0),
                accumulate};
    for (int64_t row = begin; row < end; row += kRows) {
      multiply_some(static_cast<int>(std::min<int64_t>(kRows, end - row)), strip);
      strip.a += kRows * a_row;
      strip.out += kRows * strip.out_row;
    }
  });
}

void PackedMatrix::multiply_transposed(const at::Tensor& out, const PackedMatrix& a, int64_t first,
                                       bool accumulate) const {
  const int64_t rows = out.size(0), pairs = (depth_ + 1) / 2;
  TORCH_INTERNAL_ASSERT(a.depth_ == depth_ && first + rows <= a.width_);
  check_out(out, width_);
  a.pack();
  const auto* left = static_cast<const int32_t*>(a.panels_.const_data_ptr());
  Bf16* to = out.data_ptr<Bf16>();
  for_panels(rows, [&](int64_t index, const int32_t* panel, int64_t begin, int64_t end) {
    const int64_t column = index * kPanel;
    Strip strip{nullptr,   1,       kPanel,
                pairs,  // the half of an odd k stands beside a zero
                false,     panel,   std::min(kPanel, width_ - column),
                nullptr,   nullptr, out.stride(0),
                accumulate};
    for (int64_t row = begin; row < end;) {
      const int64_t at = first + row;
      const int64_t count = std::min({int64_t{kRows}, end - row, kPanel - at % kPanel});
      strip.a = left + at / kPanel * pairs * kPanel + at % kPanel;
      strip.out = to + row * strip.out_row + column;
      multiply_some(static_cast<int>(count), strip);
      row += count;
    }
  });
}

#else

bool PackedMatrix::can_hold(const at::Tensor& /*b*/) {
  return false;
}

PackedMatrix::PackedMatrix(const at::Tensor& b) : depth_(0), width_(0), by_columns_(false) {
  TORCH_INTERNAL_ASSERT(can_hold(b));
}

void PackedMatrix::multiply(const at::Tensor& out, const at::Tensor& /*a*/, const at::Tensor& /*bias*/,
                            bool /*accumulate*/) const {
  TORCH_INTERNAL_ASSERT(can_hold(out));
}

void PackedMatrix::multiply_transposed(const at::Tensor& out, const PackedMatrix& /*a*/, int64_t /*first*/,
                                       bool /*accumulate*/) const {
  TORCH_INTERNAL_ASSERT(can_hold(out));
}

#endif

}  // namespace pyruntime::cpu
