#pragma once

// Causal attention of the query heads that share one key/value head, on one thread.
//
// Queries are taken kQueries at a time and see keys kKeys at a time, from the first to their own; products
// are those of tile.h, so that of the triangle's edge only what lies beyond it by less than a tile is
// computed. Keys and values are brought into the layout of the products once for all query heads. Softmax is
// online (Milakov and Gimelshein 2018; Dao 2023, algorithm 1) and in base 2: with c = scale log2(e), the
// largest of the scaled scores m and their sum l,
//
//   S = Q K^T      P = 2^(c S - m)      O = P V / l      lse = (m + log2 l) ln 2
//
// and backward (Dao 2023, algorithm 2), where delta = rowsum(dO * O),
//
//   P = 2^(c S - lse log2 e)      dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)
//   dQ = scale dS K      dK = scale dS^T Q
//
// Scores, statistics and every sum are float32 (float64 for float64). In bfloat16, P and dS are rounded to
// bfloat16 to be multiplied, where the CPU multiplies bfloat16; otherwise nothing is rounded before the
// results.

#include <limits>
#include <type_traits>

#include "tile.h"

namespace pyruntime::layers::attention {

constexpr int64_t kQueries = 64;
constexpr int64_t kKeys = 512;          // forward
constexpr int64_t kKeysBackward = 256;  // two more matrices of this width have to stay in the cache

constexpr double kLog2E = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

PYRUNTIME_INLINE int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

PYRUNTIME_INLINE int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// ---- exponential ----

// 2^x to 1e-7 for x < 128; 0 below x = -126.5; NaN stays NaN.
PYRUNTIME_INLINE float exp2_of(float x) {
  x = x < -127.0f ? -127.0f : x;
  const float round_to_integer = 12582912.0f;  // 1.5 * 2^23, as in fast_exp
  const float shifted = x + round_to_integer;
  const float r = x - (shifted - round_to_integer);
  // Minimax polynomial of 2^r for |r| <= 1/2, relative error 9.1e-8 (derived: reweighted least squares).
  float p = 1.32647270e-3f;
  p = p * r + 9.67151265e-3f;
  p = p * r + 5.55073374e-2f;
  p = p * r + 2.40222421e-1f;
  p = p * r + 6.93146978e-1f;
  p = p * r + 1.0f;
  return p * bits_float((float_bits(shifted) + 127u) << 23);
}

PYRUNTIME_INLINE double exp2_of(double x) {
  return std::exp2(x);
}

// ---- layouts ----

// Rows of a head: [rows, dim] with contiguous columns.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

template <typename To, typename From>
PYRUNTIME_INLINE void convert(To& to, const From& from) {
  if constexpr (!std::is_same_v<To, From>) {
    store(to, load(from));
  } else if constexpr (std::is_arithmetic_v<To>) {
    to = from;
  } else {
    to.x = from.x;  // (the assignment of the whole class is not vectorised)
  }
}

// [rows, columns] -> an operand read along its rows, [rows_padded][round_up(columns, group)].
struct PackRows {
  template <typename T, typename E>
  static PYRUNTIME_INLINE void run(Rows<T> in, int64_t rows, int64_t columns, E* out, int64_t rows_padded,
                                   int64_t width) {
    for (int64_t row = 0; row < rows_padded; ++row, out += width) {
      const int64_t filled = row < rows ? columns : 0;
      const T* from = in.data + row * in.stride;
      if constexpr (std::is_same_v<std::remove_const_t<T>, E>) {
        std::memcpy(out, from, filled * sizeof(E));
      } else {
        PYRUNTIME_SIMD
        for (int64_t j = 0; j < filled; ++j) convert(out[j], from[j]);
      }
      for (int64_t j = filled; j < width; ++j) out[j] = E(0);
    }
  }
};

// [rows, columns] -> panels [columns / kPanel][depth][kPanel][Group] whose depth runs along the rows.
template <int64_t Group>
struct PackPanels {
  template <typename T, typename E>
  static PYRUNTIME_INLINE void run(Rows<T> in, int64_t rows, int64_t columns, E* out, int64_t depth) {
    for (int64_t column = 0; column < columns; column += kPanel) {
      const int64_t filled = columns - column < kPanel ? columns - column : kPanel;
      for (int64_t k = 0; k < depth; ++k, out += kPanel * Group) {
        const T* from = in.data + k * Group * in.stride + column;
        if (filled < kPanel || (k + 1) * Group > rows) {
          for (int64_t j = 0; j < kPanel; ++j) {
            for (int64_t t = 0; t < Group; ++t) {
              if (j < filled && k * Group + t < rows) {
                convert(out[j * Group + t], from[t * in.stride + j]);
              } else {
                out[j * Group + t] = E(0);
              }
            }
          }
        } else if constexpr (Group == 1) {
          PYRUNTIME_SIMD
          for (int64_t j = 0; j < kPanel; ++j) convert(out[j], from[j]);
        } else {
          const T* next = from + in.stride;
          PYRUNTIME_SIMD
          for (int64_t j = 0; j < kPanel; ++j) {
            convert(out[2 * j], from[j]);
            convert(out[2 * j + 1], next[j]);
          }
        }
      }
    }
  }
};

// [rows, columns] -> panels [rows / kPanel][depth][kPanel][Group] of the transpose: depth along the columns.
template <int64_t Group>
struct PackPanelsTransposed {
  template <typename T, typename E>
  static PYRUNTIME_INLINE void run(Rows<T> in, int64_t rows, int64_t columns, E* out, int64_t depth) {
    for (int64_t row = 0; row < rows; row += kPanel, out += depth * kPanel * Group) {
      for (int64_t j = 0; j < kPanel; ++j) {
        const T* from = in.data + (row + j) * in.stride;
        E* to = out + j * Group;
        // Whole groups, then the rest of the last one.
        const int64_t filled = row + j < rows ? columns : 0, whole = filled / Group;
        for (int64_t k = 0; k < whole; ++k, to += kPanel * Group, from += Group) {
          if constexpr (std::is_same_v<std::remove_const_t<T>, E>) {
            std::memcpy(to, from, Group * sizeof(E));
          } else {
            for (int64_t t = 0; t < Group; ++t) convert(to[t], from[t]);
          }
        }
        for (int64_t k = whole; k < depth; ++k, to += kPanel * Group) {
          for (int64_t t = 0; t < Group; ++t) {
            if (k * Group + t < filled) {
              convert(to[t], from[t]);
            } else {
              to[t] = E(0);
            }
          }
        }
      }
    }
  }
};

// ---- softmax ----

// Rows first_row .. first_row + rows of scores, of which row i sees `seen + i` columns at most: scores become
// probabilities up to `width`, zero where they are not seen. m and l are the rows' running maximum and sum;
// `rescale` is what earlier results have to be multiplied by. Padding rows, up to kTileRows, become zero.
struct SoftmaxRows {
  template <typename A>
  static PYRUNTIME_INLINE void run(A* scores, int64_t stride, int64_t rows, int64_t seen, int64_t columns,
                                   int64_t width, A factor, A* m, A* l, A* rescale) {
    for (int64_t i = 0; i < kTileRows; ++i, scores += stride) {
      int64_t valid = 0;
      if (i < rows) {
        valid = clamp(seen + i, 0, columns);
        A largest = m[i];
        PYRUNTIME_SIMD_REDUCE(max, largest)
        for (int64_t j = 0; j < valid; ++j) {
          const A scaled = scores[j] * factor;
          largest = scaled > largest ? scaled : largest;
        }
        A sum = 0;
        PYRUNTIME_SIMD_REDUCE(+, sum)
        for (int64_t j = 0; j < valid; ++j) {
          const A p = exp2_of(scores[j] * factor - largest);
          scores[j] = p;
          sum += p;
        }
        rescale[i] = exp2_of(m[i] - largest);
        l[i] = l[i] * rescale[i] + sum;
        m[i] = largest;
      }
      for (int64_t j = valid; j < width; ++j) scores[j] = A(0);
    }
  }
};

// The same rows in the backward: scores become P, and dp becomes dS.
struct SoftmaxRowsBackward {
  template <typename A>
  static PYRUNTIME_INLINE void run(A* scores, A* dp, int64_t stride, int64_t rows, int64_t seen,
                                   int64_t columns, int64_t width, A factor, const A* lse2, const A* delta) {
    for (int64_t i = 0; i < kTileRows; ++i, scores += stride, dp += stride) {
      int64_t valid = 0;
      if (i < rows) {
        valid = clamp(seen + i, 0, columns);
        const A shift = lse2[i], mean = delta[i];
        PYRUNTIME_SIMD
        for (int64_t j = 0; j < valid; ++j) {
          const A p = exp2_of(scores[j] * factor - shift);
          scores[j] = p;
          dp[j] = p * (dp[j] - mean);
        }
      }
      for (int64_t j = valid; j < width; ++j) scores[j] = dp[j] = A(0);
    }
  }
};

// O *= rescale, row by row.
struct RescaleRows {
  template <typename A>
  static PYRUNTIME_INLINE void run(A* out, int64_t stride, int64_t rows, const A* rescale) {
    for (int64_t i = 0; i < rows; ++i, out += stride) {
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < stride; ++j) out[j] *= rescale[i];
    }
  }
};

// Results: factor * in, divided by the row's divisor where there is one.
struct StoreRows {
  template <typename A, typename T>
  static PYRUNTIME_INLINE void run(const A* in, int64_t stride, Rows<T> out, int64_t rows, int64_t columns,
                                   A factor, const A* divisor) {
    for (int64_t i = 0; i < rows; ++i, in += stride) {
      const A scale = divisor ? factor / divisor[i] : factor;
      T* to = out.data + i * out.stride;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) store(to[j], in[j] * scale);
    }
  }
};

struct RowDots {
  template <typename A, typename T>
  static PYRUNTIME_INLINE void run(Rows<T> a, Rows<T> b, int64_t rows, int64_t columns, A* out) {
    for (int64_t i = 0; i < rows; ++i) {
      const T *left = a.data + i * a.stride, *right = b.data + i * b.stride;
      A sum = 0;
      PYRUNTIME_SIMD_REDUCE(+, sum)
      for (int64_t j = 0; j < columns; ++j) sum += A(load(left[j])) * A(load(right[j]));
      out[i] = sum;
    }
  }
};

// ---- scratch ----

// Cuts pieces off one buffer; with no buffer it only counts.
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

// Columns between rows of a scratch matrix; not a power of two, so that a column spreads over the cache's
// sets.
PYRUNTIME_INLINE int64_t scratch_stride(int64_t columns) {
  return round_up(columns, kPanel) + kPanel;
}

// ---- one key/value head ----

struct Sizes {
  int64_t seq, dim;
  double scale;
};

template <typename Operands>
struct Shape {
  using A = typename Operands::accumulate_t;
  using E = typename Operands::element_t;
  static constexpr int64_t kGroup = Operands::group;

  explicit Shape(const Sizes& sizes)
      : seq(sizes.seq),
        dim(sizes.dim),
        width(round_up(dim, kPanel)),
        dim_depth(round_up(dim, kGroup) / kGroup),
        seq_depth(round_up(seq, kGroup) / kGroup) {}

  int64_t panels() const { return width / kPanel; }
  int64_t key_panel(int64_t key) const { return key / kPanel * dim_depth * kPanel * kGroup; }
  int64_t dim_panel(int64_t panel, int64_t depth, int64_t from) const {
    return (panel * depth + from / kGroup) * kPanel * kGroup;
  }

  int64_t seq, dim;
  int64_t width;      // dim, padded to whole panels
  int64_t dim_depth;  // depths of products that run over dim and over the sequence
  int64_t seq_depth;
};

// Columns key .. key + keys of a product with the transposed keys or values, for the rows of a query block
// that begins at row `query`; per panel of columns, rows that see none of it are left out.
template <typename Operands>
void multiply_transposed(const Shape<Operands>& shape, const typename Operands::element_t* rows,
                         int64_t rows_padded, int64_t query, const typename Operands::element_t* panels,
                         int64_t key, int64_t keys, typename Operands::accumulate_t* out, int64_t stride) {
  constexpr int64_t kGroup = Operands::group;
  for (int64_t column = 0; column < keys; column += kPanel) {
    const int64_t first = clamp(key + column - query, 0, rows_padded) / kTileRows * kTileRows;
    Operands::multiply_panel(rows_padded - first, shape.dim_depth, rows + first * shape.dim_depth * kGroup,
                             shape.dim_depth, 1, panels + shape.key_panel(key + column),
                             out + first * stride + column, stride, /*accumulate=*/false);
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
    keys_ = arena_.take<E>(round_up(shape_.seq, kPanel) * shape_.dim_depth * kGroup);
    values_ = arena_.take<E>(shape_.seq_depth * shape_.width * kGroup);
    queries_ = arena_.take<E>(kQueries * shape_.dim_depth * kGroup);
    stride_ = scratch_stride(std::min(kKeys, shape_.seq));
    scores_ = arena_.take<A>(kQueries * stride_);
    rounded_ = arena_.take<E>(kRounds ? kTileRows * stride_ : 0);
    sums_ = arena_.take<A>(kQueries * shape_.width);
    m_ = arena_.take<A>(kQueries);
    l_ = arena_.take<A>(kQueries);
    rescale_ = arena_.take<A>(kQueries);
  }

  int64_t bytes() const { return arena_.used(); }

  void load_keys(Rows<const T> keys, Rows<const T> values) {
    simd_run<PackPanelsTransposed<kGroup>>(keys, shape_.seq, shape_.dim, keys_, shape_.dim_depth);
    simd_run<PackPanels<kGroup>>(values, shape_.seq, shape_.dim, values_, shape_.seq_depth);
  }

  void head(Rows<const T> queries, Rows<T> out, A* lse) {
    for (int64_t query = 0; query < shape_.seq; query += kQueries) {
      const int64_t rows = std::min(kQueries, shape_.seq - query);
      block(queries.from(query), query, rows);
      simd_run<StoreRows>(static_cast<const A*>(sums_), shape_.width, out.from(query), rows, shape_.dim, A(1),
                          static_cast<const A*>(l_));
      for (int64_t i = 0; i < rows; ++i) {
        lse[query + i] = static_cast<A>((m_[i] + std::log2(l_[i])) * static_cast<A>(kLn2));
      }
    }
  }

 private:
  void block(Rows<const T> queries, int64_t query, int64_t rows) {
    const int64_t rows_padded = round_up(rows, kTileRows);
    simd_run<PackRows>(queries, rows, shape_.dim, queries_, rows_padded, shape_.dim_depth * kGroup);
    std::fill_n(m_, kQueries, -std::numeric_limits<A>::infinity());
    std::fill_n(l_, kQueries, A(0));
    for (int64_t key = 0; key < query + rows; key += kKeys) {
      const int64_t keys = std::min(kKeys, query + rows - key);
      multiply_transposed(shape_, queries_, rows_padded, query, keys_, key, keys, scores_, stride_);
      for (int64_t row = 0; row < rows_padded; row += kTileRows) {
        attend(query + row, std::min(kTileRows, rows - row), row, key, keys);
      }
    }
  }

  // One tile of rows against keys key .. key + keys; `row` is its place in the block.
  void attend(int64_t query, int64_t rows, int64_t row, int64_t key, int64_t keys) {
    A *scores = scores_ + row * stride_, *sums = sums_ + row * shape_.width;
    const int64_t seen = std::min(keys, query + rows - key), padded = round_up(seen, kPanel);
    simd_run<SoftmaxRows>(scores, stride_, rows, query + 1 - key, keys, padded, factor_, m_ + row, l_ + row,
                          rescale_ + row);
    if (key > 0) {
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
      Operands::multiply_panel(kTileRows, round_up(seen, kGroup) / kGroup, probabilities, stride_ / kGroup, 1,
                               values_ + shape_.dim_panel(panel, shape_.seq_depth, key),
                               sums + panel * kPanel, shape_.width, /*accumulate=*/key > 0);
    }
  }

  S shape_;
  A factor_;
  Arena arena_;
  int64_t stride_;
  E *keys_, *values_, *queries_, *rounded_;
  A *scores_, *sums_, *m_, *l_, *rescale_;
};

template <typename Operands, typename T>
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
    const int64_t transposed = round_up(shape_.seq, kPanel) * shape_.dim_depth * kGroup;
    keys_ = arena_.take<E>(transposed);
    values_ = arena_.take<E>(transposed);
    key_rows_ = arena_.take<E>(shape_.seq_depth * shape_.width * kGroup);
    dk_ = arena_.take<A>(round_up(shape_.seq, kTileRows) * shape_.width);
    dv_ = arena_.take<A>(round_up(shape_.seq, kTileRows) * shape_.width);
    for (Side* side : {&q_, &g_}) {
      side->rows = arena_.take<E>(kQueries * shape_.dim_depth * kGroup);
      side->panels = arena_.take<E>(kQueries * shape_.width);
    }
    stride_ = scratch_stride(std::min(kKeysBackward, shape_.seq));
    p_ = arena_.take<A>(kQueries * stride_);
    ds_ = arena_.take<A>(kQueries * stride_);
    const int64_t rounded = kRounds ? kQueries * stride_ : 0;
    p_columns_ = arena_.take<E>(rounded);
    ds_columns_ = arena_.take<E>(rounded);
    ds_rows_ = arena_.take<E>(rounded);
    dq_ = arena_.take<A>(kQueries * shape_.width);
    lse2_ = arena_.take<A>(kQueries);
    delta_ = arena_.take<A>(kQueries);
  }

  int64_t bytes() const { return arena_.used(); }

  void load_keys(Rows<const T> keys, Rows<const T> values) {
    simd_run<PackPanelsTransposed<kGroup>>(keys, shape_.seq, shape_.dim, keys_, shape_.dim_depth);
    simd_run<PackPanelsTransposed<kGroup>>(values, shape_.seq, shape_.dim, values_, shape_.dim_depth);
    simd_run<PackPanels<kGroup>>(keys, shape_.seq, shape_.dim, key_rows_, shape_.seq_depth);
    const int64_t sums = round_up(shape_.seq, kTileRows) * shape_.width;
    std::fill_n(dk_, sums, A(0));
    std::fill_n(dv_, sums, A(0));
  }

  void head(Rows<const T> queries, Rows<const T> grad_out, Rows<const T> out, const A* lse, Rows<T> dq) {
    for (int64_t query = 0; query < shape_.seq; query += kQueries) {
      const int64_t rows = std::min(kQueries, shape_.seq - query);
      load_side(q_, queries.from(query), rows);
      load_side(g_, grad_out.from(query), rows);
      simd_run<RowDots>(grad_out.from(query), out.from(query), rows, shape_.dim, delta_);
      for (int64_t i = 0; i < rows; ++i) lse2_[i] = lse[query + i] * static_cast<A>(kLog2E);
      for (int64_t key = 0; key < query + rows; key += kKeysBackward) {
        block(query, rows, key, std::min(kKeysBackward, query + rows - key));
      }
      simd_run<StoreRows>(static_cast<const A*>(dq_), shape_.width, dq.from(query), rows, shape_.dim, scale_,
                          static_cast<const A*>(nullptr));
    }
  }

  void store_keys(Rows<T> dk, Rows<T> dv) {
    const A* none = nullptr;
    simd_run<StoreRows>(static_cast<const A*>(dk_), shape_.width, dk, shape_.seq, shape_.dim, scale_, none);
    simd_run<StoreRows>(static_cast<const A*>(dv_), shape_.width, dv, shape_.seq, shape_.dim, A(1), none);
  }

 private:
  // A block of queries or of output gradients, as the left and as the right side of a product.
  struct Side {
    E *rows, *panels;
  };

  void load_side(Side& side, Rows<const T> in, int64_t rows) {
    simd_run<PackRows>(in, rows, shape_.dim, side.rows, round_up(rows, kTileRows), shape_.dim_depth * kGroup);
    simd_run<PackPanels<kGroup>>(in, rows, shape_.dim, side.panels, kQueries / kGroup);
  }

  void block(int64_t query, int64_t rows, int64_t key, int64_t keys) {
    const int64_t rows_padded = round_up(rows, kTileRows), padded = round_up(keys, kPanel);
    multiply_transposed(shape_, q_.rows, rows_padded, query, keys_, key, keys, p_, stride_);
    multiply_transposed(shape_, g_.rows, rows_padded, query, values_, key, keys, ds_, stride_);
    const E *p = nullptr, *ds = nullptr, *ds_rows = nullptr;
    for (int64_t row = 0; row < rows_padded; row += kTileRows) {
      const int64_t at = row * stride_;
      simd_run<SoftmaxRowsBackward>(p_ + at, ds_ + at, stride_, std::min(kTileRows, rows - row),
                                    query + row + 1 - key, keys, padded, factor_,
                                    static_cast<const A*>(lse2_ + row), static_cast<const A*>(delta_ + row));
      if constexpr (kRounds) {
        Operands::round_columns(p_ + at, stride_, kTileRows, padded, p_columns_ + at, nullptr);
        Operands::round_columns(ds_ + at, stride_, kTileRows, padded, ds_columns_ + at, ds_rows_ + at);
      }
    }
    if constexpr (kRounds) {
      p = p_columns_, ds = ds_columns_, ds_rows = ds_rows_;
    } else {
      p = p_, ds = ds_rows = ds_;
    }
    for (int64_t panel = 0; panel < shape_.panels(); ++panel) {
      add_dq(panel, ds_rows, query, rows, key, keys);
      add_transposed(dv_, p, g_.panels, panel, query, rows, key, keys);
      add_transposed(dk_, ds, q_.panels, panel, query, rows, key, keys);
    }
  }

  // dq (+)= dS K
  void add_dq(int64_t panel, const E* ds, int64_t query, int64_t rows, int64_t key, int64_t keys) {
    const E* right = key_rows_ + shape_.dim_panel(panel, shape_.seq_depth, key);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t seen = std::min(keys, query + row + kTileRows - key);
      Operands::multiply_panel(kTileRows, round_up(seen, kGroup) / kGroup, ds + row * stride_,
                               stride_ / kGroup, 1, right, dq_ + row * shape_.width + panel * kPanel,
                               shape_.width, /*accumulate=*/key > 0);
    }
  }

  // sums += (P or dS)^T times the rows that these keys are seen by
  void add_transposed(A* sums, const E* left, const E* right, int64_t panel, int64_t query, int64_t rows,
                      int64_t key, int64_t keys) {
    const int64_t depth = round_up(rows, kGroup) / kGroup;
    right += shape_.dim_panel(panel, kQueries / kGroup, 0);
    sums += key * shape_.width + panel * kPanel;
    // All rows see the keys before the block.
    const int64_t seen_by_all = clamp(query - key, 0, keys) / kTileRows * kTileRows;
    Operands::multiply_panel(seen_by_all, depth, left, 1, stride_, right, sums, shape_.width, true);
    for (int64_t j = seen_by_all; j < keys; j += kTileRows) {
      const int64_t first = clamp(key + j - query, 0, rows) / kTileRows * kTileRows / kGroup;
      Operands::multiply_panel(kTileRows, depth - first, left + (first * stride_ + j) * kGroup, 1, stride_,
                               right + first * kPanel * kGroup, sums + j * shape_.width, shape_.width, true);
    }
  }

  S shape_;
  A scale_, factor_;
  Arena arena_;
  int64_t stride_;
  Side q_, g_;
  E *keys_, *values_, *key_rows_, *p_columns_, *ds_columns_, *ds_rows_;
  A *dk_, *dv_, *p_, *ds_, *dq_, *lse2_, *delta_;
};

}  // namespace pyruntime::layers::attention
