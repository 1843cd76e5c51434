// The inner loops of the bf16 GEMM, packing and the product of some rows with one panel, of one kind of
// processor: bf16_tiles_avx512.h and bf16_tiles_avx2.h.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "cpu/tile_order.h"

namespace pyruntime::cpu {

using Bf16 = c10::BFloat16;

// The left operand of a band of rows over a part of the depth: pairs along k, in strips of kRows rows.
// Distances are in pairs.
struct LeftBand {
  const int32_t* strips;  // the first strip
  int64_t offset;         // rows of the first strip before the band
  int64_t rows;
  int64_t row, pair, strip;  // distances
  int64_t pairs;             // without the half of an odd k
  bool has_half;
};

// The product of a band of rows with one panel.
struct Band {
  LeftBand left;
  const void* panel;
  int64_t first_pair, all_pairs;  // of the panel: where this part of the depth begins, and its whole depth
  int64_t columns;                // columns of the panel that exist in out
  const Bf16* bias;
  Bf16* out;
  float* wide;      // instead of `out`: the sums themselves, continued from what is there if `accumulate`
  int64_t out_row;  // in elements
  bool accumulate;
  // Between the parts of a cut depth the rows' sums are stored in `sums`, [rows, kPanel].
  bool is_first, is_last;
  float* sums;
};

struct Bf16Tiles {
  int64_t panel_bytes_of_pair;  // of a packed panel
  // For a left operand that is read in place, along k, and for one packed by pack_strips.
  TileSizes of_rows, of_strips;
  // Packs a panel of b [depth, width <= kPanel] whose columns are contiguous, `column` elements apart.
  void (*pack_columns)(const Bf16* b, int64_t column, int64_t depth, int64_t width, void* panel);
  // The same for contiguous rows, `row` elements apart.
  void (*pack_rows)(const Bf16* b, int64_t row, int64_t depth, int64_t width, void* panel);
  // Packs columns of a left operand in strips of kRows, [strips, pairs, kRows], so that the elements of one
  // step are adjacent. a: `depth` rows of `width` <= kStripColumns columns, `row` elements apart.
  void (*pack_strips)(const Bf16* a, int64_t row, int64_t depth, int64_t width, int32_t* strips);
  void (*multiply)(const Band& band);
};

// Calls multiply<Rows>() for a strip's number of rows, 1 to kRows.
template <typename Multiply>
void with_rows(int64_t rows, const Multiply& multiply) {
  switch (rows) {
    case 6:
      return multiply.template operator()<6>();
    case 5:
      return multiply.template operator()<5>();
    case 4:
      return multiply.template operator()<4>();
    case 3:
      return multiply.template operator()<3>();
    case 2:
      return multiply.template operator()<2>();
    default:
      return multiply.template operator()<1>();
  }
}

constexpr int64_t kStripColumns = 16 * kRows;

}  // namespace pyruntime::cpu
