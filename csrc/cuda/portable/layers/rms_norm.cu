// RMSNorm (Zhang and Sennrich 2019, eq. 4), with or without an addition before it, with the equations of
// csrc/cpu/layers/rms_norm.cpp:
//
//   rstd = 1 / sqrt(mean(x^2) + eps)        y = x * rstd * w
//   dx = rstd * dy * w - x * rstd^3 * mean(dy * w * x) + also        dw = sum over rows of dy * x * rstd
//
// A team of threads has a row: 8 or 32 lanes for heads and other short rows, else the whole block. Each
// thread has the same features of every row, so it sums dw itself. All sums have a fixed order, which depends
// on the sizes alone: neither on the device nor on how rows are aligned.
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / device::kWarpSize;
// Reading a vector element by element takes more registers.
constexpr int forward_blocks(bool aligned) {
  return aligned ? 4 : 2;
}
constexpr int backward_blocks(bool aligned) {
  return aligned ? 2 : 1;
}
constexpr int kHeld = 4;  // vectors of a row that a thread keeps in registers; it reads others again

// dw is summed in parts, one for each block of rows, and the parts in a second launch.
constexpr int64_t kMostParts = 256, kLeastRowsPerPart = 4;
constexpr int kColumns = 32;  // of dw, that a block of the second launch sums
constexpr int kSummands = kThreads / kColumns;

template <class T>
struct Operands {
  const T *x, *weight, *grad, *also;  // also: the residual, or the gradient that is added to dx; or nullptr
  T *out, *summed;                    // out: y or dx
  float *rstd, *parts;
  int64_t rows, rows_per_part;
  int columns;  // below 2^30: a sum of columns fits 32 bits
  float eps;
};

// The vector of a row that begins at a column; zeros behind the row's end. Vectors are the same ones whether
// or not rows are aligned, so that sums have one order.
template <bool kAligned, class T>
PYRUNTIME_DEVICE Vector<T> load_part(const T* row, int column, int columns) {
  if constexpr (kAligned) {
    return load_vector(row + column);
  } else {
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < Vector<T>::kCount; ++e)
      vector.values[e] = column + e < columns ? row[column + e] : round_to<T>(0.0f);
    return vector;
  }
}

template <bool kAligned, class T>
PYRUNTIME_DEVICE void store_part(T* row, int column, int columns, const Vector<T>& vector) {
  if constexpr (kAligned) {
    device::store_global(row + column, bits_of(vector));
  } else {
#pragma unroll
    for (int e = 0; e < Vector<T>::kCount; ++e) {
      if (column + e < columns) row[column + e] = vector.values[e];
    }
  }
}

// The sum of all of a team's values, on each of its threads. of_warps: shared by the block, unused since the
// last barrier.
template <int kTeam>
PYRUNTIME_DEVICE float sum_of_team(float value, float* of_warps) {
  constexpr int kLanes = kTeam < device::kWarpSize ? kTeam : device::kWarpSize;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += device::shuffle_xor(value, mask);
  if constexpr (kTeam == kThreads) {
    if (threadIdx.x % device::kWarpSize == 0) of_warps[threadIdx.x / device::kWarpSize] = value;
    __syncthreads();
    value = of_warps[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) value += of_warps[w];
  }
  return value;
}

// Calls use(p, column) for every vector of a row that this thread has; p counts them.
template <int kTeam, class T, class Use>
PYRUNTIME_DEVICE void for_each_held(int columns, const Use& use) {
  const int first = static_cast<int>(threadIdx.x) % kTeam * Vector<T>::kCount;
#pragma unroll
  for (int p = 0; p < kHeld; ++p) {
    const int column = first + p * kTeam * Vector<T>::kCount;
    if (column < columns) use(p, column);
  }
}

template <int kTeam, class T, class Use>
PYRUNTIME_DEVICE void for_each_left(int columns, const Use& use) {
  if constexpr (kTeam == kThreads) {
    constexpr int kStep = kTeam * Vector<T>::kCount;
    const int first = static_cast<int>(threadIdx.x) * Vector<T>::kCount;
#pragma unroll 1
    for (int column = first + kHeld * kStep; column < columns; column += kStep) use(column);
  }
}

// ---- forward ----

// The vector that is normalised: x, or x + the residual, rounded and stored.
template <bool kAligned, class T>
PYRUNTIME_DEVICE Vector<T> normalised_at(const Operands<T>& o, int64_t begin, int column) {
  Vector<T> x = load_part<kAligned>(o.x + begin, column, o.columns);
  if (o.also == nullptr) return x;
  const Vector<T> also = load_part<kAligned>(o.also + begin, column, o.columns);
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e)
    x.values[e] = round_to<T>(to_float(x.values[e]) + to_float(also.values[e]));
  store_part<kAligned>(o.summed + begin, column, o.columns, x);
  return x;
}

template <class T>
PYRUNTIME_DEVICE void add_squares(float& squares, const Vector<T>& x) {
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) squares += to_float(x.values[e]) * to_float(x.values[e]);
}

template <bool kAligned, class T>
PYRUNTIME_DEVICE void store_scaled(const Operands<T>& o, int64_t begin, int column, Vector<T> x,
                                   float scale) {
  const Vector<T> weight = load_part<kAligned>(o.weight, column, o.columns);
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e)
    x.values[e] = round_to<T>(to_float(x.values[e]) * scale * to_float(weight.values[e]));
  store_part<kAligned>(o.out + begin, column, o.columns, x);
}

template <class T, int kTeam, bool kAligned>
PYRUNTIME_KERNEL(kThreads, forward_blocks(kAligned))
norm_rows(PYRUNTIME_PARAMETER Operands<T> parameter) {
  constexpr int kTeams = kThreads / kTeam;
  const Operands<T>& o = device::first_parameter(parameter);
  PYRUNTIME_SHARED(shared);
  float* const of_rows = reinterpret_cast<float*>(shared);  // two rows' sums, used in turns
  float* of_warps = of_rows;
  // All lanes of a warp take every turn, because they exchange sums.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTeams; first < o.rows;
       first += static_cast<int64_t>(gridDim.x) * kTeams) {
    const int64_t row = first + threadIdx.x / kTeam, begin = row * o.columns;
    const int columns = row < o.rows ? o.columns : 0;
    Vector<T> held[kHeld];
    float squares = 0;
    for_each_held<kTeam, T>(columns, [&](int p, int column) {
      held[p] = normalised_at<kAligned>(o, begin, column);
      add_squares(squares, held[p]);
    });
    for_each_left<kTeam, T>(
        columns, [&](int column) { add_squares(squares, normalised_at<kAligned>(o, begin, column)); });
    squares = sum_of_team<kTeam>(squares, of_warps);
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(o.columns) + o.eps);
    for_each_held<kTeam, T>(
        columns, [&](int p, int column) { store_scaled<kAligned>(o, begin, column, held[p], scale); });
    const T* again = (o.also == nullptr ? o.x : o.summed) + begin;
    for_each_left<kTeam, T>(columns, [&](int column) {
      store_scaled<kAligned>(o, begin, column, load_part<kAligned>(again, column, o.columns), scale);
    });
    if (columns > 0 && threadIdx.x % kTeam == 0) o.rstd[row] = scale;
    of_warps = of_warps == of_rows ? of_rows + kWarps : of_rows;
  }
}

// ---- backward ----

template <class T>
PYRUNTIME_DEVICE void add_products(float& dot, const Vector<T>& grad, const Vector<T>& weight,
                                   const Vector<T>& x) {
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e)
    dot += to_float(grad.values[e]) * to_float(weight.values[e]) * to_float(x.values[e]);
}

// Stores a vector of dx, and adds that of dw to `sums`.
template <bool kAligned, class T>
PYRUNTIME_DEVICE void store_gradient(const Operands<T>& o, int64_t begin, int column, const Vector<T>& grad,
                                     const Vector<T>& x, float scale, float along_x,
                                     float (&sums)[Vector<T>::kCount]) {
  const Vector<T> weight = load_part<kAligned>(o.weight, column, o.columns);
  float dx[Vector<T>::kCount];
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) {
    const float value = to_float(x.values[e]), scaled = to_float(grad.values[e]) * scale;
    sums[e] += scaled * value;
    dx[e] = scaled * to_float(weight.values[e]) - value * along_x;
  }
  if (o.also != nullptr) {
    const Vector<T> also = load_part<kAligned>(o.also + begin, column, o.columns);
#pragma unroll
    for (int e = 0; e < Vector<T>::kCount; ++e) dx[e] += to_float(also.values[e]);
  }
  Vector<T> rounded;
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) rounded.values[e] = round_to<T>(dx[e]);
  store_part<kAligned>(o.out + begin, column, o.columns, rounded);
}

// Adds a vector of dw to this block's part, which no other thread touches; the first row writes it.
template <bool kAligned, class T>
PYRUNTIME_DEVICE void add_to_part(const Operands<T>& o, int column, bool is_first,
                                  const float (&sums)[Vector<T>::kCount]) {
  float* part = o.parts + static_cast<int64_t>(blockIdx.x) * o.columns + column;
#pragma unroll
  for (int e = 0; e < Vector<T>::kCount; ++e) {
    if (kAligned || column + e < o.columns) part[e] = is_first ? sums[e] : part[e] + sums[e];
  }
}

// Writes this block's part of dw from what its threads have in registers.
template <int kTeam, bool kAligned, class T>
PYRUNTIME_DEVICE void store_parts(const Operands<T>& o, const float (&sums)[kHeld][Vector<T>::kCount],
                                  float* of_teams) {
  if constexpr (kTeam == kThreads) {
    for_each_held<kTeam, T>(
        o.columns, [&](int p, int column) { add_to_part<kAligned>(o, column, /*is_first=*/true, sums[p]); });
  } else {
    const int columns = o.columns;
    float* const own = of_teams + static_cast<int>(threadIdx.x) / kTeam * columns;
    for_each_held<kTeam, T>(columns, [&](int p, int column) {
#pragma unroll
      for (int e = 0; e < Vector<T>::kCount; ++e) {
        if (kAligned || column + e < columns) own[column + e] = sums[p][e];
      }
    });
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += kThreads) {
      float sum = 0;
      for (int team = 0; team < kThreads / kTeam; ++team) sum += of_teams[team * columns + column];
      o.parts[static_cast<int64_t>(blockIdx.x) * o.columns + column] = sum;
    }
  }
}

template <class T, int kTeam, bool kAligned>
PYRUNTIME_KERNEL(kThreads, backward_blocks(kAligned))
norm_gradients(PYRUNTIME_PARAMETER Operands<T> parameter) {
  constexpr int kTeams = kThreads / kTeam, kCount = Vector<T>::kCount;
  const Operands<T>& o = device::first_parameter(parameter);
  PYRUNTIME_SHARED(shared);
  float* const of_rows = reinterpret_cast<float*>(shared);
  float* of_warps = of_rows;
  float sums[kHeld][kCount];
#pragma unroll
  for (int p = 0; p < kHeld; ++p) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[p][e] = 0;
  }
  const int64_t from = static_cast<int64_t>(blockIdx.x) * o.rows_per_part, until = from + o.rows_per_part;
  const int64_t end = until < o.rows ? until : o.rows;
  for (int64_t first = from; first < end; first += kTeams) {
    const int64_t row = first + threadIdx.x / kTeam, begin = row * o.columns;
    const int columns = row < end ? o.columns : 0;
    Vector<T> grad[kHeld], x[kHeld];
    float dot = 0;
    for_each_held<kTeam, T>(columns, [&](int p, int column) {
      grad[p] = load_part<kAligned>(o.grad + begin, column, o.columns);
      x[p] = load_part<kAligned>(o.x + begin, column, o.columns);
      add_products(dot, grad[p], load_part<kAligned>(o.weight, column, o.columns), x[p]);
    });
    for_each_left<kTeam, T>(columns, [&](int column) {
      add_products(dot, load_part<kAligned>(o.grad + begin, column, o.columns),
                   load_part<kAligned>(o.weight, column, o.columns),
                   load_part<kAligned>(o.x + begin, column, o.columns));
    });
    dot = sum_of_team<kTeam>(dot, of_warps);
    const float scale = columns > 0 ? o.rstd[row] : 0.0f;
    const float along_x = scale * scale * scale * dot / static_cast<float>(o.columns);
    for_each_held<kTeam, T>(columns, [&](int p, int column) {
      store_gradient<kAligned>(o, begin, column, grad[p], x[p], scale, along_x, sums[p]);
    });
    for_each_left<kTeam, T>(columns, [&](int column) {
      float of_row[kCount] = {};
      store_gradient<kAligned>(o, begin, column, load_part<kAligned>(o.grad + begin, column, o.columns),
                               load_part<kAligned>(o.x + begin, column, o.columns), scale, along_x, of_row);
      add_to_part<kAligned>(o, column, first == from, of_row);
    });
    of_warps = of_warps == of_rows ? of_rows + kWarps : of_rows;
  }
  store_parts<kTeam, kAligned>(o, sums, of_rows);
}

template <class T>
struct Parts {
  const float* parts;
  T* dweight;
  int64_t count, columns;
};

// dw: each thread sums every kSummands-th part of a column, and one of them their sums.
template <class T>
PYRUNTIME_KERNEL(kThreads, 4)
sum_parts(PYRUNTIME_PARAMETER Parts<T> parameter) {
  const Parts<T>& p = device::first_parameter(parameter);
  PYRUNTIME_SHARED(shared);
  float* const sums = reinterpret_cast<float*>(shared);
  const int place = static_cast<int>(threadIdx.x) % kColumns,
            first = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + place;
  float sum = 0;
  if (column < p.columns) {
#pragma unroll 4
    for (int64_t part = first; part < p.count; part += kSummands) sum += p.parts[part * p.columns + column];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (first != 0 || column >= p.columns) return;
#pragma unroll
  for (int s = 1; s < kSummands; ++s) sum += sums[s * kColumns + place];
  p.dweight[column] = round_to<T>(sum);
}

// ---- launchers ----

template <int kTeam>
struct Team {
  static constexpr int kSize = kTeam;
};

// Calls use(Team<n>{}) with the smallest team that keeps a row in registers, else with the block.
template <class T, class Use>
void with_team(int64_t columns, const Use& use) {
  const int64_t vectors = (columns + Vector<T>::kCount - 1) / Vector<T>::kCount;
  if (vectors <= kHeld * 8) return use(Team<8>{});
  if (vectors <= kHeld * 32) return use(Team<32>{});
  use(Team<kThreads>{});
}

template <class T>
int teams_for(int64_t columns) {
  int teams = 1;
  with_team<T>(columns, [&](auto team) { teams = kThreads / decltype(team)::kSize; });
  return teams;
}

// Depends on the sizes alone, so that every device has the same parts.
template <class T>
int64_t rows_per_part(int64_t rows, int64_t columns) {
  const int64_t teams = teams_for<T>(columns), even = (rows + kMostParts - 1) / kMostParts;
  const int64_t least = even > kLeastRowsPerPart ? even : kLeastRowsPerPart;
  return (least + teams - 1) / teams * teams;
}

template <class T>
int64_t parts_of(int64_t rows, int64_t columns) {
  const int64_t per_part = rows_per_part<T>(rows, columns);
  return rows > 0 ? (rows + per_part - 1) / per_part : 1;
}

template <class T>
Operands<T> operands_of(const PyruntimeRmsNorm& norm, bool is_backward) {
  Operands<T> o{};
  o.x = static_cast<const T*>(norm.x);
  o.weight = static_cast<const T*>(norm.weight);
  o.grad = is_backward ? static_cast<const T*>(norm.y) : nullptr;
  o.also = static_cast<const T*>(norm.also);
  o.out = static_cast<T*>(is_backward ? norm.dx : norm.y);
  o.summed = static_cast<T*>(norm.summed);
  o.rstd = norm.rstd;
  o.parts = norm.parts;
  o.rows = norm.rows;
  o.columns = static_cast<int>(norm.columns);
  o.rows_per_part = rows_per_part<T>(norm.rows, norm.columns);
  o.eps = norm.eps;
  return o;
}

template <class T>
bool all_aligned(const Operands<T>& o) {
  bool all = o.columns % Vector<T>::kCount == 0;
  for (const void* p : {static_cast<const void*>(o.x), static_cast<const void*>(o.weight),
                        static_cast<const void*>(o.grad), static_cast<const void*>(o.also),
                        static_cast<const void*>(o.out), static_cast<const void*>(o.summed)})
    all = all && is_aligned(p);
  return all;
}

template <class T, int kTeam, bool kAligned>
void launch_forward(const Operands<T>& o, void* stream) {
  constexpr int kTeams = kThreads / kTeam;
  const auto kernel = norm_rows<T, kTeam, kAligned>;
  const int blocks = blocks_for((o.rows + kTeams - 1) / kTeams, 0, forward_blocks(kAligned));
  PYRUNTIME_LAUNCH(kernel, blocks, kThreads, 2 * kWarps * sizeof(float), stream, o);
}

template <class T, int kTeam, bool kAligned>
void launch_backward(const Operands<T>& o, T* dweight, void* stream) {
  constexpr int64_t kTeams = kThreads / kTeam;
  const int64_t of_teams = kTeams > 1 ? kTeams * o.columns : 0, of_warps = 2 * kWarps;
  const auto shared = static_cast<int>((of_teams > of_warps ? of_teams : of_warps) * sizeof(float));
  const int64_t count = parts_of<T>(o.rows, o.columns);
  const auto kernel = norm_gradients<T, kTeam, kAligned>;
  PYRUNTIME_LAUNCH(kernel, static_cast<int>(count), kThreads, shared, stream, o);
  const Parts<T> parts{o.parts, dweight, count, o.columns};
  const auto sum = sum_parts<T>;
  PYRUNTIME_LAUNCH(sum, static_cast<int>((o.columns + kColumns - 1) / kColumns), kThreads,
                   kThreads * sizeof(float), stream, parts);
}

// Calls use(operands, team, aligned) with the types of a kernel's instance.
template <class T, class Use>
void with_instance(const PyruntimeRmsNorm& norm, bool is_backward, const Use& use) {
  const Operands<T> o = operands_of<T>(norm, is_backward);
  with_team<T>(o.columns, [&](auto team) {
    if (all_aligned(o)) return use(o, team, std::true_type{});
    use(o, team, std::false_type{});
  });
}

void check_norm(const PyruntimeRmsNorm* norm) {
  require(norm != nullptr, "the operands are a null pointer.");
  check_dtype(norm->dtype, /*with_fp32=*/true);
  require(norm->rows >= 0 && norm->columns > 0 && norm->columns < 1 << 30, "rows=", norm->rows,
          ", columns=", norm->columns, "; rows must not be negative, and columns from 1 to 2^30.");
  if (norm->rows == 0) return;
  require(norm->x != nullptr && norm->weight != nullptr && norm->y != nullptr && norm->rstd != nullptr,
          "one of x, weight, y and rstd is a null pointer.");
}

}  // namespace

int pyruntime_rms_norm(const PyruntimeRmsNorm* norm, void* stream) {
  return guarded("rms_norm", [&] {
    check_norm(norm);
    if (norm->rows == 0) return;
    require((norm->also == nullptr) == (norm->summed == nullptr),
            "of the residual and its sum with x, one is a null pointer; give both or neither.");
    with_element(norm->dtype, [&](auto element) {
      using T = decltype(element);
      with_instance<T>(*norm, false, [&](const Operands<T>& o, auto team, auto aligned) {
        launch_forward<T, decltype(team)::kSize, decltype(aligned)::value>(o, stream);
      });
    });
  });
}

int64_t pyruntime_rms_norm_parts(int32_t dtype, int64_t rows, int64_t columns) {
  return dtype == PYRUNTIME_FP32 ? parts_of<float>(rows, columns) : parts_of<Bf16>(rows, columns);
}

int pyruntime_rms_norm_backward(const PyruntimeRmsNorm* norm, void* stream) {
  return guarded("rms_norm_backward", [&] {
    check_norm(norm);
    require(norm->dweight != nullptr, "dweight is a null pointer.");
    if (norm->rows == 0) {
      const int64_t bytes = norm->columns * element_bytes(norm->dtype);
      return runtime::set_zero(norm->dweight, bytes, static_cast<runtime::Stream>(stream));
    }
    require(norm->dx != nullptr && norm->parts != nullptr, "one of dx and parts is a null pointer.");
    with_element(norm->dtype, [&](auto element) {
      using T = decltype(element);
      with_instance<T>(*norm, true, [&](const Operands<T>& o, auto team, auto aligned) {
        auto* dweight = static_cast<T*>(norm->dweight);
        launch_backward<T, decltype(team)::kSize, decltype(aligned)::value>(o, dweight, stream);
      });
    });
  });
}
