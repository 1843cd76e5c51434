// RMSNorm, alone and behind an addition, and its gradients, against fp64.
#include <functional>

#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

constexpr float kEps = 1e-5f;

// A matrix at `shift` elements behind a multiple of 16 bytes, with guards around it.
template <class T>
struct Matrix {
  Matrix(int64_t count, int64_t shift) : shift(shift), values(poison<T>(shift + count + 16)) {}
  Matrix(int64_t count, int64_t shift, uint64_t seed) : Matrix(count, shift) {
    const std::vector<T> drawn = random_values<T>(count, seed);
    std::copy(drawn.begin(), drawn.end(), data());
  }

  T* data() { return values.data() + shift; }
  double at(int64_t i) const { return to_float(values[shift + i]); }
  // Expects that nothing was written before or behind `count` elements.
  void expect_guards(int64_t count) const {
    const std::vector<T> nan = poison<T>(1);
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const bool is_guard = i < shift || i >= shift + count;
      if (is_guard) EXPECT(std::memcmp(&values[i], nan.data(), sizeof(T)) == 0);
    }
  }

  int64_t shift;
  std::vector<T> values;
};

// Makes the operands that forward and backward share; everything else is a null pointer.
PyruntimeRmsNorm operands(int32_t dtype, int64_t rows, int64_t columns, const void* x, const void* weight,
                          void* y, float* rstd) {
  PyruntimeRmsNorm norm{};
  norm.dtype = dtype;
  norm.rows = rows;
  norm.columns = columns;
  norm.x = x;
  norm.weight = weight;
  norm.y = y;
  norm.rstd = rstd;
  norm.eps = kEps;
  return norm;
}

// The operands of one norm; shift: of all matrices. also: with a residual, and a gradient of its sum.
template <class T>
struct Norm {
  Norm(int64_t rows, int64_t columns, int64_t shift, bool also)
      : rows(rows),
        columns(columns),
        also(also),
        x(rows * columns, shift, 1),
        residual(rows * columns, shift, 2),
        weight(columns, shift, 3),
        grad(rows * columns, shift, 4),
        grad_sum(rows * columns, shift, 5),
        y(rows * columns, shift),
        summed(rows * columns, shift),
        dx(rows * columns, shift),
        dweight(columns, shift),
        rstd(rows, 0) {}

  void forward() {
    PyruntimeRmsNorm norm =
        operands(dtype_of<T>(), rows, columns, x.data(), weight.data(), y.data(), rstd.data());
    norm.also = also ? residual.data() : nullptr;
    norm.summed = also ? summed.data() : nullptr;
    EXPECT_OK(pyruntime_rms_norm(&norm, nullptr));
  }

  void backward() {
    const int64_t count = pyruntime_rms_norm_parts(dtype_of<T>(), rows, columns);
    Matrix<float> parts(count * columns, 0);
    PyruntimeRmsNorm norm =
        operands(dtype_of<T>(), rows, columns, normed().data(), weight.data(), grad.data(), rstd.data());
    norm.also = also ? grad_sum.data() : nullptr;
    norm.dx = dx.data();
    norm.dweight = dweight.data();
    norm.parts = parts.data();
    EXPECT_OK(pyruntime_rms_norm_backward(&norm, nullptr));
    parts.expect_guards(count * columns);
  }

  Matrix<T>& normed() { return also ? summed : x; }

  int64_t rows, columns;
  bool also;
  Matrix<T> x, residual, weight, grad, grad_sum, y, summed, dx, dweight;
  Matrix<float> rstd;
};

template <class T>
void expect_forward(Norm<T>& norm) {
  const int64_t columns = norm.columns;
  std::vector<double> scale(norm.rows);
  for (int64_t i = 0; i < norm.rows; ++i) {
    double squares = 0;
    for (int64_t j = i * columns; j < (i + 1) * columns; ++j) {
      if (norm.also) {
        const auto sum = static_cast<float>(norm.x.at(j)) + static_cast<float>(norm.residual.at(j));
        EXPECT_EQ(norm.summed.at(j), static_cast<double>(to_float(portable::round_to<T>(sum))));
      }
      squares += norm.normed().at(j) * norm.normed().at(j);
    }
    scale[i] = 1 / std::sqrt(squares / static_cast<double>(columns) + kEps);
    EXPECT(std::fabs(norm.rstd.at(i) - scale[i]) <= 2e-6 * scale[i]);
  }
  const auto wanted = [&](int64_t i, int64_t j) {
    return norm.normed().at(i * columns + j) * scale[i] * norm.weight.at(j);
  };
  expect_close("y", norm.y.data(), columns, norm.rows, columns, wanted,
               [&](int64_t i, int64_t j) { return (unit<T>() + 4e-6) * std::fabs(wanted(i, j)) + 1e-7; });
}

template <class T>
void expect_backward(Norm<T>& norm) {
  const int64_t columns = norm.columns;
  std::vector<double> dweight(columns), of_dweight(columns), along(norm.rows), of_along(norm.rows);
  for (int64_t i = 0; i < norm.rows; ++i) {
    const double scale = norm.rstd.at(i);
    for (int64_t j = 0; j < columns; ++j) {
      const double grad = norm.grad.at(i * columns + j), x = norm.normed().at(i * columns + j);
      dweight[j] += grad * x * scale;
      of_dweight[j] += std::fabs(grad * x * scale);
      along[i] += grad * norm.weight.at(j) * x * scale * scale * scale / static_cast<double>(columns);
      of_along[i] += std::fabs(grad * norm.weight.at(j) * x * scale * scale * scale) / columns;
    }
  }
  const auto wanted = [&](int64_t i, int64_t j) {
    const int64_t at = i * columns + j;
    const double also = norm.also ? norm.grad_sum.at(at) : 0;
    return norm.grad.at(at) * norm.weight.at(j) * norm.rstd.at(i) - norm.normed().at(at) * along[i] + also;
  };
  expect_close("dx", norm.dx.data(), columns, norm.rows, columns, wanted, [&](int64_t i, int64_t j) {
    const int64_t at = i * columns + j;
    const double sizes = std::fabs(norm.grad.at(at) * norm.weight.at(j) * norm.rstd.at(i)) +
                         std::fabs(norm.normed().at(at)) * of_along[i];
    return (unit<T>() + 1e-6) * std::fabs(wanted(i, j)) + 4e-6 * sizes + 1e-7;
  });
  expect_close(
      "dweight", norm.dweight.data(), columns, 1, columns, [&](int64_t, int64_t j) { return dweight[j]; },
      [&](int64_t, int64_t j) {
        return (unit<T>() + 1e-6) * std::fabs(dweight[j]) + 4e-6 * of_dweight[j] + 1e-7;
      });
}

template <class T>
void normalises(int64_t rows, int64_t columns, int64_t shift) {
  for (const bool also : {false, true}) {
    Norm<T> norm(rows, columns, shift, also);
    norm.forward();
    expect_forward(norm);
    norm.backward();
    expect_backward(norm);
    for (const Matrix<T>* written : {&norm.y, &norm.dx}) written->expect_guards(rows * columns);
    norm.summed.expect_guards(also ? rows * columns : 0);
    norm.dweight.expect_guards(columns);
    norm.rstd.expect_guards(rows);
  }
}

TEST(norms_and_their_gradients_are_those_of_the_equations) {
  std::mt19937_64 draw(kSeed);
  host::set_multiprocessors(2);  // fewer blocks than rows
  normalises<Bf16>(70, 128, 0);  // heads
  normalises<Bf16>(33, 64, 0);
  normalises<Fp16>(9, 256, 0);
  normalises<Bf16>(21, 1024, 0);  // a warp a row
  normalises<Bf16>(13, 2304, 0);  // a block a row
  normalises<Bf16>(6, 16384, 0);  // longer than registers hold
  normalises<float>(5, 4100, 0);  // and ragged
  normalises<Bf16>(5, 9001, 0);
  normalises<Bf16>(11, 250, 0);
  normalises<Fp16>(7, 1000, 3);  // nothing is aligned
  normalises<float>(6, 1, 0);
  normalises<float>(40, 96, 1);
  for (int round = 0; round < 4; ++round)
    normalises<Bf16>(random_size(draw, 1, 90), random_size(draw, 1, 300), random_size(draw, 0, 9));
}

// All that a norm and its backward have written.
template <class T>
std::vector<unsigned char> results(Norm<T>& norm) {
  norm.forward();
  norm.backward();
  std::vector<unsigned char> bytes;
  const auto add = [&](auto& matrix, int64_t count) {
    const auto* from = reinterpret_cast<const unsigned char*>(matrix.data());
    bytes.insert(bytes.end(), from, from + count * sizeof(*matrix.data()));
  };
  for (Matrix<T>* matrix : {&norm.y, &norm.normed(), &norm.dx}) add(*matrix, norm.rows * norm.columns);
  add(norm.dweight, norm.columns);
  add(norm.rstd, norm.rows);
  return bytes;
}

template <class T>
void has_the_same_bits(int64_t rows, int64_t columns) {
  host::set_multiprocessors(1);
  Norm<T> norm(rows, columns, 0, true), shifted(rows, columns, 1, true);
  const auto once = results(norm);
  EXPECT(once == results(shifted));  // rows that are not aligned
  host::set_multiprocessors(5);
  for (const uint64_t schedule : {1, 2}) {
    host::set_schedule(schedule);
    EXPECT(once == results(norm));
  }
  host::set_schedule(0);
}

TEST(bits_depend_on_the_sizes_alone) {
  has_the_same_bits<Bf16>(67, 128);
  has_the_same_bits<Bf16>(19, 512);
  has_the_same_bits<Fp16>(5, 8704);
  has_the_same_bits<float>(9, 4800);
}

TEST(no_rows_have_a_gradient_of_zeros) {
  Matrix<Bf16> dweight(24, 0);
  PyruntimeRmsNorm norm = operands(PYRUNTIME_BF16, 0, 24, nullptr, nullptr, nullptr, nullptr);
  norm.dweight = dweight.data();
  EXPECT_OK(pyruntime_rms_norm(&norm, nullptr));
  EXPECT_OK(pyruntime_rms_norm_backward(&norm, nullptr));
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(dweight.at(i), 0.0);
}

void expect_refused(int code, const std::string& part, int line) {
  const std::string said = pyruntime_error();
  if (code != PYRUNTIME_INVALID || said.find(part) == std::string::npos)
    check::fail(__FILE__, line, "\"" + said + "\" does not say: " + part);
}

TEST(arguments_that_do_not_fit_are_refused_in_a_sentence) {
  Norm<Bf16> with(2, 8, 0, true);
  const PyruntimeRmsNorm norm =
      operands(PYRUNTIME_BF16, 2, 8, with.x.data(), with.weight.data(), with.y.data(), with.rstd.data());
  const auto refused = [&](auto launch, const std::function<void(PyruntimeRmsNorm&)>& change,
                           const std::string& part, int line) {
    PyruntimeRmsNorm changed = norm;
    change(changed);
    expect_refused(launch(&changed, nullptr), part, line);
  };
  const auto forward = pyruntime_rms_norm, backward = pyruntime_rms_norm_backward;
  expect_refused(forward(nullptr, nullptr), "rms_norm: the operands are a null pointer.", __LINE__);
  refused(forward, [](auto& n) { n.dtype = 3; }, "dtype=3; use 0 (bf16), 1 (fp16) or 2 (fp32).", __LINE__);
  refused(forward, [](auto& n) { n.columns = 0; }, "rows=2, columns=0; rows must not be negative", __LINE__);
  refused(forward, [](auto& n) { n.rstd = nullptr; }, "x, weight, y and rstd is a null pointer", __LINE__);
  refused(forward, [](auto& n) { n.also = n.x; }, "one is a null pointer; give both or neither.", __LINE__);
  refused(backward, [](auto&) {}, "rms_norm_backward: dweight is a null pointer.", __LINE__);
  refused(
      backward, [&](auto& n) { n.dweight = with.dweight.data(); }, "of dx and parts is a null pointer",
      __LINE__);
  with.y.expect_guards(0);
}

}  // namespace
