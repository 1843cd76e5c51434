// Cross-entropy over a shard of the vocabulary, with the equations of csrc/cpu/layers/cross_entropy.cpp. The
// logits are read once for a row's statistics and once for their gradient, which may overwrite them.
//
//   stats_i = (m_i, s_i, t_i) = (max_j l_ij,  sum_j exp(l_ij - m_i),  l_ij where vocab_start + j = label_i)
//   dl_ij   = grad_i * (exp(l_ij - lse_i) - [vocab_start + j = label_i])
//
// One block for each row sums in a fixed order of threads, so every run gives the same bits.
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / device::kWarpSize;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kPacksAtOnce = 4;  // loads that a thread has in flight

// A row, cut so that its middle can be read 16 bytes at a time.
struct Cut {
  int64_t before, packs, after;
};

template <class T>
PYRUNTIME_DEVICE Cut cut_of(const T* row, int64_t columns) {
  constexpr int kCount = Vector<T>::kCount;
  const auto misplaced = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
  const int64_t lead = misplaced == 0 ? 0 : kCount - misplaced, before = lead < columns ? lead : columns;
  const int64_t packs = (columns - before) / kCount;
  return {before, packs, columns - before - packs * kCount};
}

// ---- statistics ----

// The statistics of some logits of a row, by online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
struct Part {
  float highest, sum;
};

// Returns the reference of the exponentials. If every logit is -inf, any finite one gives the sum 0.
PYRUNTIME_DEVICE float reference_of(float highest) {
  return highest == -INFINITY ? 0.0f : highest;
}

PYRUNTIME_DEVICE Part merged(const Part& a, const Part& b) {
  const float highest = a.highest > b.highest ? a.highest : b.highest, reference = reference_of(highest);
  return {highest,
          a.sum * device::fast_exp(a.highest - reference) + b.sum * device::fast_exp(b.highest - reference)};
}

template <int kCount>
PYRUNTIME_DEVICE void add_logits(Part& part, const float (&logits)[kCount]) {
  float highest = part.highest;
#pragma unroll
  for (int e = 0; e < kCount; ++e) highest = logits[e] > highest ? logits[e] : highest;
  const float reference = reference_of(highest);
  float sum = part.sum * device::fast_exp(part.highest - reference);
#pragma unroll
  for (int e = 0; e < kCount; ++e) sum += device::fast_exp(logits[e] - reference);
  part = {highest, sum};
}

template <class T>
PYRUNTIME_DEVICE Part part_of_thread(const T* row, int64_t columns) {
  constexpr int kCount = Vector<T>::kCount, kLogits = kCount * kPacksAtOnce;
  const Cut cut = cut_of(row, columns);
  Part part{-INFINITY, 0.0f};
  float one[1];
  for (int64_t j = threadIdx.x; j < cut.before; j += kThreads) {
    load_floats<1>(row + j, one);
    add_logits(part, one);
  }
  const T* middle = row + cut.before;
  for (int64_t pack = threadIdx.x; pack < cut.packs; pack += kThreads * kPacksAtOnce) {
    Vector<T> loaded[kPacksAtOnce];
#pragma unroll
    for (int p = 0; p < kPacksAtOnce; ++p) {
      const int64_t at = pack + p * kThreads;
      loaded[p] = load_vector(middle + (at < cut.packs ? at : pack) * kCount);
    }
    float logits[kLogits];
#pragma unroll
    for (int p = 0; p < kPacksAtOnce; ++p) {
      const bool there = pack + p * kThreads < cut.packs;
#pragma unroll
      for (int e = 0; e < kCount; ++e)
        logits[p * kCount + e] = there ? to_float(loaded[p].values[e]) : -INFINITY;
    }
    add_logits(part, logits);
  }
  const T* end = middle + cut.packs * kCount;
  for (int64_t j = threadIdx.x; j < cut.after; j += kThreads) {
    load_floats<1>(end + j, one);
    add_logits(part, one);
  }
  return part;
}

template <class T>
struct Statistics {
  const T* logits;
  int64_t pitch, rows, columns;
  const int64_t* labels;
  int64_t vocab_start;
  float* stats;
};

template <class T>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
row_statistics(PYRUNTIME_PARAMETER Statistics<T> parameter) {
  const Statistics<T>& s = device::first_parameter(parameter);
  PYRUNTIME_SHARED(shared);
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  Part* const of_rows = reinterpret_cast<Part*>(shared);  // two, used in turns
  Part* of_warps = of_rows;
  for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
    const T* logits = s.logits + row * s.pitch;
    Part part = part_of_thread(logits, s.columns);
#pragma unroll
    for (int mask = device::kWarpSize / 2; mask > 0; mask /= 2) {
      const Part other{device::shuffle_xor(part.highest, mask), device::shuffle_xor(part.sum, mask)};
      part = merged(part, other);
    }
    if (threadIdx.x % device::kWarpSize == 0) of_warps[warp] = part;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) {
      part = of_warps[0];
      for (int w = 1; w < kWarps; ++w) part = merged(part, of_warps[w]);
      const int64_t target = s.labels[row] - s.vocab_start;
      s.stats[3 * row] = part.highest;
      s.stats[3 * row + 1] = part.sum;
      s.stats[3 * row + 2] = target >= 0 && target < s.columns ? to_float(logits[target]) : 0.0f;
    }
    // Other warps may already write the next row's parts while one thread reads this row's.
    of_warps = of_warps == of_rows ? of_rows + kWarps : of_rows;
  }
}

// ---- gradient ----

template <class T>
struct Gradient {
  const T* logits;
  T* dlogits;
  int64_t pitch, dpitch, rows, columns;
  const int64_t* labels;
  const float *lse, *grad;
  int64_t vocab_start;
};

struct RowOfGradient {
  float lse, scale;
  int64_t target;
};

// Writes the gradients of kCount logits from column j on.
template <int kCount, class T>
PYRUNTIME_DEVICE void gradient_at(const RowOfGradient& row, const T* logits, T* dlogits, int64_t j) {
  float x[kCount];
  load_floats<kCount>(logits + j, x);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const float p = device::fast_exp(x[e] - row.lse);
    x[e] = row.scale * (j + e == row.target ? p - 1.0f : p);
  }
  store_floats<kCount>(dlogits + j, x);
}

template <class T>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
row_gradient(PYRUNTIME_PARAMETER Gradient<T> parameter) {
  constexpr int kCount = Vector<T>::kCount;
  const Gradient<T>& g = device::first_parameter(parameter);
  for (int64_t row = blockIdx.x; row < g.rows; row += gridDim.x) {
    const T* logits = g.logits + row * g.pitch;
    T* dlogits = g.dlogits + row * g.dpitch;
    const RowOfGradient of_row{g.lse[row], g.grad[row], g.labels[row] - g.vocab_start};
    Cut cut = cut_of(dlogits, g.columns);
    const bool alike = (reinterpret_cast<uintptr_t>(logits) - reinterpret_cast<uintptr_t>(dlogits)) % 16 == 0;
    if (!alike) cut = {g.columns, 0, 0};
    const int64_t end = cut.before + cut.packs * kCount;
    if (of_row.scale == 0) {  // an ignored row, whatever its logits are
      for (int64_t j = threadIdx.x; j < cut.before; j += kThreads) dlogits[j] = round_to<T>(0.0f);
      const float zeros[kCount] = {};
      for (int64_t pack = threadIdx.x; pack < cut.packs; pack += kThreads)
        store_floats<kCount>(dlogits + cut.before + pack * kCount, zeros);
      for (int64_t j = end + threadIdx.x; j < g.columns; j += kThreads) dlogits[j] = round_to<T>(0.0f);
      continue;
    }
    for (int64_t j = threadIdx.x; j < cut.before; j += kThreads) gradient_at<1>(of_row, logits, dlogits, j);
    for (int64_t pack = threadIdx.x; pack < cut.packs; pack += kThreads)
      gradient_at<kCount>(of_row, logits, dlogits, cut.before + pack * kCount);
    for (int64_t j = end + threadIdx.x; j < g.columns; j += kThreads)
      gradient_at<1>(of_row, logits, dlogits, j);
  }
}

// ---- launchers ----

void check_logits(const PyruntimeLogits* logits) {
  require(logits != nullptr, "the logits are a null pointer.");
  check_dtype(logits->dtype, /*with_fp32=*/true);
  require(logits->rows >= 0 && logits->columns >= 0, "rows=", logits->rows, ", columns=", logits->columns,
          "; neither may be negative.");
  check_pitch("pitch", logits->pitch, logits->columns);
  require(logits->rows == 0 || logits->labels != nullptr, "labels is a null pointer.");
  require(logits->rows == 0 || logits->columns == 0 || logits->data != nullptr, "data is a null pointer.");
}

}  // namespace

int pyruntime_cross_entropy_stats(const PyruntimeLogits* logits, float* stats, void* stream) {
  return guarded("cross_entropy_stats", [&] {
    check_logits(logits);
    if (logits->rows == 0) return;
    require(stats != nullptr, "stats is a null pointer.");
    const PyruntimeLogits& of = *logits;
    with_element(of.dtype, [&](auto element) {
      using T = decltype(element);
      const Statistics<T> statistics{
          static_cast<const T*>(of.data), of.pitch, of.rows, of.columns, of.labels, of.vocab_start, stats};
      const auto kernel = row_statistics<T>;
      PYRUNTIME_LAUNCH(kernel, blocks_for(of.rows, 0, kBlocksPerMultiprocessor), kThreads,
                       2 * kWarps * sizeof(Part), stream, statistics);
    });
  });
}

int pyruntime_cross_entropy_gradient(const PyruntimeLogits* logits, const float* lse, const float* grad,
                                     void* dlogits, int64_t dpitch, void* stream) {
  return guarded("cross_entropy_gradient", [&] {
    check_logits(logits);
    check_pitch("dpitch", dpitch, logits->columns);
    if (logits->rows == 0 || logits->columns == 0) return;
    require(lse != nullptr && grad != nullptr && dlogits != nullptr,
            "one of lse, grad and dlogits is a null pointer.");
    const PyruntimeLogits& of = *logits;
    with_element(of.dtype, [&](auto element) {
      using T = decltype(element);
      const Gradient<T> gradient{static_cast<const T*>(of.data),
                                 static_cast<T*>(dlogits),
                                 of.pitch,
                                 dpitch,
                                 of.rows,
                                 of.columns,
                                 of.labels,
                                 lse,
                                 grad,
                                 of.vocab_start};
      const auto kernel = row_gradient<T>;
      PYRUNTIME_LAUNCH(kernel, blocks_for(of.rows, 0, kBlocksPerMultiprocessor), kThreads, 0, stream,
                       gradient);
    });
  });
}
