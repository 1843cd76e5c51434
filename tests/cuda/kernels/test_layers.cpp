// SwiGLU, experts' gating, rotary embedding and cross-entropy, against fp64.
#include <array>
#include <functional>

#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

// A rounding of the result, and what fp32 loses on the way.
template <class T>
double allowed(double wanted) {
  return (unit<T>() + 4e-6) * std::fabs(wanted) + 1e-6 + (std::is_same_v<T, Fp16> ? 6e-8 : 0);
}

template <class T>
bool is_poison(const T& value) {
  T nan;
  std::memset(static_cast<void*>(&nan), 0xff, sizeof(T));
  return std::memcmp(&value, &nan, sizeof(T)) == 0;
}

// What lies between the rows that were written, and behind them, has been left alone.
template <class T>
void expect_gaps_untouched(const std::vector<T>& matrix, int64_t shift, int64_t rows, int64_t columns,
                           int64_t pitch) {
  for (int64_t i = 0; i < static_cast<int64_t>(matrix.size()); ++i) {
    const int64_t row = (i - shift) / pitch, column = (i - shift) % pitch;
    const bool written = i >= shift && row < rows && column < columns;
    if (!written && !is_poison(matrix[i])) check::fail(__FILE__, __LINE__, "element " + std::to_string(i));
  }
}

// ---- SwiGLU ----

struct Lies {
  int64_t shift;  // of the first element from a multiple of 16 bytes
  int64_t gap;    // between rows of gate and up
  int64_t y_gap;
};

template <class T>
void swiglus(int64_t rows, int64_t features, const Lies& lies) {
  const int64_t pitch = 2 * features + lies.gap, y_pitch = features + lies.y_gap, shift = lies.shift;
  std::vector<T> gate_up = random_values<T>(shift + rows * pitch, 1);
  for (size_t i = 0; i < gate_up.size(); i += 7)  // where the sigmoid is 0 or 1
    gate_up[i] = portable::round_to<T>(to_float(gate_up[i]) * 40);
  const std::vector<T> grad = random_values<T>(shift + rows * y_pitch, 2);
  std::vector<T> y = poison<T>(shift + rows * y_pitch), dgate_up = poison<T>(shift + rows * pitch);
  PyruntimeSwiglu operands{};
  operands.dtype = dtype_of<T>();
  operands.rows = rows;
  operands.features = features;
  operands.gate = gate_up.data() + shift;
  operands.up = gate_up.data() + shift + features;
  operands.y = y.data() + shift;
  operands.gate_up_pitch = operands.dgate_dup_pitch = pitch;
  operands.y_pitch = y_pitch;
  EXPECT_OK(pyruntime_swiglu(&operands, nullptr));
  operands.y = const_cast<T*>(grad.data()) + shift;
  operands.dgate = dgate_up.data() + shift;
  operands.dup = dgate_up.data() + shift + features;
  EXPECT_OK(pyruntime_swiglu_backward(&operands, nullptr));

  const auto gate_of = [&](int64_t i, int64_t j) -> double {
    return to_float(gate_up[shift + i * pitch + j]);
  };
  const auto sigmoid_of = [&](int64_t i, int64_t j) { return 1 / (1 + std::exp(-gate_of(i, j))); };
  const auto y_of = [&](int64_t i, int64_t j) {
    return gate_of(i, j) * sigmoid_of(i, j) * gate_of(i, features + j);
  };
  const auto dgate_up_of = [&](int64_t i, int64_t j) {
    const int64_t f = j % features;
    const double g = gate_of(i, f), s = sigmoid_of(i, f), dy = to_float(grad[shift + i * y_pitch + f]);
    return j < features ? dy * gate_of(i, features + f) * s * (1 + g * (1 - s)) : dy * g * s;
  };
  const double slack = 1e-5;  // (1 + g (1 - s)) cancels
  expect_close("y", y.data() + shift, y_pitch, rows, features, y_of,
               [&](int64_t i, int64_t j) { return allowed<T>(y_of(i, j)); });
  expect_close("dgate_up", dgate_up.data() + shift, pitch, rows, 2 * features, dgate_up_of,
               [&](int64_t i, int64_t j) { return allowed<T>(dgate_up_of(i, j)) + slack; });
  expect_gaps_untouched(y, shift, rows, features, y_pitch);
  expect_gaps_untouched(dgate_up, shift, rows, 2 * features, pitch);
}

TEST(swiglu_and_its_gradient_are_those_of_the_equations) {
  std::mt19937_64 draw(kSeed);
  swiglus<Bf16>(37, 352, {0, 0, 0});  // more vectors than the threads of all blocks
  swiglus<Bf16>(5, 24, {0, 8, 16});   // rows apart
  swiglus<Bf16>(4, 19, {3, 1, 1});    // nothing is aligned
  swiglus<Bf16>(6, 20, {0, 0, 4});    // rows are, up is not
  swiglus<Fp16>(9, 136, {0, 0, 0});
  swiglus<float>(7, 100, {0, 0, 0});
  swiglus<float>(3, 3, {1, 2, 3});
  for (int round = 0; round < 4; ++round)
    swiglus<Bf16>(random_size(draw, 1, 9), random_size(draw, 1, 90), {random_size(draw, 0, 9), 0, 0});
}

TEST(gradients_may_lie_where_gate_and_up_do) {
  const int64_t rows = 3, features = 40;
  std::vector<Bf16> gate_up = random_values<Bf16>(rows * 2 * features, 1), apart = gate_up;
  const std::vector<Bf16> grad = random_values<Bf16>(rows * features, 2);
  const auto backward = [&](Bf16* to) {
    PyruntimeSwiglu operands{};
    operands.rows = rows;
    operands.features = features;
    operands.gate = gate_up.data();
    operands.up = gate_up.data() + features;
    operands.y = const_cast<Bf16*>(grad.data());
    operands.dgate = to;
    operands.dup = to + features;
    operands.gate_up_pitch = operands.dgate_dup_pitch = 2 * features;
    operands.y_pitch = features;
    EXPECT_OK(pyruntime_swiglu_backward(&operands, nullptr));
  };
  backward(apart.data());
  backward(gate_up.data());
  EXPECT(std::memcmp(apart.data(), gate_up.data(), apart.size() * sizeof(Bf16)) == 0);
}

// ---- gating of experts ----

struct Form {
  float alpha = 1, limit = INFINITY, shift = 0;
  bool interleaved = false;
};

constexpr Form kSwiglu{}, kGptOss{1.702f, 7, 1, true}, kTight{1.702f, 0.5f, 1, false},
    kInTurns{1, INFINITY, 0, true};

// The gating of an expert's rows: matrices `shift` elements behind a multiple of 16 bytes.
template <class T>
struct Gating {
  Gating(int64_t rows, int64_t features, Form form, int64_t shift = 0)
      : rows(rows),
        features(features),
        shift(shift),
        form(form),
        gate_up(random_values<T>(shift + rows * 2 * features, 1)),
        grad(random_values<T>(shift + rows * features, 2)),
        p(random_values<float>(rows, 3)) {
    for (size_t i = 0; i < gate_up.size(); i += 7)  // beyond the limits, and where the sigmoid is 0 or 1
      gate_up[i] = portable::round_to<T>(to_float(gate_up[i]) * 40);
    if (rows > 1) p[1] = 0;  // a place without a row
  }

  PyruntimeGating operands(std::vector<T>& y) {
    PyruntimeGating of{};
    of.dtype = dtype_of<T>();
    of.interleaved = form.interleaved;
    of.rows = rows;
    of.features = features;
    of.gate_up = gate_up.data() + shift;
    of.weights = p.data();
    of.y = y.data() + shift;
    of.alpha = form.alpha;
    of.limit = form.limit;
    of.shift = form.shift;
    return of;
  }

  void forward() {
    const PyruntimeGating of = operands(y);
    EXPECT_OK(pyruntime_weighted_gating(&of, nullptr));
  }

  void backward() {
    PyruntimeGating of = operands(y_again);
    of.grad = grad.data() + shift;
    of.dgate_up = dgate_up.data() + shift;
    of.dweights = dp.data();
    EXPECT_OK(pyruntime_weighted_gating_backward(&of, nullptr));
  }

  // The value of gate (half 0) or up (1).
  double at(int64_t half, int64_t i, int64_t j) const {
    return to_float(
        gate_up[shift + i * 2 * features + (form.interleaved ? 2 * j + half : half * features + j)]);
  }
  double g(int64_t i, int64_t j) const { return std::min<double>(at(0, i, j), form.limit); }
  double u(int64_t i, int64_t j) const {
    return std::max<double>(std::min<double>(at(1, i, j), form.limit), -form.limit) + form.shift;
  }
  double s(int64_t i, int64_t j) const { return 1 / (1 + std::exp(-form.alpha * g(i, j))); }
  double dy(int64_t i, int64_t j) const { return to_float(grad[shift + i * features + j]); }
  double joined(int64_t i, int64_t j) const { return g(i, j) * s(i, j) * u(i, j); }
  double wanted_d(int64_t i, int64_t column) const {
    const int64_t half = form.interleaved ? column % 2 : column / features;
    const int64_t j = form.interleaved ? column / 2 : column % features;
    if (half == 0) {
      const double slope = s(i, j) * (1 + form.alpha * g(i, j) * (1 - s(i, j)));
      return at(0, i, j) > form.limit ? 0 : p[i] * dy(i, j) * u(i, j) * slope;
    }
    return std::fabs(at(1, i, j)) > form.limit ? 0 : p[i] * dy(i, j) * g(i, j) * s(i, j);
  }

  void expect_what_the_equations_give() {
    forward();
    backward();
    const auto wanted_y = [&](int64_t i, int64_t j) { return p[i] * joined(i, j); };
    for (const std::vector<T>* each : {&y, &y_again}) {
      expect_close("y", each->data() + shift, features, rows, features, wanted_y,
                   [&](int64_t i, int64_t j) { return allowed<T>(wanted_y(i, j)); });
      expect_gaps_untouched(*each, shift, rows, features, features);
    }
    // (1 + alpha g (1 - s)) cancels.
    expect_close(
        "dgate_up", dgate_up.data() + shift, 2 * features, rows, 2 * features,
        [&](int64_t i, int64_t j) { return wanted_d(i, j); },
        [&](int64_t i, int64_t j) { return allowed<T>(wanted_d(i, j)) + 3e-5; });
    expect_gaps_untouched(dgate_up, shift, rows, 2 * features, 2 * features);
    std::vector<double> sums(rows), sizes(rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < features; ++j) {
        sums[i] += dy(i, j) * joined(i, j);
        sizes[i] += std::fabs(dy(i, j) * joined(i, j));
      }
    }
    expect_close(
        "dp", dp.data(), 1, rows, 1, [&](int64_t i, int64_t) { return sums[i]; },
        [&](int64_t i, int64_t) { return 4e-6 * sizes[i] + 1e-6; });
    expect_gaps_untouched(dp, 0, rows, 1, 1);
  }

  int64_t rows, features, shift;
  Form form;
  std::vector<T> gate_up, grad;
  std::vector<float> p;
  std::vector<T> y = poison<T>(shift + rows * features + 16), y_again = y;
  std::vector<T> dgate_up = poison<T>(shift + rows * 2 * features + 16);
  std::vector<float> dp = poison<float>(rows + 4);
};

TEST(gating_and_its_gradients_are_those_of_the_equations) {
  std::mt19937_64 draw(kSeed);
  const auto expect = [](auto gating) { gating.expect_what_the_equations_give(); };
  for (const Form& form : {kSwiglu, kGptOss, kTight, kInTurns}) {
    expect(
        Gating<Bf16>(37, 352, form));  // more rows than the warps of all blocks, and more than a warp's packs
    expect(Gating<Bf16>(5, 20, form));     // rows of gate and up are aligned, those of y are not
    expect(Gating<Bf16>(4, 24, form, 3));  // nothing is aligned
    expect(Gating<Fp16>(9, 136, form));
    expect(Gating<float>(7, 100, form));
    expect(Gating<float>(3, 3, form));
    expect(Gating<Bf16>(random_size(draw, 1, 9), random_size(draw, 1, 90), form, random_size(draw, 0, 9)));
  }
  Gating<float> empty(3, 0, kSwiglu);
  empty.backward();
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(empty.dp[i], 0.0f);
}

TEST(gating_has_the_same_bits_on_any_number_of_multiprocessors) {
  Gating<Bf16> one(23, 1000, kGptOss), other = one;
  one.backward();
  host::set_multiprocessors(1);
  other.backward();
  host::set_multiprocessors(3);
  EXPECT(std::memcmp(one.dgate_up.data(), other.dgate_up.data(), one.dgate_up.size() * sizeof(Bf16)) == 0);
  EXPECT(std::memcmp(one.dp.data(), other.dp.data(), one.dp.size() * sizeof(float)) == 0);
}

// ---- rotary embedding ----

struct Sizes {
  int64_t batch, positions, head_dim, heads, kv_heads;

  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t tokens() const { return batch * positions; }
  std::array<int64_t, 3> counts() const { return {heads, kv_heads, kv_heads}; }
};

// The parts of fused rows, `pitch` apart.
template <class T>
void place_in_rows(PyruntimeHeads (&parts)[3], T* rows, int64_t pitch, const Sizes& s) {
  for (int part = 0; part < 3; ++part) {
    parts[part] = {rows, s.positions * pitch, pitch, s.head_dim};
    rows += s.counts()[part] * s.head_dim;
  }
}

// Each part by itself, [batch, heads, positions, head_dim]: another order than that of the rows.
template <class T>
void place_apart(PyruntimeHeads (&parts)[3], std::array<std::vector<T>, 3>& of, const Sizes& s) {
  for (int part = 0; part < 3; ++part) {
    const int64_t per_head = s.positions * s.head_dim;
    parts[part] = {of[part].data(), s.counts()[part] * per_head, s.head_dim, per_head};
  }
}

template <class T>
void rotates(const Sizes& s, int64_t shift) {
  const int64_t pitch = s.width() + shift, half = s.head_dim / 2;
  std::vector<T> qkv = random_values<T>(shift + s.tokens() * pitch, 1);
  const std::vector<T> before = qkv;
  const std::vector<float> cos = random_values<float>(s.positions * s.head_dim, 2),
                           sin = random_values<float>(s.positions * s.head_dim, 3);
  std::array<std::vector<T>, 3> apart;
  for (int part = 0; part < 3; ++part) apart[part] = poison<T>(s.tokens() * s.counts()[part] * s.head_dim);
  PyruntimeRope rope{};
  rope.dtype = dtype_of<T>();
  rope.batch = s.batch;
  rope.positions = s.positions;
  rope.head_dim = s.head_dim;
  for (int part = 0; part < 3; ++part) rope.heads[part] = s.counts()[part];
  rope.cos = cos.data();
  rope.sin = sin.data();
  place_in_rows(rope.from, qkv.data() + shift, pitch, s);
  place_apart(rope.to, apart, s);
  EXPECT_OK(pyruntime_rope(&rope, nullptr));
  EXPECT(std::memcmp(qkv.data(), before.data(), qkv.size() * sizeof(T)) == 0);

  // Element (token, j) of the fused rows, rotated or rotated back, of `rows`.
  const auto turned = [&](const std::vector<T>& rows, bool inverse) {
    return [&rows, &cos, &sin, &s, half, pitch, shift, inverse](int64_t token, int64_t j) -> double {
      const int64_t at = shift + token * pitch + j, e = j % s.head_dim;
      if (j >= (s.heads + s.kv_heads) * s.head_dim) return to_float(rows[at]);
      const int64_t partner = e < half ? half : -half;
      const int64_t angle = token % s.positions * s.head_dim + e;
      const double own = to_float(rows[at]), other = to_float(rows[at + partner]);
      if (!inverse) return own * cos[angle] + (e < half ? -other : other) * sin[angle];
      return own * cos[angle] + (e < half ? other : -other) * sin[angle + partner];
    };
  };
  const auto within = [](const auto& wanted) {
    return [&wanted](int64_t i, int64_t j) { return allowed<T>(wanted(i, j)) + 4e-6; };
  };

  // Split, in another order.
  const auto wanted = turned(before, false);
  std::vector<T> together(s.tokens() * s.width());
  for (int64_t token = 0; token < s.tokens(); ++token) {
    for (int64_t j = 0; j < s.width(); ++j) {
      int64_t head = j / s.head_dim;
      int part = 0;
      while (head >= s.counts()[part]) head -= s.counts()[part++];
      const PyruntimeHeads& to = rope.to[part];
      together[token * s.width() + j] =
          apart[part][token / s.positions * to.batch_stride + token % s.positions * to.position_stride +
                      head * to.head_stride + j % s.head_dim];
    }
  }
  expect_close("split", together.data(), s.width(), s.tokens(), s.width(), wanted, within(wanted));

  // In place: the same bits; v is not even read.
  place_in_rows(rope.to, qkv.data() + shift, pitch, s);
  EXPECT_OK(pyruntime_rope(&rope, nullptr));
  for (int64_t token = 0; token < s.tokens(); ++token) {
    EXPECT(std::memcmp(qkv.data() + shift + token * pitch, together.data() + token * s.width(),
                       s.width() * sizeof(T)) == 0);
    if (token + 1 < s.tokens())
      EXPECT(std::memcmp(qkv.data() + shift + token * pitch + s.width(),
                         before.data() + shift + token * pitch + s.width(),
                         (pitch - s.width()) * sizeof(T)) == 0);
  }

  // The transpose, from parts of their own into rows: what the backward does.
  std::vector<T> gathered = poison<T>(shift + s.tokens() * pitch);
  place_apart(rope.from, apart, s);
  place_in_rows(rope.to, gathered.data() + shift, pitch, s);
  rope.inverse = 1;
  EXPECT_OK(pyruntime_rope(&rope, nullptr));
  const auto back = turned(qkv, true);
  expect_close("gathered", gathered.data() + shift, pitch, s.tokens(), s.width(), back, within(back));
  expect_gaps_untouched(gathered, shift, s.tokens(), s.width(), pitch);
}

TEST(heads_are_rotated_apart_in_place_and_back) {
  std::mt19937_64 draw(kSeed + 1);
  rotates<Bf16>({2, 13, 64, 8, 2}, 0);
  rotates<Bf16>({1, 9, 128, 4, 4}, 0);
  rotates<Bf16>({1, 3, 64, 11, 1}, 0);  // more heads than a thread takes, and not a multiple of it
  rotates<Bf16>({2, 5, 64, 3, 1}, 4);   // rows that begin anywhere
  rotates<Fp16>({1, 4, 32, 2, 1}, 0);
  rotates<Fp16>({1, 3, 6, 2, 1}, 0);  // halves of three
  rotates<float>({2, 7, 64, 2, 2}, 0);
  rotates<float>({1, 2, 10, 1, 1}, 1);
  for (int round = 0; round < 4; ++round) {
    const int64_t kv_heads = random_size(draw, 1, 3), positions = random_size(draw, 1, 12);
    rotates<Bf16>({random_size(draw, 1, 3), positions, 2 * random_size(draw, 1, 40),
                   kv_heads * random_size(draw, 1, 4), kv_heads},
                  random_size(draw, 0, 9));
  }
}

// ---- cross-entropy ----

struct Row {
  double highest, sum, target;
  double lse() const { return highest + std::log(sum); }
};

template <class T>
Row row_in_fp64(const T* logits, int64_t columns, int64_t target) {
  Row row{-INFINITY, 0, 0};
  for (int64_t j = 0; j < columns; ++j) row.highest = std::fmax(row.highest, to_float(logits[j]));
  for (int64_t j = 0; j < columns && !std::isinf(row.highest); ++j)
    row.sum += std::exp(to_float(logits[j]) - row.highest);
  if (target >= 0 && target < columns) row.target = to_float(logits[target]);
  return row;
}

template <class T>
struct Logits {
  Logits(int64_t rows, int64_t columns, int64_t shift, int64_t gap, int64_t vocab_start)
      : rows(rows), columns(columns), pitch(columns + gap), shift(shift), labels(rows) {
    values = random_values<T>(shift + rows * pitch, 11);
    std::mt19937_64 draw(kSeed + 12);
    for (T& value : values) {
      if (draw() % 50 == 0) value = portable::round_to<T>(-INFINITY);  // a masked column
      if (draw() % 50 == 0) value = portable::round_to<T>(to_float(value) * 20);
    }
    for (int64_t i = 0; i < rows; ++i)
      labels[i] = i % 4 == 3 ? -100 : vocab_start + random_size(draw, -3, columns + 2);
    of = {dtype_of<T>(), rows, columns, pitch, data(), labels.data(), vocab_start};
  }

  T* data() { return values.data() + shift; }
  T* row(int64_t i) { return data() + i * pitch; }
  Row in_fp64(int64_t i) { return row_in_fp64(row(i), columns, labels[i] - of.vocab_start); }

  int64_t rows, columns, pitch, shift;
  std::vector<int64_t> labels;
  std::vector<T> values;
  PyruntimeLogits of;
};

template <class T>
void takes_statistics(int64_t rows, int64_t columns, int64_t shift, int64_t gap) {
  Logits<T> logits(rows, columns, shift, gap, 1000);
  for (int64_t j = 0; j < columns && rows > 2; ++j)
    logits.row(2)[j] = portable::round_to<T>(-INFINITY);  // a shard of masked columns alone
  std::vector<float> stats = poison<float>(3 * rows), again = stats;
  EXPECT_OK(pyruntime_cross_entropy_stats(&logits.of, stats.data(), nullptr));
  for (int64_t i = 0; i < rows; ++i) {
    const Row wanted = logits.in_fp64(i);
    EXPECT_EQ(stats[3 * i], static_cast<float>(wanted.highest));
    EXPECT(std::fabs(stats[3 * i + 1] - wanted.sum) <= 2e-6 * wanted.sum);
    EXPECT_EQ(stats[3 * i + 2], static_cast<float>(wanted.target));
  }
  for (uint64_t schedule : {1, 2}) {  // whichever warp runs ahead
    host::set_schedule(schedule);
    EXPECT_OK(pyruntime_cross_entropy_stats(&logits.of, again.data(), nullptr));
    host::set_schedule(0);
    EXPECT(std::memcmp(stats.data(), again.data(), stats.size() * sizeof(float)) == 0);
  }
}

TEST(statistics_of_a_row_are_those_of_its_logits_and_the_same_bits_again) {
  host::set_multiprocessors(1);  // fewer blocks than rows
  takes_statistics<Bf16>(11, 300, 0, 0);
  takes_statistics<Bf16>(3, 9001, 0, 7);  // every thread has several turns
  takes_statistics<Bf16>(5, 4103, 3, 0);  // every row begins elsewhere
  host::set_multiprocessors(3);
  takes_statistics<Fp16>(4, 1000, 1, 0);
  takes_statistics<float>(6, 5000, 0, 0);
  takes_statistics<float>(4, 3, 1, 0);  // less than a vector
  takes_statistics<Bf16>(2, 1, 0, 0);
  takes_statistics<Bf16>(2, 0, 0, 1);
}

template <class T>
void takes_gradients(int64_t rows, int64_t columns, int64_t shift, int64_t to_shift) {
  Logits<T> logits(rows, columns, shift, 2, 50);
  std::vector<float> lse(rows), grad = random_values<float>(rows, 13);
  for (int64_t i = 0; i < rows; ++i) {
    lse[i] = static_cast<float>(logits.in_fp64(i).lse() + 0.25);  // the other shards have a part in it
    if (logits.labels[i] == -100) grad[i] = 0;
  }
  for (int64_t i = 3; i < rows; i += 4) logits.row(i)[0] = poison<T>(1)[0];  // ignored, whatever it holds
  std::vector<T> apart = poison<T>(to_shift + rows * columns);
  EXPECT_OK(pyruntime_cross_entropy_gradient(&logits.of, lse.data(), grad.data(), apart.data() + to_shift,
                                             columns, nullptr));
  const auto wanted = [&](int64_t i, int64_t j) {
    if (grad[i] == 0) return 0.0;
    const double p = std::exp(static_cast<double>(to_float(logits.row(i)[j])) - lse[i]);
    return grad[i] * (p - (logits.labels[i] - 50 == j ? 1 : 0));
  };
  expect_close("dlogits", apart.data() + to_shift, columns, rows, columns, wanted,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted(i, j)); });
  EXPECT(to_shift == 0 || is_poison(apart[to_shift - 1]));

  std::vector<T> before = logits.values;
  EXPECT_OK(pyruntime_cross_entropy_gradient(&logits.of, lse.data(), grad.data(), logits.data(), logits.pitch,
                                             nullptr));
  for (int64_t i = 0; i < rows; ++i) {
    EXPECT(std::memcmp(logits.row(i), apart.data() + to_shift + i * columns, columns * sizeof(T)) == 0);
    if (i + 1 < rows)
      EXPECT(std::memcmp(logits.row(i) + columns, before.data() + shift + i * logits.pitch + columns,
                         2 * sizeof(T)) == 0);
  }
}

TEST(gradients_of_logits_are_those_of_the_loss_in_place_too) {
  host::set_multiprocessors(2);
  takes_gradients<Bf16>(13, 2200, 0, 0);
  takes_gradients<Bf16>(5, 333, 5, 0);
  takes_gradients<Fp16>(8, 514, 0, 3);
  takes_gradients<float>(6, 1026, 0, 0);
  takes_gradients<float>(4, 2, 1, 2);
  host::set_multiprocessors(3);
}

// ---- what is refused ----

void expect_refused(int code, const std::string& words, int line) {
  EXPECT_EQ(code, PYRUNTIME_INVALID);
  const std::string said = pyruntime_error();
  if (said.find(words) == std::string::npos)
    check::fail(__FILE__, line, "\"" + said + "\" does not say \"" + words + "\"");
}

TEST(wrong_arguments_are_refused_in_a_sentence) {
  std::vector<Bf16> memory = poison<Bf16>(64);
  PyruntimeSwiglu swiglu{};
  swiglu.rows = 2;
  swiglu.features = 8;
  swiglu.gate = swiglu.up = swiglu.y = memory.data();
  swiglu.gate_up_pitch = swiglu.y_pitch = swiglu.dgate_dup_pitch = 8;
  const auto swiglu_with = [&](const std::function<void(PyruntimeSwiglu&)>& change) {
    PyruntimeSwiglu changed = swiglu;
    change(changed);
    return pyruntime_swiglu(&changed, nullptr);
  };
  expect_refused(pyruntime_swiglu(nullptr, nullptr), "swiglu: the operands are a null pointer.", __LINE__);
  expect_refused(swiglu_with([](auto& s) { s.dtype = 3; }), "dtype=3; use 0 (bf16), 1 (fp16) or 2 (fp32).",
                 __LINE__);
  expect_refused(swiglu_with([](auto& s) { s.rows = -1; }), "rows=-1", __LINE__);
  expect_refused(swiglu_with([](auto& s) { s.y_pitch = 7; }), "y_pitch=7, but a row has 8", __LINE__);
  expect_refused(swiglu_with([](auto& s) { s.up = nullptr; }), "up and y is a null pointer", __LINE__);
  expect_refused(pyruntime_swiglu_backward(&swiglu, nullptr), "one of dgate and dup is a null pointer",
                 __LINE__);

  Gating<Bf16> gating(2, 8, kSwiglu);
  const auto gating_with = [&](const std::function<void(PyruntimeGating&)>& change) {
    PyruntimeGating changed = gating.operands(gating.y);
    change(changed);
    return pyruntime_weighted_gating(&changed, nullptr);
  };
  expect_refused(pyruntime_weighted_gating(nullptr, nullptr), "weighted_gating: the operands are a null",
                 __LINE__);
  expect_refused(gating_with([](auto& g) { g.features = -1; }), "features=-1; neither may be negative",
                 __LINE__);
  expect_refused(gating_with([](auto& g) { g.interleaved = 2; }), "interleaved=2; use 0", __LINE__);
  expect_refused(gating_with([](auto& g) { g.limit = -1; }), "limit=-1; it may not be negative", __LINE__);
  expect_refused(gating_with([](auto& g) { g.weights = nullptr; }), "weights is a null pointer", __LINE__);
  expect_refused(gating_with([](auto& g) { g.y = nullptr; }), "gate_up and y is a null pointer", __LINE__);
  PyruntimeGating backward = gating.operands(gating.y);
  expect_refused(pyruntime_weighted_gating_backward(&backward, nullptr), "dweights is a null pointer",
                 __LINE__);
  backward.dweights = gating.dp.data();
  expect_refused(pyruntime_weighted_gating_backward(&backward, nullptr),
                 "grad and dgate_up is a null pointer", __LINE__);

  PyruntimeRope rope{};
  rope.batch = rope.positions = 1;
  rope.head_dim = 7;
  rope.heads[0] = 1;
  expect_refused(pyruntime_rope(&rope, nullptr), "rope: head_dim=7; it must be even", __LINE__);
  rope.head_dim = 8;
  expect_refused(pyruntime_rope(&rope, nullptr), "one of cos and sin is a null pointer", __LINE__);
  rope.cos = rope.sin = reinterpret_cast<const float*>(memory.data());
  expect_refused(pyruntime_rope(&rope, nullptr), "q is a null pointer", __LINE__);
  rope.heads[0] = -2;
  expect_refused(pyruntime_rope(&rope, nullptr), "q has -2 heads", __LINE__);

  PyruntimeLogits logits{PYRUNTIME_BF16, 1, 8, 8, memory.data(), nullptr, 0};
  float row[3];
  expect_refused(pyruntime_cross_entropy_stats(&logits, row, nullptr), "labels is a null pointer", __LINE__);
  const int64_t label = 0;
  logits.labels = &label;
  expect_refused(pyruntime_cross_entropy_stats(&logits, nullptr, nullptr), "stats is a null pointer",
                 __LINE__);
  expect_refused(pyruntime_cross_entropy_gradient(&logits, row, row, memory.data(), 7, nullptr),
                 "dpitch=7, but a row has 8", __LINE__);
  expect_refused(pyruntime_cross_entropy_gradient(&logits, row, nullptr, memory.data(), 8, nullptr),
                 "one of lse, grad and dlogits is a null pointer", __LINE__);
  EXPECT(std::all_of(memory.begin(), memory.end(), [](Bf16 x) { return x.bits == 0xffff; }));
}

}  // namespace
