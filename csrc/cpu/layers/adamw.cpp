// AdamW (Loshchilov and Hutter 2019, algorithm 2) on a list of tensors, in place and in one pass over each.
//
//   g = grad * grad_scale      m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
//   p = p (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// State and arithmetic are float32 (float64 for float64 parameters). A low-precision parameter with a float32
// master copy becomes the rounded master. One without is updated in float32 and rounded to the nearest, or at
// random so that updates below its last bit are not lost (Zamirai et al. 2020, arXiv 2010.06192). If
// grad_scale is NaN, nothing is updated.
//
// adamw_ahead_ writes the updated parameters to other tensors and keeps the state: whether the step counts is
// known only later (Qi et al. 2023, arXiv 2401.10241, section 4). If it does, the next call updates the state
// first, block by block, while it is in the cache.

#include "adamw.h"

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// So many elements, 12 bytes of state each, stay in the level 2 cache between two passes.
constexpr int64_t kElementsAhead = 1 << 13;

// ---- CPU kernel ----

template <typename S>
struct StepConstants {
  S beta1, one_minus_beta1, beta2, one_minus_beta2, eps, keep, step_size, root_correction, grad_scale;
};

// Returns the new value of one element and updates its moments.
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
  // Reads and updates `master`; `rounded`, if not null, receives its rounded copy.
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

// Updates a parameter without master, rounded at random; `first` is the index of its first element.
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

// Writes the updated value of `before`, a master or a parameter without one, to `ahead`; keeps the moments.
struct ElementsAhead {
  template <typename T, typename M, typename G, typename S>
  static PYRUNTIME_INLINE void run(T* ahead, const M* before, const G* grad, const S* exp_avg,
                                   const S* exp_avg_sq, int64_t count, const StepConstants<S>* constants) {
    const StepConstants<S> c = *constants;
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) {
      S m = exp_avg[i], v = exp_avg_sq[i];
      store(ahead[i], updated_by<S>(c, load(before[i]), load(grad[i]), m, v));
    }
  }
};

struct RandomlyRoundedElementsAhead {
  template <typename G>
  static PYRUNTIME_INLINE void run(at::BFloat16* ahead, const at::BFloat16* before, const G* grad,
                                   const float* exp_avg, const float* exp_avg_sq, int64_t count,
                                   const StepConstants<float>* constants, uint32_t seed, uint32_t first) {
    const StepConstants<float> c = *constants;
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) {
      float m = exp_avg[i], v = exp_avg_sq[i];
      const float updated = updated_by(c, load(before[i]), load(grad[i]), m, v);
      store_at_random(ahead[i], updated, random_bits(seed, first + static_cast<uint32_t>(i)));
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

void check_tensors(const AdamwOptions& o, const AdamwLists& lists, size_t i) {
  const Tensor &param = lists.params[i], &grad = lists.grads[i], master = lists.master_of(i);
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
  check_state(lists.exp_avg[i], "exp_avg");
  check_state(lists.exp_avg_sq[i], "exp_avg_sq");
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

template <typename T, typename G>
void adamw_tensor(const AdamwOptions& o, const AdamwLists& lists, size_t i, const Tensor& grad,
                  double grad_scale) {
  using S = acc_t<T>;
  const StepConstants<S> constants = step_constants<S>(o, lists.weight_decay[i], grad_scale);
  const Tensor &param = lists.params[i], master = lists.master_of(i);
  T* param_data = param.mutable_data_ptr<T>();
  S* master_data = master.defined() ? master.mutable_data_ptr<S>() : nullptr;
  const G* grad_data = grad.const_data_ptr<G>();
  S* exp_avg_data = lists.exp_avg[i].mutable_data_ptr<S>();
  S* exp_avg_sq_data = lists.exp_avg_sq[i].mutable_data_ptr<S>();
  const int64_t count = param.numel(), tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  at::parallel_for(0, tasks, 4, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kElementsPerTask, size = std::min(count, end * kElementsPerTask) - first;
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (o.rounds_at_random()) {
        simd_run<RandomlyRoundedElements>(
            param_data + first, grad_data + first, exp_avg_data + first, exp_avg_sq_data + first, size,
            &constants, static_cast<uint32_t>(o.seeds[i]), static_cast<uint32_t>(o.firsts[i] + first));
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
void adamw_param(const AdamwOptions& o, const AdamwLists& lists, size_t i, double grad_scale) {
  const Tensor grad = lists.grads[i].contiguous();
  switch (grad.scalar_type()) {
    case at::kBFloat16:
      return adamw_tensor<T, at::BFloat16>(o, lists, i, grad, grad_scale);
    case at::kHalf:
      return adamw_tensor<T, at::Half>(o, lists, i, grad, grad_scale);
    default:
      return adamw_tensor<T, acc_t<T>>(o, lists, i, grad, grad_scale);
  }
}

void adamw_cpu(const AdamwOptions& options, const AdamwLists& lists) {
  check_adamw(options, lists);
  const double scale = lists.grad_scale ? lists.grad_scale->item<double>() : 1.0;
  if (std::isnan(scale)) return;
  for (size_t i = 0; i < lists.params.size(); ++i) {
    PYRUNTIME_DISPATCH_FLOAT(lists.params[i].scalar_type(), "adamw_",
                             [&] { adamw_param<scalar_t>(options, lists, i, scale); });
    for (const Tensor& written :
         {lists.params[i], lists.exp_avg[i], lists.exp_avg_sq[i], lists.master_of(i)}) {
      if (written.defined()) mark_written(written);
    }
  }
}

// ---- the step ahead of its norm ----

template <typename T, typename G>
void ahead_tensor(const AdamwOptions& o, const AdamwLists& lists, size_t i, const AdamwAhead& of,
                  const Tensor& grad, const Tensor& earlier_grad) {
  using S = acc_t<T>;
  const StepConstants<S> constants = step_constants<S>(o, lists.weight_decay[i], of.grad_scale);
  const StepConstants<S> earlier_constants =
      earlier_grad.defined() ? step_constants<S>(of.earlier(o), lists.weight_decay[i], of.grad_scale)
                             : constants;
  const Tensor &param = lists.params[i], master = lists.master_of(i);
  T* ahead_data = of.tensors[i].mutable_data_ptr<T>();
  const T* param_data = param.const_data_ptr<T>();
  const G* grad_data = grad.const_data_ptr<G>();
  const G* earlier_data = earlier_grad.defined() ? earlier_grad.const_data_ptr<G>() : nullptr;
  S* master_data = master.defined() ? master.mutable_data_ptr<S>() : nullptr;
  S* exp_avg = lists.exp_avg[i].mutable_data_ptr<S>();
  S* exp_avg_sq = lists.exp_avg_sq[i].mutable_data_ptr<S>();
  const int64_t count = param.numel(), blocks = (count + kElementsAhead - 1) / kElementsAhead;
  at::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * kElementsAhead; at < std::min(count, end * kElementsAhead);
         at += kElementsAhead) {
      const int64_t size = std::min(count - at, kElementsAhead);
      if constexpr (std::is_same_v<T, at::BFloat16>) {
        if (o.rounds_at_random()) {
          simd_run<RandomlyRoundedElementsAhead>(
              ahead_data + at, param_data + at, grad_data + at, exp_avg + at, exp_avg_sq + at, size,
              &constants, static_cast<uint32_t>(o.seeds[i]), static_cast<uint32_t>(o.firsts[i] + at));
          continue;
        }
      }
      if (master_data == nullptr) {
        simd_run<ElementsAhead>(ahead_data + at, param_data + at, grad_data + at, exp_avg + at,
                                exp_avg_sq + at, size, &constants);
        continue;
      }
      if (earlier_data != nullptr) {
        simd_run<AdamwElements>(static_cast<T*>(nullptr), master_data + at, earlier_data + at, exp_avg + at,
                                exp_avg_sq + at, size, &earlier_constants);
      }
      simd_run<ElementsAhead>(ahead_data + at, master_data + at, grad_data + at, exp_avg + at,
                              exp_avg_sq + at, size, &constants);
    }
  });
}

template <typename T>
void ahead_param(const AdamwOptions& o, const AdamwLists& lists, size_t i, const AdamwAhead& of) {
  const Tensor grad = lists.grads[i].contiguous();
  const Tensor earlier_grad = of.earlier_grads.empty() ? Tensor() : of.earlier_grads[i].contiguous();
  switch (grad.scalar_type()) {
    case at::kBFloat16:
      return ahead_tensor<T, at::BFloat16>(o, lists, i, of, grad, earlier_grad);
    case at::kHalf:
      return ahead_tensor<T, at::Half>(o, lists, i, of, grad, earlier_grad);
    default:
      return ahead_tensor<T, acc_t<T>>(o, lists, i, of, grad, earlier_grad);
  }
}

void adamw_ahead_cpu(const AdamwOptions& options, const AdamwLists& lists, const AdamwAhead& of) {
  check_adamw_ahead(options, lists, of);
  for (size_t i = 0; i < lists.params.size(); ++i) {
    PYRUNTIME_DISPATCH_FLOAT(lists.params[i].scalar_type(), "adamw_ahead_",
                             [&] { ahead_param<scalar_t>(options, lists, i, of); });
    mark_written(of.tensors[i]);
    if (of.earlier_grads.empty()) continue;
    for (const Tensor& written : {lists.exp_avg[i], lists.exp_avg_sq[i], lists.master_of(i)}) {
      mark_written(written);
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
  for (size_t i = 0; i < lists.params.size(); ++i) check_tensors(options, lists, i);
}

void check_adamw_ahead(const AdamwOptions& o, const AdamwLists& lists, const AdamwAhead& of) {
  check_adamw(o, lists);
  const auto& [ahead, earlier_grads, earlier_lr, scale] = of;
  TORCH_CHECK_VALUE(ahead.size() == lists.params.size(), "adamw_ahead_: ", lists.params.size(),
                    " params came with ", ahead.size(), " tensors to write; there must be one for each.");
  TORCH_CHECK_VALUE(earlier_grads.empty() || earlier_grads.size() == lists.params.size(),
                    "adamw_ahead_: ", lists.params.size(), " params came with ", earlier_grads.size(),
                    " earlier grads; there must be one for each, or none.");
  TORCH_CHECK_VALUE(earlier_grads.empty() || o.step > 1, "adamw_ahead_: step=", o.step,
                    " came with earlier grads; there is no step before the first.");
  for (size_t i = 0; i < ahead.size(); ++i) {
    const Tensor& param = lists.params[i];
    TORCH_CHECK_VALUE(ahead[i].sizes() == param.sizes() && ahead[i].scalar_type() == param.scalar_type() &&
                          ahead[i].is_contiguous(),
                      "adamw_ahead_: ahead[", i, "] is ", ahead[i].scalar_type(), " ", ahead[i].sizes(),
                      " and its param ", param.scalar_type(), " ", param.sizes(),
                      "; they must be alike, and ahead contiguous.");
    if (earlier_grads.empty()) continue;
    TORCH_CHECK_VALUE(lists.master_of(i).defined(), "adamw_ahead_: params[", i,
                      "] came with an earlier grad and has no master; update it when its step counts.");
    TORCH_CHECK_VALUE(earlier_grads[i].sizes() == param.sizes() &&
                          earlier_grads[i].scalar_type() == lists.grads[i].scalar_type(),
                      "adamw_ahead_: earlier_grads[", i, "] is ", earlier_grads[i].scalar_type(), " ",
                      earlier_grads[i].sizes(), " and grads[", i, "] ", lists.grads[i].scalar_type(), " ",
                      lists.grads[i].sizes(), "; they must be alike.");
  }
}

// ---- ops on every other device ----

namespace {

// Returns the bits of random_bits(seed, first + i), int64 of that shape and device.
Tensor random_bits_like(const Tensor& value, int64_t seed, int64_t first) {
  constexpr int64_t kMask = 0xffffffff;
  Tensor x = at::arange(value.numel(), value.options().dtype(at::kLong)).add_(first).bitwise_and_(kMask);
  x.mul_(int64_t{0x9e3779b9}).add_(seed).bitwise_and_(kMask);
  for (int round = 0; round < 2; ++round) {
    x.bitwise_xor_(x.bitwise_right_shift(16)).mul_(int64_t{0x85ebca6b}).bitwise_and_(kMask);
    x.bitwise_xor_(x.bitwise_right_shift(13)).mul_(int64_t{0xc2b2ae35}).bitwise_and_(kMask);
    x.bitwise_xor_(x.bitwise_right_shift(16));
  }
  return x.view(value.sizes());
}

// Returns float32 `value` in bfloat16, rounded as store_at_random() rounds.
Tensor rounded_at_random(const Tensor& value, int64_t seed, int64_t first) {
  const Tensor noise = random_bits_like(value, seed, first).bitwise_and_(0xffff);
  Tensor bits = value.contiguous().view(at::kInt).to(at::kLong).bitwise_and_(0xffffffff);
  bits.add_(noise.masked_fill_(value.isfinite().logical_not_(), 0)).bitwise_right_shift_(16);
  return bits.masked_fill_(value.isnan(), 0x7fc0).to(at::kShort).view(at::kBFloat16);
}

struct CompositeStep {
  Tensor exp_avg, exp_avg_sq, master;  // in the dtype of the states
  Tensor param;
};

// Returns what the step makes of tensor i. grad: scaled.
CompositeStep composite_step(const AdamwOptions& options, const AdamwLists& lists, size_t i,
                             const Tensor& grad) {
  const auto c = step_constants<double>(options, lists.weight_decay[i], 1.0);
  const Tensor m = lists.exp_avg[i].mul(c.beta1).add_(grad, c.one_minus_beta1);
  const Tensor v = lists.exp_avg_sq[i].mul(c.beta2).addcmul_(grad, grad, c.one_minus_beta2);
  const Tensor denominator = v.sqrt().mul_(c.root_correction).add_(c.eps);
  const Tensor &param = lists.params[i], master = lists.master_of(i);
  const Tensor before = master.defined() ? master : param.to(m.scalar_type());
  const Tensor updated = before.mul(c.keep).addcdiv_(m, denominator, -c.step_size);
  const bool at_random = options.rounds_at_random() && param.scalar_type() == at::kBFloat16;
  return {m, v, updated,
          at_random ? rounded_at_random(updated, options.seeds[i], options.firsts[i])
                    : updated.to(param.scalar_type())};
}

}  // namespace

void adamw_composite(const AdamwOptions& options, const AdamwLists& lists) {
  check_adamw(options, lists);
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::ScalarType state = lists.exp_avg[i].scalar_type();
    Tensor grad = lists.grads[i].to(state), usable;
    if (lists.grad_scale) {
      const Tensor scale = lists.grad_scale->to(grad.device(), state).reshape({});
      grad = grad.mul(scale);
      usable = scale.isnan().logical_not();
    }
    const auto assign = [&](const Tensor& to, const Tensor& value) {
      to.copy_(usable.defined() ? at::where(usable, value, to) : value);
    };
    const CompositeStep made = composite_step(options, lists, i, grad);
    assign(lists.exp_avg[i], made.exp_avg);
    assign(lists.exp_avg_sq[i], made.exp_avg_sq);
    if (const Tensor master = lists.master_of(i); master.defined()) assign(master, made.master);
    assign(lists.params[i], made.param);
  }
}

void adamw_ahead_composite(const AdamwOptions& options, const AdamwLists& lists, const AdamwAhead& of) {
  check_adamw_ahead(options, lists, of);
  if (!of.earlier_grads.empty()) {
    const std::optional<Tensor> scale =
        at::full({}, of.grad_scale, lists.masters[0].options().dtype(at::kDouble));
    adamw_composite(
        of.earlier(options),
        {lists.masters, of.earlier_grads, lists.exp_avg, lists.exp_avg_sq, {}, lists.weight_decay, scale});
  }
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const Tensor grad = lists.grads[i].to(lists.exp_avg[i].scalar_type()).mul(of.grad_scale);
    of.tensors[i].copy_(composite_step(options, lists, i, grad).param);
  }
}

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  Operator<adamw_op<adamw_composite>, adamw_op<adamw_cpu>>::define(
      m,
      "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] masters, Tensor? grad_scale, *, float lr, float beta1, float beta2, float eps, "
      "float[] weight_decay, int step, int[] seeds=[], int[] firsts=[]) -> ()");
  Operator<adamw_ahead_op<adamw_ahead_composite>, adamw_ahead_op<adamw_ahead_cpu>>::define(
      m,
      "adamw_ahead_(Tensor(a!)[] ahead, Tensor[] params, Tensor[] grads, Tensor(b!)[] exp_avg, "
      "Tensor(c!)[] exp_avg_sq, Tensor(d!)[] masters, Tensor[] earlier_grads, *, float grad_scale, float lr, "
      "float beta1, float beta2, float eps, float[] weight_decay, int step, float earlier_lr, int[] "
      "seeds=[], int[] firsts=[]) -> ()");
}

}  // namespace pyruntime::layers
