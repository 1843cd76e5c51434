// Computes the outer optimizer (pyruntime/replicas) on a tensor at the end of a round, in one pass, and the
// norms that its penalty uses.
//
//   d = z - x                          the round's displacement, from before the step
//   g = step * sent                    the outer gradient; sent: the sum of displacements that has arrived
//   m = clip(b m + g, -phi, +phi)      z = z - lr m, Nesterov: z - lr (g + b m)
//   x = x + pull (z - x)               pull = 1: x = z; and the rounded copy of x
//   sent = d                           or, if replicas do not restart at z, the new z - x
//
// All replicas compute z and m and never compare them. So arithmetic is float32 (float64 if z is), every
// product that is added is fused, and sums have a fixed number of lanes. The bits follow the definition on
// every processor, whichever parts are requested.

#include <vector>

#include "common.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels ----

// So many elements go through all parts while they are in the level 1 cache.
constexpr int64_t kTile = 512;
constexpr int64_t kLanes = 32;

template <typename S>
struct OuterSettings {
  S step, lr, momentum, clip, pull;
  bool steps, nesterov, pulls, launches, restarts;

  // A round that began at z began at z rounded to the dtype of x.
  PYRUNTIME_INLINE bool rounds() const { return pull == 1; }
};

template <typename X, typename S>
PYRUNTIME_INLINE S displacement(S z, const X& x, bool rounds) {
  X held;
  store(held, z);
  return (rounds ? static_cast<S>(load(held)) : z) - static_cast<S>(load(x));
}

struct OuterStepElements {
  template <typename X, typename W, typename S>
  static PYRUNTIME_INLINE void run(X* x, S* z, S* m, W* sent, int64_t count,
                                   const OuterSettings<S>* settings) {
    const OuterSettings<S> s = *settings;
    W before[kTile];
    for (int64_t first = 0; first < count; first += kTile) {
      const int64_t size = count - first < kTile ? count - first : kTile;
      if (s.launches && s.restarts) displace(before, z + first, x + first, size, s);
      if (s.steps) step(z + first, m + first, sent + first, size, s);
      if (s.pulls) pull(x + first, z + first, size, s);
      if (s.launches && s.restarts) {
        std::memcpy(sent + first, before, size * sizeof(W));
      } else if (s.launches) {
        displace(sent + first, z + first, x + first, size, s);
      }
    }
  }

 private:
  template <typename X, typename W, typename S>
  static PYRUNTIME_INLINE void displace(W* to, const S* z, const X* x, int64_t size,
                                        const OuterSettings<S>& s) {
    const bool rounds = s.rounds();
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < size; ++i) store(to[i], displacement(z[i], x[i], rounds));
  }

  template <typename W, typename S>
  static PYRUNTIME_INLINE void step(S* z, S* m, const W* sent, int64_t size, const OuterSettings<S>& s) {
    const S factor = s.step, lr = s.lr, momentum = s.momentum, clip = s.clip;
    const bool nesterov = s.nesterov;
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < size; ++i) {
      const S g = static_cast<S>(load(sent[i])) * factor;
      const S sum = std::fma(momentum, m[i], g);
      const S below = sum > clip ? clip : sum;
      const S clipped = below < -clip ? -clip : below;
      m[i] = clipped;
      z[i] = std::fma(-lr, nesterov ? std::fma(momentum, clipped, g) : clipped, z[i]);
    }
  }

  template <typename X, typename S>
  static PYRUNTIME_INLINE void pull(X* x, const S* z, int64_t size, const OuterSettings<S>& s) {
    if (s.pull == 1) {
      PYRUNTIME_SIMD
      for (int64_t i = 0; i < size; ++i) store(x[i], z[i]);
      return;
    }
    const S share = s.pull;
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < size; ++i) {
      const S own = static_cast<S>(load(x[i]));
      store(x[i], std::fma(share, z[i] - own, own));
    }
  }
};

struct RoundElements {
  template <typename R>
  static PYRUNTIME_INLINE void run(const float* x, R* rounded, int64_t count) {
    PYRUNTIME_SIMD
    for (int64_t i = 0; i < count; ++i) store(rounded[i], x[i]);
  }
};

// Returns the sum of apart(i)^2 in float64; element i is added in lane i mod kLanes.
template <typename Apart>
PYRUNTIME_INLINE double sum_of_squares_in_lanes(int64_t count, const Apart& apart) {
  double lanes[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    PYRUNTIME_SIMD
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = apart(first + lane);
      lanes[lane] = std::fma(value, value, lanes[lane]);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const double value = apart(i);
    lanes[i - whole] = std::fma(value, value, lanes[i - whole]);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

struct SquaredDisplacement {
  template <typename X, typename S>
  static PYRUNTIME_INLINE void run(const X* x, const S* z, int64_t count, bool rounds, double* result) {
    *result = sum_of_squares_in_lanes(count, [&](int64_t i) __attribute__((always_inline)) {
      return static_cast<double>(displacement(z[i], x[i], rounds));
    });
  }
};

struct SquaredGap {
  template <typename W, typename S>
  static PYRUNTIME_INLINE void run(const W* sent, const S* m, int64_t count, double mean, double lr,
                                   double* result) {
    *result = sum_of_squares_in_lanes(count, [&](int64_t i) __attribute__((always_inline)) {
      return std::fma(mean, static_cast<double>(load(sent[i])), -lr * static_cast<double>(m[i]));
    });
  }
};

// ---- checks ----

void check_flat(const char* op, const Tensor& tensor, const char* name, const Tensor& like) {
  check_floating(tensor, op, name);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " has strides ", tensor.strides(),
                    "; it is taken element by element and must be contiguous.");
  TORCH_CHECK_VALUE(tensor.numel() == like.numel(), op, ": ", name, " has ", tensor.numel(),
                    " elements and z ", like.numel(), "; they must have as many.");
}

void check_state(const char* op, const Tensor& state, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(state.scalar_type() == dtype, op, ": ", name, " has dtype ", state.scalar_type(),
                   "; beside the others it must be ", dtype, ".");
}

// x may be of lower precision than z, never of higher.
void check_x(const char* op, const Tensor& x, const Tensor& z) {
  check_flat(op, z, "z", z);
  check_flat(op, x, "x", z);
  check_state(op, z, "z", z.scalar_type() == at::kDouble ? at::kDouble : statistics_dtype(x.scalar_type()));
}

void check_outer_step(const char* op, const Tensor& x, const Tensor& z, const Tensor& m, const Tensor& sent,
                      const std::optional<Tensor>& rounded) {
  check_x(op, x, z);
  check_flat(op, m, "m", z);
  check_flat(op, sent, "sent", z);
  check_state(op, m, "m", z.scalar_type());
  check_state(op, z, "z", statistics_dtype(sent.scalar_type()));
  if (!rounded) return;
  check_flat(op, *rounded, "rounded", z);
  const at::ScalarType dtype = rounded->scalar_type();
  TORCH_CHECK_TYPE((dtype == at::kBFloat16 || dtype == at::kHalf) && x.scalar_type() == at::kFloat, op,
                   ": rounded has dtype ", dtype, " and x ", x.scalar_type(),
                   "; it must be bfloat16 or float16, of float32.");
}

// ---- ops ----

template <typename X, typename W>
void outer_step_tensor(const Tensor& x, const Tensor& z, const Tensor& m, const Tensor& sent,
                       const std::optional<Tensor>& rounded, const OuterSettings<double>& given) {
  using S = acc_t<W>;
  if constexpr (std::is_same_v<X, double> && !std::is_same_v<S, double>) {
    TORCH_INTERNAL_ASSERT(false, "x is of higher precision than z");
  } else {
    const OuterSettings<S> settings{S(given.step),  S(given.lr),   S(given.momentum), S(given.clip),
                                    S(given.pull),  given.steps,   given.nesterov,    given.pulls,
                                    given.launches, given.restarts};
    X* xs = x.mutable_data_ptr<X>();
    S *zs = z.mutable_data_ptr<S>(), *ms = m.mutable_data_ptr<S>();
    W* ws = sent.mutable_data_ptr<W>();
    const int64_t count = z.numel(), tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
    at::parallel_for(0, tasks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * kElementsPerTask; at < std::min(count, end * kElementsPerTask);
           at += kElementsPerTask) {
        const int64_t size = std::min(kElementsPerTask, count - at);
        simd_run<OuterStepElements>(xs + at, zs + at, ms + at, ws + at, size, &settings);
        if constexpr (std::is_same_v<X, float>) {
          if (!rounded || !given.pulls) continue;
          const X* updated = xs + at;  // still in the cache
          if (rounded->scalar_type() == at::kBFloat16) {
            simd_run<RoundElements>(updated, rounded->mutable_data_ptr<at::BFloat16>() + at, size);
          } else {
            simd_run<RoundElements>(updated, rounded->mutable_data_ptr<at::Half>() + at, size);
          }
        }
      }
    });
  }
}

void outer_step(const Tensor& x, const Tensor& z, const Tensor& m, const Tensor& sent,
                const std::optional<Tensor>& rounded, std::optional<double> step, double lr, double momentum,
                bool nesterov, double clip, double pull, bool restarts, bool pulls, bool launches) {
  constexpr auto op = "outer_step_";
  check_outer_step(op, x, z, m, sent, rounded);
  const OuterSettings<double> settings{step.value_or(0), lr,       momentum, clip,     pull,
                                       step.has_value(), nesterov, pulls,    launches, restarts};
  PYRUNTIME_DISPATCH_FLOAT(x.scalar_type(), op, [&] {
    using X = scalar_t;
    PYRUNTIME_DISPATCH_FLOAT(sent.scalar_type(), op,
                             [&] { outer_step_tensor<X, scalar_t>(x, z, m, sent, rounded, settings); });
  });
  if (pulls) mark_written(x);
  if (pulls && rounded) mark_written(*rounded);
  if (step) mark_written(z);
  if (step) mark_written(m);
  if (launches) mark_written(sent);
}

// Calls part(first, size, result) for every task and adds the results in task order.
template <typename Part>
double sum_over_tasks(int64_t count, const Part& part) {
  const int64_t tasks = (count + kElementsPerTask - 1) / kElementsPerTask;
  std::vector<double> partial(tasks);
  at::parallel_for(0, tasks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * kElementsPerTask;
      part(first, std::min(kElementsPerTask, count - first), &partial[task]);
    }
  });
  double sum = 0;
  for (const double each : partial) sum += each;
  return sum;
}

template <typename X, typename S>
double squared_displacement_of(const Tensor& z, const Tensor& x, bool rounds) {
  const S* zs = z.const_data_ptr<S>();
  const X* xs = x.const_data_ptr<X>();
  return sum_over_tasks(z.numel(), [&](int64_t first, int64_t size, double* result) {
    simd_run<SquaredDisplacement>(xs + first, zs + first, size, rounds, result);
  });
}

double squared_displacement(const Tensor& z, const Tensor& x, bool rounds) {
  constexpr auto op = "squared_displacement";
  check_x(op, x, z);
  double square = 0;
  PYRUNTIME_DISPATCH_FLOAT(x.scalar_type(), op, [&] {
    square = z.scalar_type() == at::kDouble
                 ? squared_displacement_of<scalar_t, double>(z, x, rounds)
                 : squared_displacement_of<scalar_t, acc_t<scalar_t>>(z, x, rounds);
  });
  return square;
}

double squared_gap(const Tensor& sent, const Tensor& m, double mean, double lr) {
  constexpr auto op = "squared_gap";
  check_flat(op, m, "m", m);
  check_flat(op, sent, "sent", m);
  check_state(op, m, "m", statistics_dtype(sent.scalar_type()));
  double square = 0;
  PYRUNTIME_DISPATCH_FLOAT(sent.scalar_type(), op, [&] {
    const acc_t<scalar_t>* ms = m.const_data_ptr<acc_t<scalar_t>>();
    const scalar_t* ws = sent.const_data_ptr<scalar_t>();
    square = sum_over_tasks(m.numel(), [&](int64_t first, int64_t size, double* result) {
      simd_run<SquaredGap>(ws + first, ms + first, size, mean, lr, result);
    });
  });
  return square;
}

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  constexpr auto cpu = c10::DispatchKey::CPU;
  Operator<outer_step>::define(
      m,
      "outer_step_(Tensor(a!) x, Tensor(b!) z, Tensor(c!) m, Tensor(d!) sent, Tensor(e!)? rounded, *, float? "
      "step, float lr, float momentum, bool nesterov, float clip, float pull, bool restarts, bool pulls, "
      "bool "
      "launches) -> ()",
      cpu);
  Operator<squared_displacement>::define(m, "squared_displacement(Tensor z, Tensor x, bool rounds) -> float",
                                         cpu);
  Operator<squared_gap>::define(m, "squared_gap(Tensor sent, Tensor m, float mean, float lr) -> float", cpu);
}

}  // namespace

}  // namespace pyruntime::layers
