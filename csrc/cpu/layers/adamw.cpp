// AdamW (Loshchilov and Hutter 2019, algorithm 2) over a list of tensors, in place and in one pass over each.
//
//   g = grad * grad_scale      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
//   p = p (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// State and arithmetic are float32 (float64 for float64 parameters). A low-precision parameter that has a
// float32 master copy becomes the rounded master; one that has none is updated in float32 and rounded, to the
// nearest, or at random so that updates which are smaller than its last bit are not lost (Zamirai et al.
// 2020, arXiv 2010.06192). Where grad_scale is NaN, nothing is updated.

#include "adamw.h"

#include "common.h"
#include "layers.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernel ----

template <typename S>
struct StepConstants {
  S beta1, one_minus_beta1, beta2, one_minus_beta2, eps, keep, step_size, root_correction, grad_scale;
};

// The new value of one element, whose moments it updates.
template <typename S>
PYRUNTIME_INLINE S updated_by(const StepConstants<S>& c, S value, S grad, S& exp_avg, S& exp_avg_sq) {
  const S g = grad * c.grad_scale;
  const S m = c.beta1 * exp_avg + c.one_minus_beta1 * g;
  const S v = c.beta2 * exp_avg_sq + c.one_minus_beta2 * (g * g);
  exp_avg = m;
  exp_avg_sq = v;
  return value * c.keep - c.step_size * m / (std::sqrt(v) * c.root_correction + c.eps);
}

struct AdamwElements {
  // `master` is what is read and updated; `rounded`, where given, receives its rounded copy.
  template <typename T, typename M, typename G, typename S>
  static PYRUNTIME_INLINE void run(T* rounded, M* master, const G* grad, S* exp_avg, S* exp_avg_sq,
                                   int64_t count, const StepConstants<S>* constants) {
    const StepConstants<S> c = *constants;
    const auto update = [&](int64_t i) __attribute__((always_inline)) {
      const S updated = updated_by<S>(c, load(master[i]), load(grad[i]), exp_avg[i], exp_avg_sq[i]);
      store(master[i], updated);
      return updated;
    };
    if (rounded == nullptr) {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) update(i);
    } else {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < count; ++i) store(rounded[i], update(i));
    }
  }
};

// A parameter without master that is rounded at random; `first` is the index of its first element.
struct RandomlyRoundedElements {
  template <typename G>
  static PYRUNTIME_INLINE void run(at::BFloat16* param, const G* grad, float* exp_avg, float* exp_avg_sq,
                                   int64_t count, const StepConstants<float>* constants, uint32_t seed,
                                   uint32_t first) {
    const StepConstants<float> c = *constants;
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) {
      const float updated = updated_by(c, load(param[i]), load(grad[i]), exp_avg[i], exp_avg_sq[i]);
      store_at_random(param[i], updated, random_bits(seed, first + static_cast<uint32_t>(i)));
    }
  }
};

// ---- checks ----

void check_options(const AdamwOptions& o) {
  TORCH_CHECK_VALUE(std::isfinite(o.lr) && o.lr >= 0, "adamw_: lr=", o.lr,
                    "; it must be finite and not negative.");
  TORCH_CHECK_VALUE(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "adamw_: beta1=", o.beta1,
                    ", beta2=", o.beta2, "; both must be in [0, 1).");
  TORCH_CHECK_VALUE(std::isfinite(o.eps) && o.eps >= 0, "adamw_: eps=", o.eps,
                    "; it must be finite and not negative.");
  TORCH_CHECK_VALUE(o.step >= 1, "adamw_: step=", o.step, "; the first step is 1.");
}

void check_lists(const AdamwOptions& o, const AdamwLists& lists) {
  const auto& [params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale] = lists;
  const size_t count = params.size();
  TORCH_CHECK_VALUE(grads.size() == count && exp_avg.size() == count && exp_avg_sq.size() == count &&
                        weight_decay.size() == count && (masters.empty() || masters.size() == count),
                    "adamw_: ", count, " params came with ", grads.size(), " grads, ", exp_avg.size(),
                    " exp_avg, ", exp_avg_sq.size(), " exp_avg_sq, ", weight_decay.size(),
                    " weight_decay and ", masters.size(),
                    " masters; there must be one of each for every param (masters may be empty).");
  TORCH_CHECK_VALUE(o.seeds.size() == o.firsts.size() && (o.seeds.empty() || o.seeds.size() == count),
                    "adamw_: ", count, " params came with ", o.seeds.size(), " seeds and ", o.firsts.size(),
                    " firsts; there must be one of each for every param, or none.");
  TORCH_CHECK_VALUE(!grad_scale || grad_scale->numel() == 1, "adamw_: grad_scale has ",
                    grad_scale ? grad_scale->numel() : 1, " elements; it must have one.");
}

void check_tensors(const AdamwOptions& o, size_t i, const Tensor& param, const Tensor& grad,
                   const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& master) {
  check_floating(param, "adamw_", "a param");
  check_floating(grad, "adamw_", "a grad");
  const at::ScalarType state = statistics_dtype(param.scalar_type());
  const auto check_like_param = [&](const Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), "adamw_: ", name, "[", i, "] has shape ",
                      tensor.sizes(), " and its param ", param.sizes(), "; they must be equal.");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "adamw_: ", name, "[", i, "] has strides ", tensor.strides(),
                      "; it is updated in place and must be contiguous.");
  };
  const auto check_state = [&](const Tensor& tensor, const char* name) {
    check_like_param(tensor, name);
    TORCH_CHECK_TYPE(tensor.scalar_type() == state, "adamw_: ", name, "[", i, "] has dtype ",
                     tensor.scalar_type(), "; for a param of ", param.scalar_type(), " it must be ", state,
                     ".");
  };
  check_like_param(param, "params");
  check_state(exp_avg, "exp_avg");
  check_state(exp_avg_sq, "exp_avg_sq");
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "adamw_: grads[", i, "] has shape ", grad.sizes(),
                    " and its param ", param.sizes(), "; they must be equal.");
  TORCH_CHECK_TYPE((grad.scalar_type() == at::kDouble) == (param.scalar_type() == at::kDouble),
                   "adamw_: grads[", i, "] has dtype ", grad.scalar_type(), " and its param ",
                   param.scalar_type(), "; float64 goes with float64 only.");
  TORCH_CHECK_TYPE(!o.rounds_at_random() || param.scalar_type() != at::kHalf, "adamw_: params[", i,
                   "] has dtype Half, which is not rounded at random; use bfloat16, or masters.");
  TORCH_CHECK_VALUE(!o.rounds_at_random() || !master.defined(), "adamw_: params[", i,
                    "] has a master, which is rounded to the nearest; leave out masters, or the seeds.");
  if (master.defined()) {
    check_state(master, "masters");
    TORCH_CHECK_VALUE(param.scalar_type() != state, "adamw_: masters[", i, "] was given for a param of ",
                      state, ", which is its own master; pass an empty tensor in its place.");
  }
}

// ---- op on the CPU ----

template <typename S>
StepConstants<S> step_constants(const AdamwOptions& o, double weight_decay, double grad_scale) {
  const double correction1 = 1 - std::pow(o.beta1, o.step), correction2 = 1 - std::pow(o.beta2, o.step);
  return {S(o.beta1),
          S(1 - o.beta1),
          S(o.beta2),
          S(1 - o.beta2),
          S(o.eps),
          S(1 - o.lr * weight_decay),
          S(o.lr / correction1),
          S(1 / std::sqrt(correction2)),
          S(grad_scale)};
}

struct Randomness {
  uint32_t seed, first;
};

template <typename T, typename G>
void adamw_tensor(const Tensor& param, const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const StepConstants<acc_t<T>>& constants,
                  const std::optional<Randomness>& random) {
  using S = acc_t<T>;
  T* param_data = param.mutable_data_ptr<T>();
  S* master_data = master.defined() ? master.mutable_data_ptr<S>() : nullptr;
  const G* grad_data = grad.const_data_ptr<G>();
  S *exp_avg_data = exp_avg.mutable_data_ptr<S>(), *exp_avg_sq_data = exp_avg_sq.mutable_data_ptr<S>();
  const int64_t count = param.numel(), tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  at::parallel_for(0, tasks, 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kElementsPerTask, size = std::min(count, end * kElementsPerTask) - first;
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (random) {
        simd_run<RandomlyRoundedElements>(param_data + first, grad_data + first, exp_avg_data + first,
                                          exp_avg_sq_data + first, size, &constants, random->seed,
                                          random->first + static_cast<uint32_t>(first));
        return;
      }
    }
    if (master_data != nullptr) {
      simd_run<AdamwElements>(param_data + first, master_data + first, grad_data + first,
                              exp_avg_data + first, exp_avg_sq_data + first, size, &constants);
    } else {
      simd_run<AdamwElements>(static_cast<T*>(nullptr), param_data + first, grad_data + first,
                              exp_avg_data + first, exp_avg_sq_data + first, size, &constants);
    }
  });
}

template <typename T>
void adamw_param(const Tensor& param, const Tensor& master, const Tensor& grad_in, const Tensor& exp_avg,
                 const Tensor& exp_avg_sq, const StepConstants<acc_t<T>>& constants,
                 const std::optional<Randomness>& random) {
  const Tensor grad = grad_in.contiguous();
  switch (grad.scalar_type()) {
    case at::kBFloat16:
      return adamw_tensor<T, at::BFloat16>(param, master, grad, exp_avg, exp_avg_sq, constants, random);
    case at::kHalf:
      return adamw_tensor<T, at::Half>(param, master, grad, exp_avg, exp_avg_sq, constants, random);
    default:
      return adamw_tensor<T, acc_t<T>>(param, master, grad, exp_avg, exp_avg_sq, constants, random);
  }
}

std::optional<Randomness> randomness_of(const AdamwOptions& o, size_t i) {
  if (!o.rounds_at_random()) return std::nullopt;
  return Randomness{static_cast<uint32_t>(o.seeds[i]), static_cast<uint32_t>(o.firsts[i])};
}

void adamw_cpu(at::TensorList params, at::TensorList grads, at::TensorList exp_avg, at::TensorList exp_avg_sq,
               at::TensorList masters, const std::optional<Tensor>& grad_scale, double lr, double beta1,
               double beta2, double eps, at::ArrayRef<double> weight_decay, int64_t step,
               at::IntArrayRef seeds, at::IntArrayRef firsts) {
  const AdamwOptions options{lr, beta1, beta2, eps, step, seeds, firsts};
  const AdamwLists lists{params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale};
  check_adamw(options, lists);
  const double scale = grad_scale ? grad_scale->item<double>() : 1.0;
  if (std::isnan(scale)) return;
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor master = lists.master_of(i);
    PYRUNTIME_DISPATCH_FLOAT(params[i].scalar_type(), "adamw_", [&] {
      adamw_param<scalar_t>(params[i], master, grads[i], exp_avg[i], exp_avg_sq[i],
                            step_constants<acc_t<scalar_t>>(options, weight_decay[i], scale),
                            randomness_of(options, i));
    });
    for (const Tensor& written : {params[i], exp_avg[i], exp_avg_sq[i], master}) {
      if (written.defined()) mark_written(written);
    }
  }
}

}  // namespace

// ---- shared with the op on devices ----

Tensor AdamwLists::master_of(size_t i) const {
  return masters.empty() || (masters[i].numel() == 0 && params[i].numel() != 0) ? Tensor() : masters[i];
}

void check_adamw(const AdamwOptions& options, const AdamwLists& lists) {
  check_options(options);
  check_lists(options, lists);
  for (size_t i = 0; i < lists.params.size(); ++i) {
    check_tensors(options, i, lists.params[i], lists.grads[i], lists.exp_avg[i], lists.exp_avg_sq[i],
                  lists.master_of(i));
  }
}

// ---- op on every other device ----

void adamw_composite(at::TensorList params, at::TensorList grads, at::TensorList exp_avg,
                     at::TensorList exp_avg_sq, at::TensorList masters,
                     const std::optional<Tensor>& grad_scale, double lr, double beta1, double beta2,
                     double eps, at::ArrayRef<double> weight_decay, int64_t step, at::IntArrayRef seeds,
                     at::IntArrayRef firsts) {
  const AdamwOptions options{lr, beta1, beta2, eps, step, seeds, firsts};
  const AdamwLists lists{params, grads, exp_avg, exp_avg_sq, masters, weight_decay, grad_scale};
  TORCH_CHECK_NOT_IMPLEMENTED(!options.rounds_at_random() || params.empty(),
                              "adamw_: rounding at random is implemented on the CPU; keep masters on ",
                              params[0].device(), ".");
  check_adamw(options, lists);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto c = step_constants<double>(options, weight_decay[i], 1.0);
    const at::ScalarType state = exp_avg[i].scalar_type();
    Tensor grad = grads[i].to(state), usable;
    if (grad_scale) {
      const Tensor scale = grad_scale->to(grad.device(), state).reshape({});
      grad = grad.mul(scale);
      usable = scale.isnan().logical_not();
    }
    const auto assign = [&](const Tensor& to, const Tensor& value) {
      to.copy_(usable.defined() ? at::where(usable, value, to) : value);
    };
    const Tensor m = exp_avg[i].mul(c.beta1).add_(grad, c.one_minus_beta1);
    const Tensor v = exp_avg_sq[i].mul(c.beta2).addcmul_(grad, grad, c.one_minus_beta2);
    const Tensor denominator = v.sqrt().mul_(c.root_correction).add_(c.eps);
    const Tensor master = lists.master_of(i), before = master.defined() ? master : params[i].to(state);
    const Tensor updated = before.mul(c.keep).addcdiv_(m, denominator, -c.step_size);
    assign(exp_avg[i], m);
    assign(exp_avg_sq[i], v);
    if (master.defined()) assign(master, updated);
    assign(params[i], updated.to(params[i].scalar_type()));
  }
}

void register_adamw(torch::Library& m) {
  m.def(
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] masters, Tensor? grad_scale, *, float lr, float beta1, float beta2, float eps, "
      "float[] weight_decay, int step, int[] seeds=[], int[] firsts=[]) -> ()");
  implement(m, "adamw_", adamw_cpu, adamw_composite);
}

}  // namespace pyruntime::layers
