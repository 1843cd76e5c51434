// Sums in rank order, AdamW, RMSNorm, SwiGLU, gating, rotary embedding and cross-entropy, each against fp64.
#include "layer_cases.h"

#include <array>
#include <cmath>
#include <memory>

namespace run {

namespace {

// A rounding of the result, and what fp32 and the device's exp() and division lose on the way.
template <class T>
double allowed(double wanted) {
  return (unit<T>() + 8e-6) * std::fabs(wanted) + 2e-6;
}

// ---- sums in rank order ----

template <class T>
void reduce(Rank& rank, int parts, int64_t count, bool with_bias, int64_t shift) {
  const int64_t distance = (count + 63) / 64 * 64;
  const std::vector<T> values = random_values<T>(parts * distance, 1);
  const Buffer<T> on_device(values, shift);
  std::vector<const void*> pointers;
  for (int p = 0; p < parts; ++p) pointers.push_back(on_device.data() + p * distance);
  const int64_t width = 13;
  const std::vector<T> bias = random_values<T>(width, 99);
  const Buffer<T> on_bias(bias), out(count, shift);
  ok(pyruntime_reduce(out.data(), pointers.data(), parts, count, dtype_of<T>(),
                      with_bias ? on_bias.data() : nullptr, width, /*most_blocks=*/0, rank.stream()));
  wait(rank);
  const std::vector<T> seen = out.read();
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int p = 0; p < parts; ++p) sum += static_cast<float>(value(values[p * distance + i]));
    if (with_bias) sum += static_cast<float>(value(bias[i % width]));
    require(same_bits(seen[i], rounded<T>(sum)), "element " + std::to_string(i) + " has other bits");
  }
}

// ---- AdamW ----

template <class P, class G>
void adamw(Rank& rank, const std::vector<int64_t>& sizes, bool options_on_device) {
  struct Tensor {
    std::vector<double> master, exp_avg, exp_avg_sq;
    std::unique_ptr<Buffer<float>> on_master, on_exp_avg, on_exp_avg_sq;
    std::unique_ptr<Buffer<P>> param;
    double decay;
  };
  std::vector<Tensor> tensors;
  for (size_t t = 0; t < sizes.size(); ++t) {
    const std::vector<float> master = random_values<float>(sizes[t], t);
    const std::vector<float> zeros(sizes[t], 0.0f);
    tensors.push_back({{master.begin(), master.end()},
                       std::vector<double>(sizes[t]),
                       std::vector<double>(sizes[t]),
                       std::make_unique<Buffer<float>>(master),
                       std::make_unique<Buffer<float>>(zeros),
                       std::make_unique<Buffer<float>>(zeros),
                       std::make_unique<Buffer<P>>(sizes[t]),
                       t % 2 == 0 ? 0.1 : 0.0});
  }
  const float scale = 0.5f;
  const Buffer<float> on_scale(std::vector<float>{scale});
  const Buffer<PyruntimeAdamwOptions> on_options(1);
  std::vector<std::unique_ptr<Buffer<G>>> grads;
  for (int64_t step = 1; step <= 3; ++step) {
    const PyruntimeAdamwOptions o{1e-2, 0.9, 0.99, 1e-8, step};
    device::copy(on_options.data(), &o, sizeof(o));
    std::vector<PyruntimeAdamwTensor> request;
    for (size_t t = 0; t < sizes.size(); ++t) {
      Tensor& tensor = tensors[t];
      const std::vector<G> grad = random_values<G>(sizes[t], 1000 * step + t);
      grads.push_back(std::make_unique<Buffer<G>>(grad));
      request.push_back({tensor.param->data(), tensor.on_master->data(), grads.back()->data(),
                         tensor.on_exp_avg->data(), tensor.on_exp_avg_sq->data(), sizes[t], tensor.decay, 0,
                         0});
      for (int64_t i = 0; i < sizes[t]; ++i) {
        const double g = value(grad[i]) * scale;
        double &m = tensor.exp_avg[i], &v = tensor.exp_avg_sq[i], &p = tensor.master[i];
        m = o.beta1 * m + (1 - o.beta1) * g;
        v = o.beta2 * v + (1 - o.beta2) * g * g;
        const double m_hat = m / (1 - std::pow(o.beta1, step)), v_hat = v / (1 - std::pow(o.beta2, step));
        p = p * (1 - o.lr * tensor.decay) - o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
      }
    }
    ok(pyruntime_adamw(request.data(), static_cast<int32_t>(request.size()), dtype_of<P>(), dtype_of<G>(),
                       options_on_device ? nullptr : &o, options_on_device ? on_options.data() : nullptr,
                       on_scale.data(), rank.stream()));
    wait(rank);
  }
  for (size_t t = 0; t < sizes.size(); ++t) {
    const auto close = [&](const char* what, const Buffer<float>& seen, const std::vector<double>& wanted) {
      expect_close(
          what, seen.read(), 1, sizes[t], sizes[t], [&](int64_t, int64_t j) { return wanted[j]; },
          [&](int64_t, int64_t j) { return 2e-6 * (1 + std::fabs(wanted[j])); });
    };
    close("master", *tensors[t].on_master, tensors[t].master);
    close("exp_avg", *tensors[t].on_exp_avg, tensors[t].exp_avg);
    close("exp_avg_sq", *tensors[t].on_exp_avg_sq, tensors[t].exp_avg_sq);
    const std::vector<P> param = tensors[t].param->read();
    const std::vector<float> master = tensors[t].on_master->read();
    for (int64_t i = 0; i < sizes[t]; ++i) {
      require(same_bits(param[i], rounded<P>(master[i])), "a parameter is not its master, rounded");
    }
  }
}

// Steps that are exact in fp32: v is g^2, so the parameter moves by lr to either side, and half way between
// two bf16 the random number decides. It is written here once more.
void adamw_at_random(Rank& rank) {
  const int64_t count = 4099;
  const uint32_t seed = 0x1234567u, first = 0xfffffff0u;  // the index wraps
  const auto random = [&](uint32_t x) {
    x = x * 0x9e3779b9u + seed;
    for (int i = 0; i < 2; ++i) {
      x = (x ^ x >> 16) * 0x85ebca6bu;
      x = (x ^ x >> 13) * 0xc2b2ae35u;
      x ^= x >> 16;
    }
    return x & 0xffffu;
  };
  std::vector<Bf16> before(count);
  for (int64_t i = 0; i < count; ++i) before[i].bits = static_cast<uint16_t>(0x3f80 + i % 128);  // 1 to 2
  std::vector<float> zeros(count, 0.0f), slopes(count);
  for (int64_t i = 0; i < count; ++i) slopes[i] = i % 3 == 0 ? 0.5f : -2.0f;
  const Buffer<Bf16> param(before), ahead(count);
  const Buffer<float> exp_avg(zeros), exp_avg_sq(zeros), grad(slopes);
  const PyruntimeAdamwTensor tensor{param.data(), nullptr, grad.data(), exp_avg.data(), exp_avg_sq.data(),
                                    count,        0.0,     seed,        first};
  const PyruntimeAdamwOptions options{0x1p-9, 0.0, 0.0, 0.0, 1};
  const PyruntimeAdamwAhead of{tensor, ahead.data(), nullptr};
  ok(pyruntime_adamw_ahead(&of, 1, PYRUNTIME_BF16, PYRUNTIME_FP32, &options, nullptr, 1, rank.stream()));
  ok(pyruntime_adamw(&tensor, 1, PYRUNTIME_BF16, PYRUNTIME_FP32, &options, nullptr, nullptr, rank.stream()));
  wait(rank);
  const std::vector<Bf16> found = param.read(), found_ahead = ahead.read();
  for (int64_t i = 0; i < count; ++i) {
    const float exact = static_cast<float>(value(before[i]) - std::copysign(0x1p-9, slopes[i]));
    uint32_t bits;
    std::memcpy(&bits, &exact, sizeof(bits));
    const auto wanted = static_cast<uint16_t>((bits + random(first + static_cast<uint32_t>(i))) >> 16);
    require(found[i].bits == wanted, "element " + std::to_string(i) + " is rounded otherwise");
    require(found_ahead[i].bits == wanted, "element " + std::to_string(i) + " is another ahead");
  }
}

// A step ahead, then the next one with the gradient of the first: values and states are those of two steps.
template <class P>
void adamw_ahead(Rank& rank, int64_t count, int32_t param_dtype) {
  const std::vector<float> start = random_values<float>(count, 1), zeros(count, 0.0f);
  struct States {
    Buffer<float> master, exp_avg, exp_avg_sq;
    Buffer<P> param;
  };
  States usual{Buffer<float>(start), Buffer<float>(zeros), Buffer<float>(zeros), Buffer<P>(count)};
  States late{Buffer<float>(start), Buffer<float>(zeros), Buffer<float>(zeros), Buffer<P>(count)};
  const bool is_own = param_dtype == PYRUNTIME_FP32;  // its own master
  const Buffer<Bf16> grads[2] = {Buffer<Bf16>(random_values<Bf16>(count, 2)),
                                 Buffer<Bf16>(random_values<Bf16>(count, 3))};
  const Buffer<P> ahead(count);
  const Buffer<float> scale(std::vector<float>{0.5f});
  const auto tensor_of = [&](const States& states, int step) {
    return PyruntimeAdamwTensor{is_own ? nullptr : states.param.data(),
                                states.master.data(),
                                grads[step - 1].data(),
                                states.exp_avg.data(),
                                states.exp_avg_sq.data(),
                                count,
                                0.1,
                                0,
                                0};
  };
  PyruntimeAdamwOptions before{};
  for (int step = 1; step <= 2; ++step) {
    const PyruntimeAdamwOptions options{1e-2 / step, 0.9, 0.99, 1e-8, step};
    const std::vector<float> master = late.master.read();
    const PyruntimeAdamwAhead of{tensor_of(late, step), ahead.data(), step == 1 ? nullptr : grads[0].data()};
    ok(pyruntime_adamw_ahead(&of, 1, param_dtype, PYRUNTIME_BF16, &options, step == 1 ? nullptr : &before,
                             0.5f, rank.stream()));
    wait(rank);
    if (step == 2) {
      require(std::memcmp(late.master.read().data(), usual.master.read().data(), 4 * count) == 0 &&
                  std::memcmp(late.exp_avg.read().data(), usual.exp_avg.read().data(), 4 * count) == 0 &&
                  std::memcmp(late.exp_avg_sq.read().data(), usual.exp_avg_sq.read().data(), 4 * count) == 0,
              "the states are not those of the step before");
    } else {
      require(std::memcmp(late.master.read().data(), master.data(), 4 * count) == 0, "a master was updated");
    }
    const PyruntimeAdamwTensor tensor = tensor_of(usual, step);
    ok(pyruntime_adamw(&tensor, 1, is_own ? PYRUNTIME_BF16 : param_dtype, PYRUNTIME_BF16, &options, nullptr,
                       scale.data(), rank.stream()));
    wait(rank);
    const std::vector<P> found = ahead.read(), param = usual.param.read();
    const std::vector<float> whole = usual.master.read();
    for (int64_t i = 0; i < count; ++i) {
      const bool is_alike =
          is_own ? std::memcmp(&found[i], &whole[i], 4) == 0 : same_bits(found[i], param[i]);
      require(is_alike,
              "element " + std::to_string(i) + " of step " + std::to_string(step) + " is another ahead");
    }
    before = options;
  }
}

// NaN as the gradient's scale: nothing is updated.
void adamw_left_out(Rank& rank) {
  const std::vector<float> before = random_values<float>(100, 1);
  const Buffer<float> master(before), exp_avg(before), exp_avg_sq(before), grad(before);
  const Buffer<float> scale(std::vector<float>{NAN});
  const Buffer<Bf16> param(100);
  const PyruntimeAdamwTensor tensor{
      param.data(), master.data(), grad.data(), exp_avg.data(), exp_avg_sq.data(), 100, 0.1, 0, 0};
  const PyruntimeAdamwOptions options{1e-2, 0.9, 0.99, 1e-8, 1};
  ok(pyruntime_adamw(&tensor, 1, PYRUNTIME_BF16, PYRUNTIME_FP32, &options, nullptr, scale.data(),
                     rank.stream()));
  wait(rank);
  for (const Buffer<float>* one : {&master, &exp_avg, &exp_avg_sq}) {
    const std::vector<float> seen = one->read();
    require(std::memcmp(seen.data(), before.data(), 400) == 0, "something was updated");
  }
  for (const Bf16& one : param.read()) require(is_poison(one), "a parameter was updated");
}

// ---- RMSNorm behind an addition, with a gradient of the sum ----

template <class T>
void rms_norm(Rank& rank, int64_t rows, int64_t columns, int64_t shift) {
  const int64_t count = rows * columns;
  const std::vector<T> x = random_values<T>(count, 1), residual = random_values<T>(count, 2),
                       weight = random_values<T>(columns, 3), grad = random_values<T>(count, 4),
                       also = random_values<T>(count, 5);
  const Buffer<T> on_x(x, shift), on_residual(residual, shift), on_weight(weight, shift),
      on_grad(grad, shift), on_also(also, shift), y(count, shift), summed(count, shift), dx(count, shift),
      dweight(columns, shift);
  const Buffer<float> on_rstd(rows), parts(pyruntime_rms_norm_parts(dtype_of<T>(), rows, columns) * columns);
  PyruntimeRmsNorm norm{};
  norm.dtype = dtype_of<T>();
  norm.rows = rows;
  norm.columns = columns;
  norm.x = on_x.data();
  norm.also = on_residual.data();
  norm.weight = on_weight.data();
  norm.y = y.data();
  norm.summed = summed.data();
  norm.rstd = on_rstd.data();
  norm.eps = 1e-5f;
  ok(pyruntime_rms_norm(&norm, rank.stream()));
  norm.x = summed.data();
  norm.also = on_also.data();
  norm.y = on_grad.data();
  norm.dx = dx.data();
  norm.dweight = dweight.data();
  norm.parts = parts.data();
  ok(pyruntime_rms_norm_backward(&norm, rank.stream()));
  wait(rank);

  const std::vector<T> sums = summed.read();
  const std::vector<float> rstd = on_rstd.read();
  std::vector<double> scale(rows), along(rows), wanted_dw(columns), of_dw(columns);
  for (int64_t i = 0; i < rows; ++i) {
    double squares = 0, dot = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = i * columns + j;
      const auto sum = static_cast<float>(value(x[at])) + static_cast<float>(value(residual[at]));
      require(same_bits(sums[at], rounded<T>(sum)), "x + residual has other bits");
      squares += value(sums[at]) * value(sums[at]);
      dot += value(grad[at]) * value(weight[j]) * value(sums[at]);
    }
    scale[i] = 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-5);
    along[i] = scale[i] * scale[i] * scale[i] * dot / static_cast<double>(columns);
    require(std::fabs(rstd[i] - scale[i]) <= 4e-6 * scale[i], "rstd is another");
    for (int64_t j = 0; j < columns; ++j) {
      const double one = value(grad[i * columns + j]) * value(sums[i * columns + j]) * scale[i];
      wanted_dw[j] += one;
      of_dw[j] += std::fabs(one);
    }
  }
  const auto wanted_y = [&](int64_t i, int64_t j) {
    return value(sums[i * columns + j]) * scale[i] * value(weight[j]);
  };
  const auto wanted_dx = [&](int64_t i, int64_t j) {
    const int64_t at = i * columns + j;
    return value(grad[at]) * value(weight[j]) * scale[i] - value(sums[at]) * along[i] + value(also[at]);
  };
  expect_close("y", y.read(), rows, columns, columns, wanted_y,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted_y(i, j)); });
  expect_close("dx", dx.read(), rows, columns, columns, wanted_dx,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted_dx(i, j)) + 4e-5; });
  expect_close(
      "dweight", dweight.read(), 1, columns, columns, [&](int64_t, int64_t j) { return wanted_dw[j]; },
      [&](int64_t, int64_t j) { return allowed<T>(wanted_dw[j]) + 8e-6 * of_dw[j]; });
  parts.read();
  on_x.read();
}

// ---- SwiGLU; rows of gate and up side by side, `gap` elements between rows ----

template <class T>
void swiglu(Rank& rank, int64_t rows, int64_t features, int64_t gap, int64_t shift) {
  const int64_t pitch = 2 * features + gap, y_pitch = features + gap;
  std::vector<T> gate_up = random_values<T>(rows * pitch, 1);
  for (size_t i = 0; i < gate_up.size(); i += 7)  // where the sigmoid is 0 or 1
    gate_up[i] = rounded<T>(static_cast<float>(value(gate_up[i])) * 40);
  const std::vector<T> grad = random_values<T>(rows * y_pitch, 2);
  const Buffer<T> on_gate_up(gate_up, shift), on_grad(grad, shift), y(rows * y_pitch, shift),
      dgate_up(rows * pitch, shift);
  PyruntimeSwiglu operands{};
  operands.dtype = dtype_of<T>();
  operands.rows = rows;
  operands.features = features;
  operands.gate = on_gate_up.data();
  operands.up = on_gate_up.data() + features;
  operands.y = y.data();
  operands.gate_up_pitch = operands.dgate_dup_pitch = pitch;
  operands.y_pitch = y_pitch;
  ok(pyruntime_swiglu(&operands, rank.stream()));
  operands.y = on_grad.data();
  operands.dgate = dgate_up.data();
  operands.dup = dgate_up.data() + features;
  ok(pyruntime_swiglu_backward(&operands, rank.stream()));
  wait(rank);

  const auto gate = [&](int64_t i, int64_t j) { return value(gate_up[i * pitch + j]); };
  const auto sigmoid = [&](int64_t i, int64_t j) { return 1 / (1 + std::exp(-gate(i, j))); };
  const auto wanted_y = [&](int64_t i, int64_t j) {
    return gate(i, j) * sigmoid(i, j) * gate(i, features + j);
  };
  const auto wanted_d = [&](int64_t i, int64_t j) {
    const int64_t f = j % features;
    const double g = gate(i, f), s = sigmoid(i, f), dy = value(grad[i * y_pitch + f]);
    return j < features ? dy * gate(i, features + f) * s * (1 + g * (1 - s)) : dy * g * s;
  };
  expect_close("y", y.read(), rows, features, y_pitch, wanted_y,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted_y(i, j)); });
  expect_close("dgate, dup", dgate_up.read(), rows, 2 * features, pitch, wanted_d,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted_d(i, j)) + 2e-5; });
  on_gate_up.read();
}

// ---- gating of experts; matrices `shift` elements behind an aligned address ----

template <class T>
void weighted_gating(Rank& rank, int64_t rows, int64_t features, bool interleaved, float alpha, float limit,
                     float plus, int64_t shift) {
  std::vector<T> gate_up = random_values<T>(rows * 2 * features, 1);
  for (size_t i = 0; i < gate_up.size(); i += 7)  // beyond the limits, and where the sigmoid is 0 or 1
    gate_up[i] = rounded<T>(static_cast<float>(value(gate_up[i])) * 40);
  const std::vector<T> grad = random_values<T>(rows * features, 2);
  const std::vector<float> p = random_values<float>(rows, 3);
  const Buffer<T> on_gate_up(gate_up, shift), on_grad(grad, shift), y(rows * features, shift),
      again(rows * features, shift), dgate_up(rows * 2 * features, shift);
  const Buffer<float> on_p(p, 0), dp(rows);
  PyruntimeGating operands{};
  operands.dtype = dtype_of<T>();
  operands.interleaved = interleaved ? 1 : 0;
  operands.rows = rows;
  operands.features = features;
  operands.gate_up = on_gate_up.data();
  operands.weights = on_p.data();
  operands.y = y.data();
  operands.alpha = alpha;
  operands.limit = limit;
  operands.shift = plus;
  ok(pyruntime_weighted_gating(&operands, rank.stream()));
  operands.y = again.data();
  operands.grad = on_grad.data();
  operands.dgate_up = dgate_up.data();
  operands.dweights = dp.data();
  ok(pyruntime_weighted_gating_backward(&operands, rank.stream()));
  wait(rank);

  const auto at = [&](int64_t i, int64_t half, int64_t j) {
    return value(gate_up[i * 2 * features + (interleaved ? 2 * j + half : half * features + j)]);
  };
  const auto gate = [&](int64_t i, int64_t j) { return std::min<double>(at(i, 0, j), limit); };
  const auto up = [&](int64_t i, int64_t j) {
    return std::max<double>(std::min<double>(at(i, 1, j), limit), -limit) + plus;
  };
  const auto sigmoid = [&](int64_t i, int64_t j) { return 1 / (1 + std::exp(-alpha * gate(i, j))); };
  const auto joined = [&](int64_t i, int64_t j) { return gate(i, j) * sigmoid(i, j) * up(i, j); };
  const auto wanted_y = [&](int64_t i, int64_t j) { return p[i] * joined(i, j); };
  const auto wanted_d = [&](int64_t i, int64_t column) {
    const bool is_up = interleaved ? column % 2 == 1 : column >= features;
    const int64_t j = interleaved ? column / 2 : column % features;
    const double g = gate(i, j), s = sigmoid(i, j), scaled = p[i] * value(grad[i * features + j]);
    if (is_up) return std::fabs(at(i, 1, j)) > limit ? 0.0 : scaled * g * s;
    return at(i, 0, j) > limit ? 0.0 : scaled * up(i, j) * s * (1 + alpha * g * (1 - s));
  };
  for (const Buffer<T>* each : {&y, &again}) {
    expect_close("y", each->read(), rows, features, features, wanted_y,
                 [&](int64_t i, int64_t j) { return allowed<T>(wanted_y(i, j)); });
  }
  expect_close("dgate, dup", dgate_up.read(), rows, 2 * features, 2 * features, wanted_d,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted_d(i, j)) + 5e-5; });
  std::vector<double> sums(rows), sizes(rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < features; ++j) {
      sums[i] += value(grad[i * features + j]) * joined(i, j);
      sizes[i] += std::fabs(value(grad[i * features + j]) * joined(i, j));
    }
  }
  expect_close(
      "dp", dp.read(), rows, 1, 1, [&](int64_t i, int64_t) { return sums[i]; },
      [&](int64_t i, int64_t) { return 8e-6 * sizes[i] + 1e-6; });
  on_gate_up.read();
}

// ---- rotary embedding, from rows of q, k and v into parts of their own and back ----

template <class T>
void rope(Rank& rank, int64_t batch, int64_t positions, int64_t head_dim, int64_t heads, int64_t kv_heads,
          int64_t gap) {
  const std::array<int64_t, 3> counts{heads, kv_heads, kv_heads};
  const int64_t width = (heads + 2 * kv_heads) * head_dim, pitch = width + gap, tokens = batch * positions,
                half = head_dim / 2;
  const std::vector<T> qkv = random_values<T>(tokens * pitch, 1);
  const std::vector<float> cos = random_values<float>(positions * head_dim, 2),
                           sin = random_values<float>(positions * head_dim, 3);
  const Buffer<T> rows(qkv), again(tokens * pitch);
  const Buffer<float> on_cos(cos), on_sin(sin);
  std::vector<std::unique_ptr<Buffer<T>>> parts;
  for (const int64_t count : counts) parts.push_back(std::make_unique<Buffer<T>>(tokens * count * head_dim));
  const auto in_rows = [&](PyruntimeHeads(&to)[3], T* first) {
    for (int part = 0; part < 3; ++part) {
      to[part] = {first, positions * pitch, pitch, head_dim};
      first += counts[part] * head_dim;
    }
  };
  const auto apart = [&](PyruntimeHeads(&to)[3]) {  // [batch, heads, positions, head_dim]
    for (int part = 0; part < 3; ++part) {
      const int64_t per_head = positions * head_dim;
      to[part] = {parts[part]->data(), counts[part] * per_head, head_dim, per_head};
    }
  };
  PyruntimeRope request{};
  request.dtype = dtype_of<T>();
  request.batch = batch;
  request.positions = positions;
  request.head_dim = head_dim;
  for (int part = 0; part < 3; ++part) request.heads[part] = counts[part];
  request.cos = on_cos.data();
  request.sin = on_sin.data();
  in_rows(request.from, rows.data());
  apart(request.to);
  ok(pyruntime_rope(&request, rank.stream()));
  apart(request.from);
  in_rows(request.to, again.data());
  request.inverse = 1;
  ok(pyruntime_rope(&request, rank.stream()));
  wait(rank);

  // Element `e` of a head at `position`, of the values before() gives.
  const auto turned = [&](const auto& before, int64_t position, int64_t e, bool inverse) {
    const int64_t partner = e < half ? e + half : e - half, at = position * head_dim;
    const double sign = (e < half) != inverse ? -1 : 1;
    return before(e) * cos[at + e] + sign * before(partner) * sin[at + (inverse ? partner : e)];
  };
  std::vector<std::vector<T>> seen;
  for (const auto& part : parts) seen.push_back(part->read());
  const std::vector<T> back = again.read();
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t b = token / positions, position = token % positions;
    int64_t column = 0;
    for (int part = 0; part < 3; ++part) {
      for (int64_t head = 0; head < counts[part]; ++head, column += head_dim) {
        const T* apart_at = &seen[part][((b * counts[part] + head) * positions + position) * head_dim];
        const T *from = &qkv[token * pitch + column], *to = &back[token * pitch + column];
        for (int64_t e = 0; e < head_dim; ++e) {
          const auto forward = turned([&](int64_t i) { return value(from[i]); }, position, e, false);
          const auto inverse = turned([&](int64_t i) { return value(apart_at[i]); }, position, e, true);
          const double want = part == 2 ? value(from[e]) : forward;
          const double want_back = part == 2 ? value(from[e]) : inverse;
          require(std::fabs(value(apart_at[e]) - want) <= allowed<T>(want) + 4e-6,
                  "the heads are not rotated");
          require(std::fabs(value(to[e]) - want_back) <= allowed<T>(want_back) + 4e-6,
                  "the heads are not rotated back");
        }
      }
    }
    for (int64_t j = width; j < pitch; ++j) require(is_poison(back[token * pitch + j]), "a gap was written");
  }
  const std::vector<T> left = rows.read();
  require(std::memcmp(left.data(), qkv.data(), qkv.size() * sizeof(T)) == 0, "the operand was written");
}

// ---- cross-entropy ----

template <class T>
void cross_entropy(Rank& rank, int64_t rows, int64_t columns, int64_t gap, int64_t shift) {
  const int64_t pitch = columns + gap, start = 1000;
  std::vector<T> logits = random_values<T>(rows * pitch, 11);
  std::mt19937_64 draw(seed + 12);
  for (T& one : logits) {
    if (draw() % 50 == 0) one = rounded<T>(-INFINITY);  // a masked column
    if (draw() % 50 == 0) one = rounded<T>(static_cast<float>(value(one)) * 20);
  }
  std::vector<int64_t> labels(rows);
  for (int64_t i = 0; i < rows; ++i) {
    labels[i] = i % 4 == 3 ? -100 : start - 2 + static_cast<int64_t>(draw() % (columns + 4));
  }
  std::vector<float> grad = random_values<float>(rows, 13), lse(rows);
  const Buffer<T> on_logits(logits, shift), dlogits(rows * pitch, shift);
  const Buffer<int64_t> on_labels(labels);
  const Buffer<float> stats(3 * rows), again(3 * rows);
  const PyruntimeLogits of{dtype_of<T>(), rows, columns, pitch, on_logits.data(), on_labels.data(), start};
  ok(pyruntime_cross_entropy_stats(&of, stats.data(), rank.stream()));
  ok(pyruntime_cross_entropy_stats(&of, again.data(), rank.stream()));
  wait(rank);
  const std::vector<float> seen = stats.read(), repeated = again.read();
  require(std::memcmp(seen.data(), repeated.data(), seen.size() * 4) == 0, "other bits in the second run");
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = &logits[i * pitch];
    double highest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < columns; ++j) highest = std::fmax(highest, value(row[j]));
    for (int64_t j = 0; j < columns && !std::isinf(highest); ++j) sum += std::exp(value(row[j]) - highest);
    const int64_t label = labels[i] - start;
    const double target = label >= 0 && label < columns ? value(row[label]) : 0;
    const std::string where = " of row " + std::to_string(i) + " is another";
    require(seen[3 * i] == highest, "the maximum" + where);
    require(std::fabs(seen[3 * i + 1] - sum) <= 1e-5 * sum, "the sum" + where);
    require(seen[3 * i + 2] == target, "the label's logit" + where);
    lse[i] = static_cast<float>(highest + std::log(sum) + 0.25);  // other shards have a part in it
    if (labels[i] == -100) grad[i] = 0;
  }
  const Buffer<float> on_lse(lse), on_grad(grad);
  ok(pyruntime_cross_entropy_gradient(&of, on_lse.data(), on_grad.data(), dlogits.data(), pitch,
                                      rank.stream()));
  wait(rank);
  const auto wanted = [&](int64_t i, int64_t j) {
    if (grad[i] == 0) return 0.0;
    return grad[i] * (std::exp(value(logits[i * pitch + j]) - lse[i]) - (labels[i] - start == j ? 1 : 0));
  };
  expect_close("dlogits", dlogits.read(), rows, columns, pitch, wanted,
               [&](int64_t i, int64_t j) { return allowed<T>(wanted(i, j)); });
  on_logits.read();
}

}  // namespace

void add_layer_cases(std::vector<Case>& cases) {
  const auto add = [&](const std::string& name, const std::function<void(Rank&)>& body) {
    cases.push_back({name, 1, Kind::kThreads, body});
  };
  add("reduce bf16, 8 parts", [](Rank& r) { reduce<Bf16>(r, 8, 8191, true, 0); });
  add("reduce fp16, 3 parts, unaligned", [](Rank& r) { reduce<Fp16>(r, 3, 1000, false, 1); });
  add("reduce fp32, 72 parts", [](Rank& r) { reduce<float>(r, 72, 517, true, 0); });
  add("reduce bf16, 130 parts", [](Rank& r) { reduce<Bf16>(r, 130, 517, true, 0); });
  std::vector<int64_t> many(100, 3);  // more tensors than one launch holds
  many[7] = 9001;
  many[50] = 0;
  add("AdamW bf16, 100 tensors", [many](Rank& r) { adamw<Bf16, Bf16>(r, many, false); });
  add("AdamW bf16, fp32 gradients, options on the device",
      [](Rank& r) { adamw<Bf16, float>(r, {4096, 5, 4097}, true); });
  add("AdamW fp16", [](Rank& r) { adamw<Fp16, Fp16>(r, {33}, false); });
  add("AdamW, a gradient that is not finite", adamw_left_out);
  add("AdamW, rounded at random", adamw_at_random);
  add("AdamW ahead, bf16", [](Rank& r) { adamw_ahead<Bf16>(r, 9001, PYRUNTIME_BF16); });
  add("AdamW ahead, fp16", [](Rank& r) { adamw_ahead<Fp16>(r, 70, PYRUNTIME_FP16); });
  add("AdamW ahead, fp32", [](Rank& r) { adamw_ahead<float>(r, 4097, PYRUNTIME_FP32); });
  add("RMSNorm bf16, heads", [](Rank& r) { rms_norm<Bf16>(r, 70, 128, 0); });
  add("RMSNorm bf16, a warp a row", [](Rank& r) { rms_norm<Bf16>(r, 21, 1000, 0); });
  add("RMSNorm bf16, long rows", [](Rank& r) { rms_norm<Bf16>(r, 6, 16384, 0); });
  add("RMSNorm bf16, unaligned", [](Rank& r) { rms_norm<Bf16>(r, 5, 9001, 3); });
  add("RMSNorm fp16", [](Rank& r) { rms_norm<Fp16>(r, 9, 2304, 0); });
  add("RMSNorm fp32", [](Rank& r) { rms_norm<float>(r, 7, 96, 1); });
  add("SwiGLU bf16", [](Rank& r) { swiglu<Bf16>(r, 37, 352, 0, 0); });
  add("SwiGLU bf16, rows apart", [](Rank& r) { swiglu<Bf16>(r, 5, 24, 8, 0); });
  add("SwiGLU bf16, unaligned", [](Rank& r) { swiglu<Bf16>(r, 4, 19, 1, 3); });
  add("SwiGLU fp16", [](Rank& r) { swiglu<Fp16>(r, 9, 136, 0, 0); });
  add("SwiGLU fp32", [](Rank& r) { swiglu<float>(r, 7, 101, 2, 1); });
  add("gating bf16", [](Rank& r) { weighted_gating<Bf16>(r, 37, 768, false, 1, INFINITY, 0, 0); });
  add("gating bf16, in turns, with limits",
      [](Rank& r) { weighted_gating<Bf16>(r, 21, 360, true, 1.702f, 7, 1, 0); });
  add("gating bf16, unaligned", [](Rank& r) { weighted_gating<Bf16>(r, 5, 90, false, 1, INFINITY, 0, 3); });
  add("gating fp16, with limits",
      [](Rank& r) { weighted_gating<Fp16>(r, 9, 136, false, 1.702f, 0.5f, 1, 0); });
  add("gating fp32, in turns", [](Rank& r) { weighted_gating<float>(r, 7, 101, true, 1, INFINITY, 0, 1); });
  add("RoPE bf16", [](Rank& r) { rope<Bf16>(r, 2, 13, 64, 8, 2, 0); });
  add("RoPE bf16, rows that begin anywhere", [](Rank& r) { rope<Bf16>(r, 1, 5, 64, 11, 1, 3); });
  add("RoPE fp16, halves of three", [](Rank& r) { rope<Fp16>(r, 1, 3, 6, 2, 1, 0); });
  add("RoPE fp32", [](Rank& r) { rope<float>(r, 2, 7, 128, 2, 2, 1); });
  add("cross-entropy bf16", [](Rank& r) { cross_entropy<Bf16>(r, 11, 2200, 0, 0); });
  add("cross-entropy bf16, rows that begin anywhere", [](Rank& r) { cross_entropy<Bf16>(r, 5, 4103, 0, 3); });
  add("cross-entropy fp16", [](Rank& r) { cross_entropy<Fp16>(r, 8, 514, 2, 1); });
  add("cross-entropy fp32", [](Rank& r) { cross_entropy<float>(r, 6, 5000, 4, 0); });
}

}  // namespace run
