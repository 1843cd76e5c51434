// The tile GEMM that all fused kernels share, in a group of one rank, against fp64.
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

// A GEMM whose operands lie in the middle of larger matrices.
template <class T>
struct Case {
  int layout, tiles;
  int64_t m, n, k, lda, ldb, ldc;
  bool with_bias;
  int64_t shift = 0;  // elements before each matrix: 0 keeps them aligned
  std::vector<T> a, b, bias, c;

  Case(int layout, int tiles, int64_t m, int64_t n, int64_t k, int64_t spare, bool with_bias, int64_t shift)
      : layout(layout), tiles(tiles), m(m), n(n), k(k), with_bias(with_bias), shift(shift) {
    lda = k + spare;
    ldb = (layout == PYRUNTIME_NT ? k : n) + spare;
    ldc = n + spare;
    a = random_values<T>(m * lda + shift, 1);
    b = random_values<T>((layout == PYRUNTIME_NT ? n : k) * ldb + shift, 2);
    bias = random_values<T>(n, 3);
    // What pads a row must never be read.
    spoil(a, lda, k);
    spoil(b, ldb, layout == PYRUNTIME_NT ? k : n);
    c = poison<T>(m * ldc + shift);
  }

  void spoil(std::vector<T>& matrix, int64_t pitch, int64_t width) {
    for (int64_t i = 0; i < static_cast<int64_t>(matrix.size()) - shift; ++i) {
      if (i % pitch >= width) matrix[shift + i].bits = 0xffff;
    }
  }

  PyruntimeMatmul request() {
    return {dtype_of<T>(),
            layout,
            tiles,
            m,
            n,
            k,
            a.data() + shift,
            b.data() + shift,
            with_bias ? bias.data() : nullptr,
            c.data() + shift,
            lda,
            ldb,
            ldc,
            0,
            0};
  }

  void run_and_check() {
    EXPECT_OK(multiply_alone(request()));
    const Reference reference = product(layout, m, n, k, a.data() + shift, lda, b.data() + shift, ldb);
    const auto wanted = [&](int64_t i, int64_t j) {
      return reference.c[i * n + j] + (with_bias ? to_float(bias[j]) : 0.0f);
    };
    expect_close("c", c.data() + shift, ldc, m, n, wanted, [&](int64_t i, int64_t j) {
      return unit<T>() * std::fabs(wanted(i, j)) + 1e-5 * (1 + reference.size[i * n + j]);
    });
    for (int64_t i = 0; i < static_cast<int64_t>(c.size()); ++i) {
      const bool written = i >= shift && (i - shift) % ldc < n;
      if (!written) EXPECT_EQ(c[i].bits, 0xffff);
    }
  }
};

template <class T>
void all_layouts(int tiles, int64_t m, int64_t n, int64_t k, int64_t spare, bool bias, int64_t shift) {
  for (int layout = PYRUNTIME_NT; layout <= PYRUNTIME_NN; ++layout) {
    Case<T>(layout, tiles, m, n, k, spare, bias, shift).run_and_check();
  }
}

TEST(whole_tiles_in_every_layout_and_type) {
  all_layouts<Bf16>(PYRUNTIME_TILES_SMALL, 64, 128, 128, 0, false, 0);
  all_layouts<Fp16>(PYRUNTIME_TILES_SMALL, 64, 128, 64, 0, true, 0);
}

TEST(large_tiles_in_every_layout) {
  all_layouts<Bf16>(PYRUNTIME_TILES_LARGE, 128, 256, 64, 0, false, 0);
  all_layouts<Fp16>(PYRUNTIME_TILES_LARGE, 133, 261, 70, 3, true, 1);
}

TEST(ragged_sizes_with_aligned_rows) {
  all_layouts<Bf16>(PYRUNTIME_TILES_SMALL, 40, 136, 200, 8, true, 0);
  Case<Bf16>(PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 37, 41, 43, 5, false, 0).run_and_check();  // pitch of 48
  Case<Fp16>(PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 43, 53, 5, 11, false, 0).run_and_check();
}

TEST(sizes_and_addresses_of_any_alignment) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 6; ++round) {
    const int64_t m = random_size(draw, 1, 150), n = random_size(draw, 1, 200), k = random_size(draw, 1, 200);
    all_layouts<Bf16>(PYRUNTIME_TILES_SMALL, m, n, k, random_size(draw, 0, 3), round % 2, round % 3);
  }
}

TEST(many_rows_of_tiles_are_all_visited) {
  host::set_multiprocessors(5);
  Case<Bf16>(PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 64 * 11 + 1, 257, 16, 0, false, 0).run_and_check();
  host::set_multiprocessors(3);
}

TEST(empty_gemms) {
  Case<Bf16>(PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 0, 16, 16, 0, false, 0).run_and_check();
  Case<Bf16>(PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 16, 0, 16, 0, false, 0).run_and_check();
  Case<Bf16>(PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 16, 16, 0, 0, true, 0).run_and_check();  // the bias alone
}

TEST(neither_the_order_of_threads_nor_the_number_of_blocks_changes_a_bit) {
  Case<Bf16> first(PYRUNTIME_NN, PYRUNTIME_TILES_SMALL, 130, 140, 200, 0, true, 0);
  first.run_and_check();
  for (const uint64_t seed : {1, 2, 3, 4}) {
    host::set_schedule(seed);
    Case<Bf16> again = first;
    again.c = poison<Bf16>(again.c.size());
    PyruntimeMatmul matmul = again.request();
    matmul.most_blocks = static_cast<int32_t>(seed);
    EXPECT_OK(multiply_alone(matmul));
    EXPECT(std::memcmp(again.c.data(), first.c.data(), first.c.size() * 2) == 0);
  }
  host::set_schedule(0);
}

}  // namespace
