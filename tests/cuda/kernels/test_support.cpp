// Sums in rank order and AdamW, against fp64.
#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

// Bit for bit what the CPU path does: from 0 on, in the order of the parts, one rounding.
template <class T>
void reduces(int parts, int64_t count, bool with_bias, int64_t shift, int32_t most_blocks = 0) {
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
                             with_bias ? bias.data() : nullptr, width, most_blocks, nullptr));
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

// So does any number of parts, if they lie at equal distances but for one; `other`: -1 if all do.
template <class T>
void reduces_spaced(int parts, int64_t count, int64_t distance, int other, bool with_bias) {
  const std::vector<T> all = random_values<T>(parts * distance, 1), elsewhere = random_values<T>(count, 2);
  std::vector<const void*> pointers;
  for (int p = 0; p < parts; ++p) pointers.push_back(p == other ? elsewhere.data() : &all[p * distance]);
  const std::vector<T> bias = random_values<T>(13, 99);
  std::vector<T> out = poison<T>(count + 1);
  EXPECT_OK(pyruntime_reduce(out.data(), pointers.data(), parts, count, dtype_of<T>(),
                             with_bias ? bias.data() : nullptr, 13, /*most_blocks=*/0, nullptr));
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (const void* part : pointers) sum += to_float(static_cast<const T*>(part)[i]);
    if (with_bias) sum += to_float(bias[i % 13]);
    const T wanted = portable::round_to<T>(sum);
    if (std::memcmp(&out[i], &wanted, sizeof(T)) != 0)
      check::fail(__FILE__, __LINE__, "element " + std::to_string(i));
  }
  EXPECT(std::isnan(to_float(out[count])));
}

TEST(more_parts_than_a_list_takes_lie_at_equal_distances_but_for_one) {
  for (const int other : {-1, 0, 1, 2, 50, 71, 72}) reduces_spaced<Bf16>(73, 40, 40, other, other == 50);
  reduces_spaced<float>(200, 1003, 1004, 199, true);
  reduces_spaced<Fp16>(130, 33, 35, 128, false);
}

TEST(sums_are_taken_in_the_order_of_the_parts) {
  reduces<Bf16>(8, 8191, true, 0);
  reduces<Fp16>(3, 1000, false, 1);
  reduces<float>(4, 2050, true, 0);
  reduces<Bf16>(1, 17, false, 0);
  reduces<float>(72, 5, false, 3);
  reduces<Bf16>(8, 8191, true, 0, /*most_blocks=*/2);
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
                         states[t].exp_avg_sq.data(), sizes[t], decay, 0, 0});
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

// The mean over many seeds is the exact value, which lies between two bf16; and what is no finite number
// stays.
TEST(rounding_at_random_is_exact_in_the_mean) {
  const int64_t count = 1000;
  const float lr = 0x1p-10f;  // an eighth of the step between bf16 from 1 to 2
  const PyruntimeAdamwOptions options{lr, 0, 0, 0, 1};
  double sum = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::vector<Bf16> param(count, portable::round_to<Bf16>(1.5f));
    std::vector<float> exp_avg(count), exp_avg_sq(count), grad(count, 1.0f);
    param[7] = portable::round_to<Bf16>(INFINITY);
    grad[8] = NAN;
    const PyruntimeAdamwTensor tensor{
        param.data(), nullptr, grad.data(), exp_avg.data(), exp_avg_sq.data(), count, 0, seed * 77777u, 5};
    EXPECT_OK(
        pyruntime_adamw(&tensor, 1, PYRUNTIME_BF16, PYRUNTIME_FP32, &options, nullptr, nullptr, nullptr));
    EXPECT(std::isinf(to_float(param[7])) && param[8].bits == 0x7fc0);
    for (int64_t i = 0; i < count; ++i) sum += i == 7 || i == 8 ? 0 : 1.5 - to_float(param[i]);
  }
  // Each difference is 0 or 8 lr, the second in one of eight cases: a deviation of 0.33 * 8 lr.
  const double samples = 40.0 * (count - 2);
  EXPECT(std::fabs(sum / samples - lr) < 5 * 0.33 * 8 * lr / std::sqrt(samples));
}

}  // namespace
