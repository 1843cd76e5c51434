// The bf16 GEMM of our own; packed_matrix.h states what it guarantees.
#include "cpu/packed_matrix.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

#include "cpu/bf16_tiles_avx2.h"
#include "cpu/bf16_tiles_avx512.h"
#else
#include "cpu/bf16_tiles.h"
#endif

namespace pyruntime::cpu {

namespace {

// Returns the inner loops for this processor; null if it has none, or if its AMX is faster.
const Bf16Tiles* find_tiles() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1U << 22;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0) return nullptr;
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &avx512::kTiles;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::kTiles;
#endif
  return nullptr;
}

const Bf16Tiles* tiles() {
  static const Bf16Tiles* found = find_tiles();
  return found;
}

void check_out(const at::Tensor& out, int64_t width, at::ScalarType dtype = at::kBFloat16) {
  TORCH_INTERNAL_ASSERT(out.dim() == 2 && out.size(1) == width && out.scalar_type() == dtype &&
                        (out.stride(1) == 1 || width <= 1));
}

}  // namespace

// --- the left operand of a weight's gradient

PackedColumns::PackedColumns(const at::Tensor& a)
    : order_(TileOrder::of(a.size(0), tiles()->of_strips)),
      depth_(a.size(0)),
      width_(a.size(1)),
      strips_((width_ + kRows - 1) / kRows),
      packed_(at::empty({order_.pairs * strips_ * kRows, 2},
                        a.options().memory_format(at::MemoryFormat::Contiguous))) {
  TORCH_INTERNAL_ASSERT(PackedMatrix::can_hold(a) && (a.stride(1) == 1 || width_ <= 1));
  if (depth_ == 0) return;
  auto* to = static_cast<int32_t*>(packed_.mutable_data_ptr());
  const Bf16* from = a.const_data_ptr<Bf16>();
  const int64_t row = a.stride(0);
  at::parallel_for(0, order_.blocks(), 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t pair = b * order_.block, depth = std::min(2 * order_.block, depth_ - 2 * pair);
      int32_t* block = to + pair * strips_ * kRows;
      for (int64_t column = 0; column < width_; column += kStripColumns) {
        tiles()->pack_strips(from + 2 * pair * row + column, row, depth,
                             std::min(kStripColumns, width_ - column), block + column * ((depth + 1) / 2));
      }
    }
  });
}

const int32_t* PackedColumns::strip_of(int64_t column, int64_t pair, int64_t pairs) const {
  const auto* packed = static_cast<const int32_t*>(packed_.const_data_ptr());
  return packed + pair * strips_ * kRows + column / kRows * pairs * kRows;
}

// --- the right operand

bool PackedMatrix::can_hold(const at::Tensor& b) {
  return b.device().is_cpu() && b.scalar_type() == at::kBFloat16 && b.dim() == 2 && tiles() != nullptr;
}

PackedMatrix::PackedMatrix(const at::Tensor& b)
    : depth_(b.size(0)), width_(b.size(1)), by_columns_(b.stride(0) == 1 && b.size(0) > 1) {
  TORCH_INTERNAL_ASSERT(can_hold(b));
  source_ = by_columns_ || b.stride(1) == 1 ? b : b.contiguous();
  panels_ = at::empty({(width_ + kPanel - 1) / kPanel, (depth_ + 1) / 2 * tiles()->panel_bytes_of_pair},
                      b.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}

void* PackedMatrix::panel(int64_t index) const {
  return static_cast<char*>(panels_.mutable_data_ptr()) + index * panels_.size(1);
}

void PackedMatrix::pack_panel(int64_t index) const {
  if (!source_.defined() || depth_ == 0) return;
  const int64_t first = index * kPanel, columns = std::min(kPanel, width_ - first);
  const Bf16* from = source_.const_data_ptr<Bf16>();
  if (by_columns_) {
    tiles()->pack_columns(from + first * source_.stride(1), source_.stride(1), depth_, columns, panel(index));
  } else {
    tiles()->pack_rows(from + first, source_.stride(0), depth_, columns, panel(index));
  }
}

void PackedMatrix::pack() const {
  if (!source_.defined()) return;
  at::parallel_for(0, panels_.size(0), 1, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) pack_panel(index);
  });
  source_.reset();
}

template <typename Work>
void PackedMatrix::for_panels(int64_t rows, int64_t group, const Work& work) const {
  const int64_t panels = panels_.size(0), groups = (rows + group - 1) / group;
  // Multiplies a panel right after packing it, from the cache, if that leaves work for all threads.
  if (groups <= 1 || panels >= 2 * at::get_num_threads()) {
    at::parallel_for(0, panels, 1, [&](int64_t first, int64_t last) {
      for (int64_t begin = 0; begin < rows; begin += group) {
        for (int64_t index = first; index < last; ++index) {
          if (begin == 0) pack_panel(index);
          work(index, begin, std::min(begin + group, rows));
        }
      }
    });
    if (rows > 0) source_.reset();
    return;
  }
  pack();
  at::parallel_for(0, panels * groups, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i / panels * group;
      work(i % panels, begin, std::min(begin + group, rows));
    }
  });
}

void PackedMatrix::multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& bias,
                            bool accumulate) const {
  TORCH_INTERNAL_ASSERT(a.dim() == 2 && a.size(1) == depth_ && a.size(0) == out.size(0));
  check_out(out, width_);
  // Pairs are aligned in every row only if rows have an even number of elements.
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
  const int64_t a_row = rows == 1 ? 0 : a.stride(0) / 2, whole = depth_ / 2;
  const TileOrder order = TileOrder::of(depth_, tiles()->of_rows);
  for_panels(rows, order.group, [&](int64_t index, int64_t begin, int64_t end) {
    const int64_t column = index * kPanel;
    alignas(64) float sums[kMostRows * kPanel];
    order.for_bands(begin, end, [&](int64_t row, int64_t count, int64_t pair, int64_t pairs) {
      const bool is_last = pair + pairs == order.pairs;
      tiles()->multiply({{left + row * a_row + pair, 0, count, a_row, 1, kRows * a_row,
                          std::min(pairs, whole - pair), is_last && depth_ % 2 == 1},
                         panel(index),
                         pair,
                         order.pairs,
                         std::min(kPanel, width_ - column),
                         adds != nullptr ? adds + column : nullptr,
                         to + row * out.stride(0) + column,
                         nullptr,
                         out.stride(0),
                         accumulate,
                         pair == 0,
                         is_last,
                         sums});
    });
  });
}

void PackedMatrix::multiply_transposed(const at::Tensor& out, const PackedColumns& a, int64_t first,
                                       bool accumulate) const {
  const int64_t rows = out.size(0);
  TORCH_INTERNAL_ASSERT(a.depth_ == depth_ && first + rows <= a.width_);
  const bool is_wide = out.scalar_type() == at::kFloat;
  check_out(out, width_, is_wide ? at::kFloat : at::kBFloat16);
  Bf16* to = is_wide ? nullptr : out.data_ptr<Bf16>();
  float* wide = is_wide ? out.data_ptr<float>() : nullptr;
  const TileOrder& order = a.order_;
  for_panels(rows, order.group, [&](int64_t index, int64_t begin, int64_t end) {
    const int64_t column = index * kPanel;
    alignas(64) float sums[kMostRows * kPanel];
    order.for_bands(begin, end, [&](int64_t row, int64_t count, int64_t pair, int64_t pairs) {
      const int64_t place = row * out.stride(0) + column, offset = (first + row) % kRows;
      // An odd k is padded with a zero in both operands.
      tiles()->multiply({{a.strip_of(first + row - offset, pair, pairs), offset, count, 1, kRows,
                          pairs * kRows, pairs, false},
                         panel(index),
                         pair,
                         order.pairs,
                         std::min(kPanel, width_ - column),
                         nullptr,
                         is_wide ? nullptr : to + place,
                         is_wide ? wide + place : nullptr,
                         out.stride(0),
                         accumulate,
                         pair == 0,
                         pair + pairs == order.pairs,
                         sums});
    });
  });
}

}  // namespace pyruntime::cpu
