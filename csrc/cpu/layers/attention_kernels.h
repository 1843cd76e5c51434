#pragma once

// Attention of the query heads that share one key/value head, on one thread. Each query sees one contiguous
// range of the keys.
//
// Queries are processed kQueries at a time, and keys kKeys at a time, from the first key that one of them
// sees to the last. The GEMMs are those of tile.h, so at a range's edge less than a tile is computed in vain.
// Keys and values are packed once for all query heads. Softmax is online (Milakov and Gimelshein 2018; Dao
// 2023, algorithm 1) and in base 2. With c = scale log2(e), m the largest scaled score and l the powers' sum,
//
//   S = Q K^T      P = 2^(c S - m)      O = P V / l      lse = (m + log2 l) ln 2
//
// A result over other keys continues with m = lse log2(e), l = 1 and O: it equals one key with that score and
// that value (Liu et al. 2023, ring attention). Backward (Dao 2023, algorithm 2), with delta = rowsum(dO * O)
// and lse over all keys,
//
//   P = 2^(c S - lse log2 e)      dV += P^T dO      dP = dO V^T      dS = P * (dP - delta)
//   dQ += scale dS K      dK += scale dS^T Q
//
// Scores, statistics and sums are float32 (float64 for float64). If the CPU multiplies bfloat16, P and dS of
// bfloat16 inputs are rounded to bfloat16 before they are multiplied; otherwise only results are rounded.

#include <limits>
#include <type_traits>

#include "attention_rows.h"

namespace pyruntime::layers::attention {

constexpr int64_t kQueries = 64;
constexpr int64_t kKeys = 512;          // forward
constexpr int64_t kKeysBackward = 256;  // two more matrices of this width must stay in the cache

constexpr double kLog2E = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

// ---- ranges ----

struct Range {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
  bool meets(int64_t from, int64_t to) const { return begin < to && from < end; }
  bool contains(int64_t from, int64_t to) const { return begin <= from && to <= end; }
};

// Query i of `queries` sees keys begin[i] .. end[i], which all exist.
struct Visible {
  const int32_t *begin, *end;
  int64_t queries;

  Visible from(int64_t query, int64_t rows) const { return {begin + query, end + query, rows}; }
};

// The keys that each tile of a block of queries sees, that any of them sees, and that all see.
struct Hulls {
  explicit Hulls(const Visible& visible) : tiles(round_up(visible.queries, kTileRows) / kTileRows) {
    for (int64_t t = 0; t < tiles; ++t) {
      Range hull = kNothing;
      for (int64_t i = t * kTileRows; i < std::min((t + 1) * kTileRows, visible.queries); ++i) {
        if (visible.begin[i] >= visible.end[i]) continue;
        hull = {std::min<int64_t>(hull.begin, visible.begin[i]), std::max<int64_t>(hull.end, visible.end[i])};
      }
      tile[t] = hull;
      any = {std::min(any.begin, hull.begin), std::max(any.end, hull.end)};
      all = {std::max(all.begin, hull.begin), std::min(all.end, hull.end)};
    }
  }

  // Calls f(first, last) for every run of tiles first .. last that see a key in from .. to.
  template <typename F>
  void for_each_run(int64_t from, int64_t to, const F& f) const {
    if (all.contains(from, to)) return f(int64_t{0}, tiles);
    for (int64_t last, first = 0; first < tiles; first = last + 1) {
      for (last = first; last < tiles && tile[last].meets(from, to);) ++last;
      if (first < last) f(first, last);
    }
  }

  // Calls f(key, keys) for the keys that any tile sees, from a panel boundary on, at most `step` at a time.
  template <typename F>
  void for_each_window(int64_t step, const F& f) const {
    if (any.empty()) return;
    for (int64_t key = any.begin / kPanel * kPanel; key < any.end; key += step) {
      f(key, std::min(step, any.end - key));
    }
  }

  // Returns a tile's keys relative to the window at `key`, from a panel boundary on.
  Range in_window(int64_t t, int64_t key, int64_t keys) const {
    return {std::max<int64_t>(tile[t].begin - key, 0) / kPanel * kPanel, std::min(tile[t].end - key, keys)};
  }

  static constexpr Range kNothing{std::numeric_limits<int32_t>::max(), 0};
  int64_t tiles;
  Range tile[kQueries / kTileRows];
  Range any = kNothing, all = {0, std::numeric_limits<int32_t>::max()};
};

// ---- scratch ----

// Allocates from one buffer; without a buffer it only counts bytes.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}

  template <typename T>
  T* take(int64_t count) {
    char* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Returns the row stride of a scratch matrix; not a power of two, so that columns spread over cache sets.
PYRUNTIME_INLINE int64_t scratch_stride(int64_t columns) {
  return round_up(columns, kPanel) + kPanel;
}

// ---- one key/value head ----

struct Sizes {
  int64_t keys, dim;
  double scale;
};

template <typename Operands>
struct Shape {
  using A = typename Operands::accumulate_t;
  using E = typename Operands::element_t;
  static constexpr int64_t kGroup = Operands::group;

  explicit Shape(const Sizes& sizes)
      : keys(sizes.keys),
        dim(sizes.dim),
        width(round_up(dim, kPanel)),
        dim_depth(round_up(dim, kGroup) / kGroup),
        key_depth(round_up(keys, kGroup) / kGroup) {}

  int64_t panels() const { return width / kPanel; }
  int64_t key_panel(int64_t key) const { return key / kPanel * dim_depth * kPanel * kGroup; }
  int64_t dim_panel(int64_t panel, int64_t depth, int64_t from) const {
    return (panel * depth + from / kGroup) * kPanel * kGroup;
  }

  int64_t keys, dim;
  int64_t width;      // dim, padded to whole panels
  int64_t dim_depth;  // groups along dim, and along the keys, in GEMMs
  int64_t key_depth;
};

// Multiplies a block of queries with the transposed keys or values, columns key .. key + keys. For each panel
// of columns, tiles that see none of it are skipped.
template <typename Operands>
void multiply_transposed(const Shape<Operands>& shape, const typename Operands::element_t* rows,
                         const Hulls& hulls, const typename Operands::element_t* panels, int64_t key,
                         int64_t keys, typename Operands::accumulate_t* out, int64_t stride) {
  constexpr int64_t kGroup = Operands::group;
  for (int64_t column = 0; column < keys; column += kPanel) {
    const int64_t panel_end = std::min(column + kPanel, keys);
    hulls.for_each_run(key + column, key + panel_end, [&](int64_t first, int64_t last) {
      const int64_t row = first * kTileRows;
      Operands::multiply_panel((last - first) * kTileRows, shape.dim_depth,
                               rows + row * shape.dim_depth * kGroup, shape.dim_depth, 1,
                               panels + shape.key_panel(key + column), out + row * stride + column, stride,
                               /*accumulate=*/false);
    });
  }
}

template <typename Operands, typename T>
class Forward {
  using S = Shape<Operands>;
  using A = typename S::A;
  using E = typename S::E;
  static constexpr int64_t kGroup = S::kGroup;
  static constexpr bool kRounds = !std::is_same_v<A, E>;

 public:
  Forward(const Sizes& sizes, char* memory)
      : shape_(sizes), factor_(static_cast<A>(sizes.scale * kLog2E)), arena_(memory) {
    keys_ = arena_.take<E>(round_up(shape_.keys, kPanel) * shape_.dim_depth * kGroup);
    values_ = arena_.take<E>(shape_.key_depth * shape_.width * kGroup);
    queries_ = arena_.take<E>(kQueries * shape_.dim_depth * kGroup);
    stride_ = scratch_stride(std::min(kKeys, shape_.keys));
    scores_ = arena_.take<A>(kQueries * stride_);
    rounded_ = arena_.take<E>(kRounds ? kTileRows * stride_ : 0);
    sums_ = arena_.take<A>(kQueries * shape_.width);
    m_ = arena_.take<A>(kQueries);
    l_ = arena_.take<A>(kQueries);
    rescale_ = arena_.take<A>(kQueries);
  }

  int64_t bytes() const { return arena_.used(); }

  void load_keys(Rows<const T> keys, Rows<const T> values) {
    simd_run<PackPanelsTransposed<kGroup>>(keys, shape_.keys, shape_.dim, keys_, shape_.dim_depth);
    simd_run<PackPanels<kGroup>>(values, shape_.keys, shape_.dim, values_, shape_.key_depth);
  }

  // Merges these keys into out and lse, the result over earlier keys. If lse is -inf, out is not read. Tiles
  // of queries that see nothing are not touched.
  template <typename R>
  void head(Rows<const T> queries, const Visible& visible, Rows<R> out, A* lse) {
    for (int64_t query = 0; query < visible.queries; query += kQueries) {
      const int64_t rows = std::min(kQueries, visible.queries - query);
      const Visible block = visible.from(query, rows);
      const Hulls hulls(block);
      if (hulls.any.empty()) continue;
      simd_run<PackRows>(queries.from(query), rows, shape_.dim, queries_, round_up(rows, kTileRows),
                         shape_.dim_depth * kGroup);
      for (int64_t t = 0; t < hulls.tiles; ++t) {
        if (!hulls.tile[t].empty()) load_tile(t, rows, out.from(query), lse + query);
      }
      hulls.for_each_window(kKeys, [&](int64_t key, int64_t keys) {
        multiply_transposed(shape_, queries_, hulls, keys_, key, keys, scores_, stride_);
        for (int64_t t = 0; t < hulls.tiles; ++t) attend(t, block, hulls.in_window(t, key, keys), key);
      });
      for (int64_t t = 0; t < hulls.tiles; ++t) {
        if (!hulls.tile[t].empty()) store_tile(t, block, out.from(query), lse + query);
      }
    }
  }

 private:
  template <typename R>
  void load_tile(int64_t tile, int64_t rows, Rows<R> out, const A* lse) {
    const int64_t row = tile * kTileRows, last = std::min(row + kTileRows, rows);
    started_[tile] = false;
    for (int64_t i = row; i < last; ++i) {
      const bool seen = lse[i] != -std::numeric_limits<A>::infinity();
      m_[i] = lse[i] * static_cast<A>(kLog2E);
      l_[i] = seen ? A(1) : A(0);
      started_[tile] |= seen;
    }
    if (!started_[tile]) return;
    simd_run<LoadRows>(out.from(row), last - row, shape_.dim, sums_ + row * shape_.width, shape_.width,
                       static_cast<const A*>(l_ + row));
  }

  template <typename R>
  void store_tile(int64_t tile, const Visible& block, Rows<R> out, A* lse) {
    const int64_t row = tile * kTileRows, last = std::min(row + kTileRows, block.queries);
    for (int64_t i = row; i < last; ++i) {
      if (block.begin[i] < block.end[i]) {
        lse[i] = static_cast<A>((m_[i] + std::log2(l_[i])) * static_cast<A>(kLn2));
      } else {
        l_[i] = A(1);  // the row is restored, or zero if nothing has been seen
      }
    }
    simd_run<DivideRows>(static_cast<const A*>(sums_ + row * shape_.width), shape_.width, out.from(row),
                         last - row, shape_.dim, static_cast<const A*>(l_ + row));
  }

  // Attends one tile of queries to the keys `seen` of the window at `key`.
  void attend(int64_t tile, const Visible& block, const Range& seen, int64_t key) {
    if (seen.empty()) return;
    const int64_t row = tile * kTileRows, rows = std::min(kTileRows, block.queries - row);
    const int64_t columns = seen.end - seen.begin, padded = round_up(columns, kPanel);
    A *scores = scores_ + row * stride_ + seen.begin, *sums = sums_ + row * shape_.width;
    simd_run<SoftmaxRows>(scores, stride_, rows, block.begin + row, block.end + row, key + seen.begin,
                          columns, padded, factor_, m_ + row, l_ + row, rescale_ + row);
    if (started_[tile]) {
      simd_run<RescaleRows>(sums, shape_.width, rows, static_cast<const A*>(rescale_ + row));
    }
    const E* probabilities;
    if constexpr (kRounds) {
      Operands::round_rows(scores, stride_, kTileRows, padded, rounded_);
      probabilities = rounded_;
    } else {
      probabilities = scores;
    }
    for (int64_t panel = 0; panel < shape_.panels(); ++panel) {
      Operands::multiply_panel(kTileRows, round_up(columns, kGroup) / kGroup, probabilities, stride_ / kGroup,
                               1, values_ + shape_.dim_panel(panel, shape_.key_depth, key + seen.begin),
                               sums + panel * kPanel, shape_.width, /*accumulate=*/started_[tile]);
    }
    started_[tile] = true;
  }

  S shape_;
  A factor_;
  Arena arena_;
  int64_t stride_;
  E *keys_, *values_, *queries_, *rounded_;
  A *scores_, *sums_, *m_, *l_, *rescale_;
  bool started_[kQueries / kTileRows];  // whether a tile's sums are initialized
};

// `Write` is WriteRows<true> to add to the gradients, or WriteRows<false> to overwrite them, which requires
// that every query sees a key.
template <typename Operands, typename T, typename Write>
class Backward {
  using S = Shape<Operands>;
  using A = typename S::A;
  using E = typename S::E;
  static constexpr int64_t kGroup = S::kGroup;
  static constexpr bool kRounds = !std::is_same_v<A, E>;

 public:
  Backward(const Sizes& sizes, char* memory)
      : shape_(sizes),
        scale_(static_cast<A>(sizes.scale)),
        factor_(static_cast<A>(sizes.scale * kLog2E)),
        arena_(memory) {
    const int64_t transposed = round_up(shape_.keys, kPanel) * shape_.dim_depth * kGroup;
    keys_ = arena_.take<E>(transposed);
    values_ = arena_.take<E>(transposed);
    key_rows_ = arena_.take<E>(shape_.key_depth * shape_.width * kGroup);
    dk_ = arena_.take<A>(round_up(shape_.keys, kTileRows) * shape_.width);
    dv_ = arena_.take<A>(round_up(shape_.keys, kTileRows) * shape_.width);
    for (Side* side : {&q_, &g_}) {
      side->rows = arena_.take<E>(kQueries * shape_.dim_depth * kGroup);
      side->panels = arena_.take<E>(kQueries * shape_.width);
    }
    stride_ = scratch_stride(std::min(kKeysBackward, shape_.keys));
    p_ = arena_.take<A>(kQueries * stride_);
    ds_ = arena_.take<A>(kQueries * stride_);
    const int64_t rounded = kRounds ? kQueries * stride_ : 0;
    p_columns_ = arena_.take<E>(rounded);
    ds_columns_ = arena_.take<E>(rounded);
    ds_rows_ = arena_.take<E>(rounded);
    dq_ = arena_.take<A>(kQueries * shape_.width);
    lse2_ = arena_.take<A>(kQueries);
  }

  int64_t bytes() const { return arena_.used(); }

  void load_keys(Rows<const T> keys, Rows<const T> values) {
    simd_run<PackPanelsTransposed<kGroup>>(keys, shape_.keys, shape_.dim, keys_, shape_.dim_depth);
    simd_run<PackPanelsTransposed<kGroup>>(values, shape_.keys, shape_.dim, values_, shape_.dim_depth);
    simd_run<PackPanels<kGroup>>(keys, shape_.keys, shape_.dim, key_rows_, shape_.key_depth);
    const int64_t sums = round_up(shape_.keys, kTileRows) * shape_.width;
    std::fill_n(dk_, sums, A(0));
    std::fill_n(dv_, sums, A(0));
  }

  // Writes dq. Rows with an lse of -inf contribute nothing.
  template <typename R>
  void head(Rows<const T> queries, const Visible& visible, Rows<const T> grad_out, const A* lse,
            const A* delta, Rows<R> dq) {
    for (int64_t query = 0; query < visible.queries; query += kQueries) {
      const int64_t rows = std::min(kQueries, visible.queries - query);
      const Visible block = visible.from(query, rows);
      const Hulls hulls(block);
      if (hulls.any.empty()) continue;
      load_side(q_, queries.from(query), rows);
      load_side(g_, grad_out.from(query), rows);
      constexpr A kInfinity = std::numeric_limits<A>::infinity();
      for (int64_t i = 0; i < rows; ++i) {
        const A base_e = lse[query + i];
        lse2_[i] = base_e == -kInfinity ? kInfinity : base_e * static_cast<A>(kLog2E);  // P = 2^-inf = 0
      }
      std::fill_n(started_, hulls.tiles, false);
      hulls.for_each_window(
          kKeysBackward, [&](int64_t key, int64_t keys) { window(block, hulls, delta + query, key, keys); });
      for (int64_t t = 0; t < hulls.tiles; ++t) {
        if (hulls.tile[t].empty()) continue;
        const int64_t row = t * kTileRows;
        simd_run<Write>(static_cast<const A*>(dq_ + row * shape_.width), shape_.width, dq.from(query + row),
                        std::min(kTileRows, rows - row), shape_.dim, scale_);
      }
    }
  }

  // Writes the sums over the heads since load_keys() to dk and dv.
  template <typename R>
  void store_keys(Rows<R> dk, Rows<R> dv) {
    simd_run<Write>(static_cast<const A*>(dk_), shape_.width, dk, shape_.keys, shape_.dim, scale_);
    simd_run<Write>(static_cast<const A*>(dv_), shape_.width, dv, shape_.keys, shape_.dim, A(1));
  }

 private:
  // A block of queries or of output gradients, packed as left and as right operand.
  struct Side {
    E *rows, *panels;
  };

  void load_side(Side& side, Rows<const T> in, int64_t rows) {
    simd_run<PackRows>(in, rows, shape_.dim, side.rows, round_up(rows, kTileRows), shape_.dim_depth * kGroup);
    simd_run<PackPanels<kGroup>>(in, rows, shape_.dim, side.panels, kQueries / kGroup);
  }

  void window(const Visible& block, const Hulls& hulls, const A* delta, int64_t key, int64_t keys) {
    multiply_transposed(shape_, q_.rows, hulls, keys_, key, keys, p_, stride_);
    multiply_transposed(shape_, g_.rows, hulls, values_, key, keys, ds_, stride_);
    const E *p = nullptr, *ds = nullptr, *ds_rows = nullptr;
    for (int64_t t = 0; t < hulls.tiles; ++t) {
      const Range seen = hulls.in_window(t, key, keys);
      if (seen.empty()) continue;
      const int64_t row = t * kTileRows, at = row * stride_ + seen.begin;
      const int64_t columns = seen.end - seen.begin, padded = round_up(columns, kPanel);
      simd_run<SoftmaxRowsBackward>(p_ + at, ds_ + at, stride_, std::min(kTileRows, block.queries - row),
                                    block.begin + row, block.end + row, key + seen.begin, columns, padded,
                                    factor_, static_cast<const A*>(lse2_ + row), delta + row);
      if constexpr (kRounds) {
        const int64_t at_columns = row * stride_ + seen.begin * kGroup;
        Operands::round_columns(p_ + at, stride_, kTileRows, padded, p_columns_ + at_columns, nullptr);
        Operands::round_columns(ds_ + at, stride_, kTileRows, padded, ds_columns_ + at_columns,
                                ds_rows_ + at);
      }
    }
    if constexpr (kRounds) {
      p = p_columns_, ds = ds_columns_, ds_rows = ds_rows_;
    } else {
      p = p_, ds = ds_rows = ds_;
    }
    for (int64_t panel = 0; panel < shape_.panels(); ++panel) {
      add_dq(panel, ds_rows, hulls, key, keys);
      add_transposed(dv_, p, g_.panels, panel, block.queries, hulls, key, keys);
      add_transposed(dk_, ds, q_.panels, panel, block.queries, hulls, key, keys);
    }
    for (int64_t t = 0; t < hulls.tiles; ++t) started_[t] |= !hulls.in_window(t, key, keys).empty();
  }

  // dq (+)= dS K
  void add_dq(int64_t panel, const E* ds, const Hulls& hulls, int64_t key, int64_t keys) {
    for (int64_t t = 0; t < hulls.tiles; ++t) {
      const Range seen = hulls.in_window(t, key, keys);
      if (seen.empty()) continue;
      const int64_t row = t * kTileRows;
      Operands::multiply_panel(kTileRows, round_up(seen.end - seen.begin, kGroup) / kGroup,
                               ds + row * stride_ + seen.begin, stride_ / kGroup, 1,
                               key_rows_ + shape_.dim_panel(panel, shape_.key_depth, key + seen.begin),
                               dq_ + row * shape_.width + panel * kPanel, shape_.width,
                               /*accumulate=*/started_[t]);
    }
  }

  // sums += (P or dS)^T times the query or gradient rows that see these keys
  void add_transposed(A* sums, const E* left, const E* right, int64_t panel, int64_t rows, const Hulls& hulls,
                      int64_t key, int64_t keys) {
    right += shape_.dim_panel(panel, kQueries / kGroup, 0);
    sums += key * shape_.width + panel * kPanel;
    const auto add = [&](int64_t j, int64_t columns, int64_t first, int64_t last) {
      const int64_t row = first * kTileRows, depth = std::min(last * kTileRows, rows) - row;
      Operands::multiply_panel(columns, round_up(depth, kGroup) / kGroup, left + row * stride_ + j * kGroup,
                               1, stride_, right + row * kPanel, sums + j * shape_.width, shape_.width, true);
    };
    // Keys that every tile sees are multiplied in one call, the others one tile of keys at a time.
    const Range shared{round_up(std::max<int64_t>(hulls.all.begin - key, 0), kTileRows),
                       std::min(hulls.all.end - key, keys) / kTileRows * kTileRows};
    for (int64_t j = 0; j < keys; j += kTileRows) {
      if (j == shared.begin && !shared.empty()) {
        add(j, shared.end - shared.begin, 0, hulls.tiles);
        j = shared.end - kTileRows;
      } else {
        hulls.for_each_run(key + j, key + std::min(j + kTileRows, keys),
                           [&](int64_t first, int64_t last) { add(j, kTileRows, first, last); });
      }
    }
  }

  S shape_;
  A scale_, factor_;
  Arena arena_;
  int64_t stride_;
  Side q_, g_;
  E *keys_, *values_, *key_rows_, *p_columns_, *ds_columns_, *ds_rows_;
  A *dk_, *dv_, *p_, *ds_, *dq_, *lse2_;
  bool started_[kQueries / kTileRows];  // whether a tile's dq_ is initialized
};

}  // namespace pyruntime::layers::attention
