// The fused GEMMs of a group of ranks, with their expected results.
#pragma once

#include "ranks.h"

namespace kernels {

struct Problem {
  int world_size, layout, tiles;
  int64_t m, n, k;
  int pieces = 1;
  bool with_bias = false;
};

inline int64_t shard_rows(const Problem& p, int rank) {
  return pyruntime::rows_of_rank(p.m, p.world_size, rank);
}

inline int64_t shard_begin(const Problem& p, int rank) {
  return pyruntime::ChunkPlan(p.m, p.world_size, rank).own().begin;
}

// ---- all_gather_matmul; `round` seeds the inputs, which all ranks draw alike ----

template <class T>
struct Gather {
  Problem p;
  std::vector<T> whole, weight, bias;

  Gather(const Problem& problem, uint64_t round)
      : p(problem),
        whole(random_values<T>(p.m * padded(p.k), 10 * round)),
        weight(random_values<T>(p.n * p.k, 10 * round + 1)),
        bias(random_values<T>(p.n, 10 * round + 2)) {}

  int64_t lda() const { return padded(p.k); }
  int64_t ldb() const { return p.layout == PYRUNTIME_NT ? p.k : p.n; }
  const T* shard(int rank) const { return whole.data() + shard_begin(p, rank) * lda(); }

  PyruntimeMatmul request(int rank, std::vector<T>& c) const {
    return {dtype_of<T>(),
            p.layout,
            p.tiles,
            p.m,
            p.n,
            p.k,
            shard(rank),
            weight.data(),
            p.with_bias ? bias.data() : nullptr,
            c.data(),
            lda(),
            ldb(),
            p.n,
            0,
            0};
  }

  void check(const std::vector<T>& c) const {
    const Reference reference = product(p.layout, p.m, p.n, p.k, whole.data(), lda(), weight.data(), ldb());
    const auto wanted = [&](int64_t i, int64_t j) {
      return reference.c[i * p.n + j] + (p.with_bias ? to_float(bias[j]) : 0.0f);
    };
    expect_close("the GEMM of gathered rows", c.data(), p.n, p.m, p.n, wanted, [&](int64_t i, int64_t j) {
      return unit<T>() * std::fabs(wanted(i, j)) + 1e-5 * (1 + reference.size[i * p.n + j]);
    });
  }
};

inline PyruntimeWorkspace gather_shape(const Problem& p, int dtype) {
  const int64_t bytes = dtype == PYRUNTIME_FP32 ? 4 : 2;
  return {p.world_size, p.pieces, p.m * padded(p.k) * bytes};
}

// Puts this rank's rows to all others, first to the peer that needs them first, as the device transport does.
template <class T>
void put_rows(const Gather<T>& gather, const PyruntimeGroup& group) {
  const Problem& p = gather.p;
  const int rank = group.rank;
  const int64_t begin = shard_begin(p, rank), row_bytes = gather.lda() * static_cast<int64_t>(sizeof(T));
  const pyruntime::ChunkPlan pieces(shard_rows(p, rank), 1, 0, p.pieces);
  for (int step = 1; step < p.world_size; ++step) {
    const int peer = (rank + p.world_size - step) % p.world_size;
    for (int i = 0; i < p.pieces; ++i) {
      const pyruntime::Chunk piece = pieces.piece(0, i);
      EXPECT_OK(pyruntime_put(&group, gather.shard(rank) + piece.begin * gather.lda(), piece.rows * row_bytes,
                              peer, (begin + piece.begin) * row_bytes, i, 1, nullptr));
    }
  }
  EXPECT_OK(pyruntime_end_puts(&group, nullptr));
}

// ---- matmul_reduce_scatter; every rank draws its own operands ----

template <class T>
struct Scatter {
  Problem p;
  std::vector<std::vector<T>> a, b;  // by rank
  std::vector<T> bias;

  Scatter(const Problem& problem, uint64_t round) : p(problem), bias(random_values<T>(p.n, 1000 * round)) {
    for (int rank = 0; rank < p.world_size; ++rank) {
      a.push_back(random_values<T>(p.m * p.k, 1000 * round + 2 * rank + 1));
      b.push_back(random_values<T>(p.n * p.k, 1000 * round + 2 * rank + 2));
    }
  }

  int64_t ldb() const { return p.layout == PYRUNTIME_NT ? p.k : p.n; }

  PyruntimeMatmul request(int rank, std::vector<T>& c) const {
    return {dtype_of<T>(),
            p.layout,
            p.tiles,
            p.m,
            p.n,
            p.k,
            a[rank].data(),
            b[rank].data(),
            p.with_bias ? bias.data() : nullptr,
            c.data(),
            p.k,
            ldb(),
            p.n,
            0,
            0};
  }

  // Checks c bit for bit: each rank's part is rounded, then summed in rank order in fp32, then rounded. Also
  // compares it with fp64, within the roundings.
  void check(int rank, const std::vector<T>& c) const {
    const int64_t begin = shard_begin(p, rank), rows = shard_rows(p, rank);
    std::vector<float> sums(p.m * p.n);
    std::vector<double> exact(p.m * p.n), allowed(p.m * p.n);
    for (int source = 0; source < p.world_size; ++source) {
      std::vector<T> part = poison<T>(p.m * p.n);
      PyruntimeMatmul alone = request(source, part);
      alone.bias = nullptr;
      EXPECT_OK(multiply_alone(alone));
      const Reference reference =
          product(p.layout, p.m, p.n, p.k, a[source].data(), p.k, b[source].data(), ldb());
      for (int64_t i = 0; i < p.m * p.n; ++i) {
        sums[i] += to_float(part[i]);
        exact[i] += reference.c[i];
        allowed[i] += unit<T>() * std::fabs(reference.c[i]) + 1e-5 * (1 + reference.size[i]);
      }
    }
    for (int64_t i = 0; i < p.m * p.n; ++i) {
      const T& one = bias[i % p.n];
      if (p.with_bias) {
        sums[i] += to_float(one);
        exact[i] += to_float(one);
      }
      allowed[i] += unit<T>() * (std::fabs(exact[i]) + allowed[i]);
    }
    const int64_t first = begin * p.n;
    for (int64_t i = 0; i < rows * p.n; ++i) {
      if (c[i].bits == pyruntime::portable::round_to<T>(sums[first + i]).bits) continue;
      check::fail(__FILE__, __LINE__, "element " + std::to_string(i) + " is not the sum in rank order");
      break;
    }
    expect_close(
        "the scattered sum", c.data(), p.n, rows, p.n,
        [&](int64_t i, int64_t j) { return exact[first + i * p.n + j]; },
        [&](int64_t i, int64_t j) { return allowed[first + i * p.n + j]; });
  }
};

inline PyruntimeWorkspace scatter_shape(const Problem& p, int dtype) {
  const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  const int64_t rows = pyruntime::rows_of_rank(p.m, p.world_size, 0), bytes = dtype == PYRUNTIME_FP32 ? 4 : 2;
  const int64_t flags = pieces(rows, PYRUNTIME_SIGNAL_ROWS) * pieces(p.n, PYRUNTIME_SIGNAL_COLUMNS);
  return {p.world_size, static_cast<int32_t>(flags), p.world_size * rows * padded(p.n) * bytes};
}

// ---- epochs; the call's number chooses the slot, as callers do ----

template <class T>
std::vector<T> gather_once(const Gather<T>& gather, const Workspaces& workspaces, int rank, int call) {
  std::vector<T> c = poison<T>(gather.p.m * gather.p.n);
  const PyruntimeMatmul matmul = gather.request(rank, c);
  const PyruntimeGroup group = workspaces.group(rank, call % PYRUNTIME_SLOTS);
  put_rows(gather, group);
  EXPECT_OK(pyruntime_all_gather_matmul(&group, &matmul, nullptr));
  EXPECT_OK(pyruntime_finish(&group, nullptr));
  EXPECT_EQ(description(failure_of(group)), std::string("nothing failed"));
  return c;
}

template <class T>
std::vector<T> scatter_once(const Scatter<T>& scatter, const Workspaces& workspaces, int rank, int call) {
  std::vector<T> c = poison<T>(shard_rows(scatter.p, rank) * scatter.p.n);
  const PyruntimeMatmul matmul = scatter.request(rank, c);
  const PyruntimeGroup group = workspaces.group(rank, call % PYRUNTIME_SLOTS);
  EXPECT_OK(pyruntime_matmul_reduce_scatter(&group, &matmul, nullptr));
  EXPECT_OK(pyruntime_end_puts(&group, nullptr));
  EXPECT_EQ(description(failure_of(group)), std::string("nothing failed"));
  return c;
}

}  // namespace kernels
