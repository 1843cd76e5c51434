#pragma once

// Row kernels for attention_kernels.h, run by simd.h: they pack operands into the layouts of tile.h, turn
// scores into probabilities, and read and write results.

#include <type_traits>

#include "tile.h"

namespace pyruntime::layers::attention {

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

// A head's [rows, dim], with contiguous columns.
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
    to.x = from.x;  // assigning the whole class would not be vectorised
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

// Turns a tile of scores, columns origin .. origin + columns, of which row i sees begin[i] .. end[i], into
// probabilities; up to `width` they are zero where not seen. m and l are the rows' running maximum and sum;
// `rescale` receives the factor for earlier results. Padding rows, up to kTileRows, become zero.
struct SoftmaxRows {
  template <typename A>
  static PYRUNTIME_INLINE void run(A* scores, int64_t stride, int64_t rows, const int32_t* begin,
                                   const int32_t* end, int64_t origin, int64_t columns, int64_t width,
                                   A factor, A* m, A* l, A* rescale) {
    for (int64_t i = 0; i < kTileRows; ++i, scores += stride) {
      int64_t first = 0, last = 0;
      if (i < rows) {
        first = clamp(begin[i] - origin, 0, columns), last = clamp(end[i] - origin, first, columns);
        rescale[i] = A(1);
      }
      if (first < last) {
        A largest = m[i];
        PYRUNTIME_SIMD_REDUCE(max, largest)
        for (int64_t j = first; j < last; ++j) {
          const A scaled = scores[j] * factor;
          largest = scaled > largest ? scaled : largest;
        }
        A sum = 0;
        PYRUNTIME_SIMD_REDUCE(+, sum)
        for (int64_t j = first; j < last; ++j) {
          const A p = exp2_of(scores[j] * factor - largest);
          scores[j] = p;
          sum += p;
        }
        rescale[i] = exp2_of(m[i] - largest);
        l[i] = l[i] * rescale[i] + sum;
        m[i] = largest;
      }
      for (int64_t j = 0; j < first; ++j) scores[j] = A(0);
      for (int64_t j = last; j < width; ++j) scores[j] = A(0);
    }
  }
};

// The same for the backward: scores become P, and dp becomes dS.
struct SoftmaxRowsBackward {
  template <typename A>
  static PYRUNTIME_INLINE void run(A* scores, A* dp, int64_t stride, int64_t rows, const int32_t* begin,
                                   const int32_t* end, int64_t origin, int64_t columns, int64_t width,
                                   A factor, const A* lse2, const A* delta) {
    for (int64_t i = 0; i < kTileRows; ++i, scores += stride, dp += stride) {
      int64_t first = 0, last = 0;
      if (i < rows) {
        first = clamp(begin[i] - origin, 0, columns), last = clamp(end[i] - origin, first, columns);
        const A shift = lse2[i], mean = delta[i];
        PYRUNTIME_SIMD
        for (int64_t j = first; j < last; ++j) {
          const A p = exp2_of(scores[j] * factor - shift);
          scores[j] = p;
          dp[j] = p * (dp[j] - mean);
        }
      }
      for (int64_t j = 0; j < first; ++j) scores[j] = dp[j] = A(0);
      for (int64_t j = last; j < width; ++j) scores[j] = dp[j] = A(0);
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

// ---- results ----

// Loads earlier results, padded with zeros to a tile of `width` columns; rows with l = 0 become zero.
struct LoadRows {
  template <typename A, typename T>
  static PYRUNTIME_INLINE void run(Rows<T> in, int64_t rows, int64_t columns, A* out, int64_t width,
                                   const A* l) {
    for (int64_t i = 0; i < kTileRows; ++i, out += width) {
      const int64_t filled = i < rows && l[i] != A(0) ? columns : 0;
      const T* from = in.data + i * in.stride;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < filled; ++j) out[j] = load(from[j]);
      for (int64_t j = filled; j < width; ++j) out[j] = A(0);
    }
  }
};

// out = in / divisor, row by row.
struct DivideRows {
  template <typename A, typename T>
  static PYRUNTIME_INLINE void run(const A* in, int64_t stride, Rows<T> out, int64_t rows, int64_t columns,
                                   const A* divisor) {
    for (int64_t i = 0; i < rows; ++i, in += stride) {
      const A scale = A(1) / divisor[i];
      T* to = out.data + i * out.stride;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) store(to[j], in[j] * scale);
    }
  }
};

// out = factor * in, or out += factor * in if kAdd.
template <bool kAdd>
struct WriteRows {
  template <typename A, typename T>
  static PYRUNTIME_INLINE void run(const A* in, int64_t stride, Rows<T> out, int64_t rows, int64_t columns,
                                   A factor) {
    for (int64_t i = 0; i < rows; ++i, in += stride) {
      T* to = out.data + i * out.stride;
      PYRUNTIME_SIMD
      for (int64_t j = 0; j < columns; ++j) {
        if constexpr (kAdd) {
          store(to[j], load(to[j]) + in[j] * factor);
        } else {
          store(to[j], in[j] * factor);
        }
      }
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

}  // namespace pyruntime::layers::attention
