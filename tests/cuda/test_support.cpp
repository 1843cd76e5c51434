// Copies, sums, AdamW and the merge of attention results, against fp64.
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

TEST(a_copy_of_any_size_and_address_moves_every_byte_and_no_other) {
  std::mt19937_64 draw(kSeed);
  for (int round = 0; round < 30; ++round) {
    const int64_t bytes = random_size(draw, 0, 70000),
                  from_shift = random_size(draw, 0, 1) * random_size(draw, 0, 17);
    const int64_t to_shift = from_shift == 0 ? 0 : random_size(draw, 0, 17);
    std::vector<unsigned char> from(bytes + 32), to(bytes + 64, 0xa5);
    for (auto& byte : from) byte = static_cast<unsigned char>(draw());
    EXPECT_OK(pyruntime_copy(to.data() + 16 + to_shift, from.data() + from_shift, bytes,
                             static_cast<int32_t>(random_size(draw, 0, 4)), nullptr));
    EXPECT(std::memcmp(to.data() + 16 + to_shift, from.data() + from_shift, bytes) == 0);
    EXPECT(std::all_of(to.begin(), to.begin() + 16 + to_shift, [](auto byte) { return byte == 0xa5; }));
    EXPECT(std::all_of(to.begin() + 16 + to_shift + bytes, to.end(), [](auto byte) { return byte == 0xa5; }));
  }
}

// Bit for bit what the CPU path does: from 0 on, in the order of the parts, one rounding.
template <class T>
void reduces(int parts, int64_t count, bool with_bias, int64_t shift) {
  std::vector<std::vector<T>> values;
  std::vector<const void*> pointers;
  for (int p = 0; p < parts; ++p) {
    values.push_back(random_values<T>(count + shift, p));
    pointers.push_back(values.back().data() + shift);
  }
  const int64_t width = 13;
  const std::vector<T> bias = random_values<T>(width, 99);
  std::vector<T> out = poison<T>(count + 1);
  EXPECT_OK(pyruntime_reduce(out.data(), pointers.data(), parts, count, dtype_of<T>(),
                             with_bias ? bias.data() : nullptr, width, nullptr));
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (const auto& part : values) sum += to_float(part[i + shift]);
    if (with_bias) sum += to_float(bias[i % width]);
    const T wanted = portable::round_to<T>(sum);
    if (std::memcmp(&out[i], &wanted, sizeof(T)) != 0)
      check::fail(__FILE__, __LINE__, "element " + std::to_string(i));
  }
  EXPECT(std::isnan(to_float(out[count])));
}

TEST(sums_are_taken_in_the_order_of_the_parts) {
  reduces<Bf16>(8, 8191, true, 0);
  reduces<Fp16>(3, 1000, false, 1);
  reduces<float>(4, 2050, true, 0);
  reduces<Bf16>(1, 17, false, 0);
  reduces<float>(72, 5, false, 3);
}

struct AdamwState {
  std::vector<float> master, exp_avg, exp_avg_sq;
  std::vector<double> master64, exp_avg64, exp_avg_sq64;
};

void step_in_fp64(AdamwState& state, const std::vector<double>& grad, double decay,
                  const PyruntimeAdamwOptions& o, double scale) {
  for (size_t i = 0; i < grad.size(); ++i) {
    const double g = grad[i] * scale;
    double &m = state.exp_avg64[i], &v = state.exp_avg_sq64[i], &p = state.master64[i];
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, o.step)), v_hat = v / (1 - std::pow(o.beta2, o.step));
    p = p * (1 - o.lr * decay) - o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
}

template <class P, class G>
void adamw_steps(bool options_on_device, const std::vector<int64_t>& sizes) {
  std::vector<AdamwState> states;
  std::vector<std::vector<P>> params;
  for (size_t t = 0; t < sizes.size(); ++t) {
    AdamwState state;
    state.master = random_values<float>(sizes[t], t);
    state.exp_avg.assign(sizes[t], 0);
    state.exp_avg_sq.assign(sizes[t], 0);
    state.master64.assign(state.master.begin(), state.master.end());
    state.exp_avg64.assign(sizes[t], 0);
    state.exp_avg_sq64.assign(sizes[t], 0);
    states.push_back(state);
    params.push_back(poison<P>(sizes[t]));
  }
  const float scale = 0.5f;
  for (int64_t step = 1; step <= 3; ++step) {
    const PyruntimeAdamwOptions options{1e-2, 0.9, 0.99, 1e-8, step};
    std::vector<PyruntimeAdamwTensor> tensors;
    std::vector<std::vector<G>> grads;
    for (size_t t = 0; t < sizes.size(); ++t) {
      grads.push_back(random_values<G>(sizes[t], 1000 * step + t));
      const double decay = t % 2 == 0 ? 0.1 : 0.0;
      tensors.push_back({params[t].data(), states[t].master.data(), grads[t].data(), states[t].exp_avg.data(),
                         states[t].exp_avg_sq.data(), sizes[t], decay});
      std::vector<double> grad(sizes[t]);
      for (int64_t i = 0; i < sizes[t]; ++i) grad[i] = to_float(grads[t][i]);
      step_in_fp64(states[t], grad, decay, options, scale);
    }
    EXPECT_OK(pyruntime_adamw(tensors.data(), static_cast<int32_t>(tensors.size()), dtype_of<P>(),
                              dtype_of<G>(), options_on_device ? nullptr : &options,
                              options_on_device ? &options : nullptr, &scale, nullptr));
  }
  for (size_t t = 0; t < sizes.size(); ++t) {
    const AdamwState& state = states[t];
    expect_close(
        "master", state.master.data(), sizes[t], 1, sizes[t],
        [&](int64_t, int64_t j) { return state.master64[j]; },
        [&](int64_t, int64_t j) { return 1e-6 * (1 + std::fabs(state.master64[j])); });
    for (int64_t i = 0; i < sizes[t]; ++i) {
      EXPECT_EQ(params[t][i].bits, portable::round_to<P>(state.master[i]).bits);
    }
  }
}

TEST(adamw_takes_its_steps_over_many_tensors) {
  std::vector<int64_t> many(100, 3);  // more than one launch holds
  many[7] = 9001;
  many[50] = 0;
  adamw_steps<Bf16, Bf16>(false, many);
  adamw_steps<Bf16, float>(true, {4096, 5, 4097});
  adamw_steps<Fp16, Fp16>(false, {33});
}

// Softmax over all keys at once and over two halves that are merged.
template <class T>
void merges(int64_t batch, int64_t tokens, int64_t heads, int64_t width) {
  const int64_t rows = batch * tokens * heads;
  std::vector<float> out = random_values<float>(rows * width, 1), lse(rows), block_lse(rows);
  const std::vector<T> block = random_values<T>(rows * width, 2);
  std::mt19937_64 draw(kSeed);
  std::uniform_real_distribution<float> score(-40.0f, 40.0f);
  for (int64_t i = 0; i < rows; ++i) {
    lse[i] =
        i % 5 == 1 || i % 5 == 3 ? -INFINITY : score(draw);  // some have seen no keys yet, some never will
    block_lse[i] = i % 5 == 2 || i % 5 == 3 ? -INFINITY : score(draw);
  }
  std::vector<double> wanted(rows * width), wanted_lse(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row % heads, token = row / heads % tokens, b = row / heads / tokens;
    const int64_t at = (b * heads + head) * tokens + token;
    const double mine = std::exp(static_cast<double>(lse[at])),
                 theirs = std::exp(static_cast<double>(block_lse[at]));
    wanted_lse[at] = std::log(mine + theirs);
    if (mine == 0)
      std::fill_n(out.begin() + row * width, width, NAN);  // what no keys have given counts nothing
    for (int64_t i = 0; i < width; ++i) {
      const double left = mine > 0 ? mine * out[row * width + i] : 0;
      const double right = theirs > 0 ? theirs * to_float(block[row * width + i]) : 0;
      wanted[row * width + i] = mine + theirs > 0 ? (left + right) / (mine + theirs) : 0;
    }
  }
  EXPECT_OK(pyruntime_lse_merge(out.data(), lse.data(), block.data(), block_lse.data(), batch, tokens, heads,
                                width, dtype_of<T>(), nullptr));
  expect_close(
      "out", out.data(), width, rows, width, [&](int64_t i, int64_t j) { return wanted[i * width + j]; },
      [&](int64_t i, int64_t j) { return 1e-5 * (1 + std::fabs(wanted[i * width + j])); });
  for (int64_t i = 0; i < rows; ++i) {
    const bool both_empty = std::isinf(wanted_lse[i]);
    EXPECT(both_empty ? std::isinf(lse[i]) && lse[i] < 0 : std::fabs(lse[i] - wanted_lse[i]) <= 1e-4);
  }
}

TEST(merged_attention_is_that_over_all_keys) {
  merges<Bf16>(2, 7, 3, 64);
  merges<float>(1, 11, 2, 19);
  merges<Fp16>(1, 5, 4, 136);
}

}  // namespace
