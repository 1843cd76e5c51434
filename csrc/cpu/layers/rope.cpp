// Rotary position embedding (Su et al. 2021, eq. 34, in Hugging Face's half-rotated convention), applied to
// the fused QKV projection while it is split into heads.
//
//   [a | b] are the halves of a head:   a' = a cos_a - b sin_a        b' = b cos_b + a sin_b
//   backward (the transpose):           da = da' cos_a + db' sin_b    db = db' cos_b - da' sin_a
//
// Layouts: qkv [B * S, (H + 2 Hkv) * hd] = [q heads | k heads | v heads];  cos, sin [S or more, hd], float32
// (float64 for float64 qkv);  q [B, H, S, hd], k and v [B, Hkv, S, hd], each a transposed view of a
// contiguous [B, S, heads, hd]. So rows are written in the order in which they are read, and torch's CPU
// flash attention is as fast on them.
//
// In place (overwrite_qkv), q, k and v are views of qkv [B, S, heads, hd], and v is not touched.
//
// Saved for the backward: cos and sin.

#include <array>
#include <tuple>

#include "common.h"
#include "shared_ops.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels ----

// Rotates the heads of one position, `step_in` and `step_out` elements apart. HalfDim is hd / 2 if known at
// compile time, so that short heads are vectorised as a whole, else 0.
template <int HalfDim, bool Inverse, typename T, typename S>
PYRUNTIME_INLINE void rotate_heads(const T* in, int64_t step_in, T* out, int64_t step_out, const S* cos,
                                   const S* sin, int64_t heads, int64_t half_dim) {
  const int64_t half = HalfDim > 0 ? HalfDim : half_dim;
  for (int64_t head = 0; head < heads; ++head, in += step_in, out += step_out) {
    PYRUNTIME_SIMD
    for (int64_t j = 0; j < half; ++j) {
      const S a = load(in[j]), b = load(in[half + j]);
      if constexpr (Inverse) {
        store(out[j], a * cos[j] + b * sin[half + j]);
        store(out[half + j], b * cos[half + j] - a * sin[j]);
      } else {
        store(out[j], a * cos[j] - b * sin[j]);
        store(out[half + j], b * cos[half + j] + a * sin[half + j]);
      }
    }
  }
}

// The address of the heads of q, k or v; strides in elements.
template <typename T>
struct Place {
  T* data;
  int64_t batch_stride, head_stride, position_stride;

  T* at(int64_t batch, int64_t position) const {
    return data + batch * batch_stride + position * position_stride;
  }
};

template <typename T>
Place<T> place_of(T* data, const Tensor& heads) {
  return {data, heads.stride(0), heads.stride(1), heads.stride(2)};
}

template <typename T, typename S>
struct RopeArguments {
  std::array<Place<const T>, 3> from;  // q, k, v
  std::array<Place<T>, 3> to;
  std::array<int64_t, 3> heads;
  const S* cos;
  const S* sin;
  int64_t positions, head_dim;
};

template <int HalfDim, bool Inverse>
struct RopeTokens {
  // Rotates tokens begin..end of the B * S.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const RopeArguments<T, S>* arguments, int64_t begin, int64_t end) {
    const RopeArguments<T, S>& a = *arguments;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token / a.positions, position = token % a.positions;
      const S *cos = a.cos + position * a.head_dim, *sin = a.sin + position * a.head_dim;
      for (int part = 0; part < 3; ++part) {
        const T* in = a.from[part].at(batch, position);
        T* out = a.to[part].at(batch, position);
        const int64_t step_in = a.from[part].head_stride, step_out = a.to[part].head_stride;
        const int64_t heads = a.heads[part];
        if (part < 2) {
          rotate_heads<HalfDim, Inverse>(in, step_in, out, step_out, cos, sin, heads, a.head_dim / 2);
        } else if (in != out) {
          for (int64_t head = 0; head < heads; ++head) {
            std::memcpy(out + head * step_out, in + head * step_in, a.head_dim * sizeof(T));
          }
        }
      }
    }
  }
};

template <bool Inverse, typename T, typename S>
void rope_tokens(const RopeArguments<T, S>& arguments, int64_t begin, int64_t end) {
  switch (arguments.head_dim) {
    case 32:
      return simd_run<RopeTokens<16, Inverse>>(&arguments, begin, end);
    case 64:
      return simd_run<RopeTokens<32, Inverse>>(&arguments, begin, end);
    case 128:
      return simd_run<RopeTokens<64, Inverse>>(&arguments, begin, end);
    default:
      return simd_run<RopeTokens<0, Inverse>>(&arguments, begin, end);
  }
}

void rotate_cpu(const char* /*op*/, const Heads& from, const Heads& to, const Tensor& cos_in,
                const Tensor& sin_in, bool inverse) {
  const Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const int64_t positions = from[0].size(2), head_dim = from[0].size(3);
  PYRUNTIME_DISPATCH_FLOAT(from[0].scalar_type(), "apply_rope_qkv", [&] {
    using table_t = acc_t<scalar_t>;
    RopeArguments<scalar_t, table_t> arguments;
    arguments.cos = cos.const_data_ptr<table_t>();
    arguments.sin = sin.const_data_ptr<table_t>();
    arguments.positions = positions;
    arguments.head_dim = head_dim;
    // The written pointer is taken first: memory that is copied on write gets its copy here, and `from`,
    // which may be the same tensor, then points to that copy.
    for (int part = 0; part < 3; ++part) {
      arguments.to[part] = place_of(to[part].mutable_data_ptr<scalar_t>(), to[part]);
      arguments.from[part] = place_of(from[part].const_data_ptr<scalar_t>(), from[part]);
      arguments.heads[part] = from[part].size(1);
    }
    const int64_t columns = (arguments.heads[0] + 2 * arguments.heads[1]) * head_dim;
    at::parallel_for(0, from[0].size(0) * positions, rows_per_task(columns), [&](int64_t begin, int64_t end) {
      if (inverse) {
        rope_tokens<true>(arguments, begin, end);
      } else {
        rope_tokens<false>(arguments, begin, end);
      }
    });
  });
}

}  // namespace

// ---- checks ----

namespace {

void check_tables(const char* op, const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t positions,
                  int64_t head_dim) {
  const at::ScalarType dtype = statistics_dtype(x.scalar_type());
  TORCH_CHECK_TYPE(cos.scalar_type() == dtype && sin.scalar_type() == dtype, op, ": cos and sin have dtypes ",
                   cos.scalar_type(), " and ", sin.scalar_type(), "; for ", x.scalar_type(), " both must be ",
                   dtype, ".");
  TORCH_CHECK_VALUE(
      cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(0) >= positions && cos.size(1) == head_dim, op,
      ": cos and sin have shapes ", cos.sizes(), " and ", sin.sizes(), "; both must be [S, ", head_dim,
      "] with S at least the ", positions, " positions of a sequence.");
}

}  // namespace

void check_rope(const char* op, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                const c10::SymInt& batch, const c10::SymInt& positions, const c10::SymInt& heads,
                const c10::SymInt& kv_heads) {
  check_floating(qkv, op, "qkv");
  TORCH_CHECK_VALUE(batch >= 0 && positions >= 0 && heads > 0 && kv_heads > 0, op, ": batch=", batch,
                    ", seq=", positions, ", num_heads=", heads, ", num_kv_heads=", kv_heads,
                    "; the head counts must be positive and none may be negative.");
  const int64_t all_heads = (heads + kv_heads * 2).expect_int();
  TORCH_CHECK_VALUE(qkv.dim() == 2 && qkv.size(0) == batch * positions && qkv.size(1) > 0 &&
                        qkv.size(1) % (2 * all_heads) == 0,
                    op, ": qkv has shape ", qkv.sizes(), "; batch=", batch, ", seq=", positions,
                    ", num_heads=", heads, ", num_kv_heads=", kv_heads, " need [", batch * positions, ", ",
                    all_heads, " * head_dim] with an even head_dim.");
  check_tables(op, qkv, cos, sin, positions.expect_int(), qkv.size(1) / all_heads);
}

void check_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                         const Tensor& sin) {
  constexpr auto op = "apply_rope_qkv_backward";
  check_floating(dq, op, "dq");
  check_same_dtype(dq, "dq", dk, "dk", op);
  check_same_dtype(dq, "dq", dv, "dv", op);
  TORCH_CHECK_VALUE(dq.dim() == 4 && dk.dim() == 4 && dk.sizes() == dv.sizes() && dq.size(0) == dk.size(0) &&
                        dq.size(2) == dk.size(2) && dq.size(3) == dk.size(3) && dq.size(3) % 2 == 0,
                    op, ": dq, dk and dv have shapes ", dq.sizes(), ", ", dk.sizes(), " and ", dv.sizes(),
                    "; they must be [B, H, S, hd], [B, Hkv, S, hd] and [B, Hkv, S, hd] with an even hd.");
  check_tables(op, dq, cos, sin, dq.size(2), dq.size(3));
}

Heads heads_in_place(const Tensor& qkv, const c10::SymInt& batch, const c10::SymInt& positions,
                     const c10::SymInt& heads, const c10::SymInt& kv_heads) {
  const c10::SymInt all_heads = heads + kv_heads * 2;
  const Tensor split = qkv.view_symint({batch, positions, all_heads, qkv.sym_size(1) / all_heads});
  const auto part = [&](const c10::SymInt& first, const c10::SymInt& count) {
    return split.narrow_symint(2, first, count).transpose(1, 2);
  };
  return {part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)};
}

// ---- on every other device ----

namespace {

// [a | b] -> [-b | a]. The transpose is the negative.
Tensor rotate_half(const Tensor& x) {
  const std::vector<Tensor> halves = x.chunk(2, -1);
  return at::cat({halves[1].neg(), halves[0]}, -1);
}

}  // namespace

void rotate_composite(const char* /*op*/, const Heads& from, const Heads& to, const Tensor& cos_in,
                      const Tensor& sin_in, bool inverse) {
  const int64_t positions = from[0].size(2);
  // [S, 1, hd] against [B, S, heads, hd]
  const Tensor cos = cos_in.narrow(0, 0, positions).unsqueeze(1),
               sin = sin_in.narrow(0, 0, positions).unsqueeze(1);
  for (int part = 0; part < 2; ++part) {
    const Tensor wide = from[part].transpose(1, 2).to(cos.scalar_type());
    Tensor out = to[part].transpose(1, 2);
    if (inverse) {
      at::sub_out(out, wide.mul(cos), rotate_half(wide.mul(sin)));
    } else {
      at::add_out(out, wide.mul(cos), rotate_half(wide).mul(sin));
    }
  }
  if (!to[2].is_same(from[2])) to[2].copy_(from[2]);
}

// ---- autograd ----

namespace {

using ApplyOp = Operator<apply_rope_qkv<rotate_composite>, apply_rope_qkv<rotate_cpu>>;
using RotateOp = Operator<rotate_qkv<rotate_composite>, rotate_qkv<rotate_cpu>>;
using BackwardOp = Operator<apply_rope_qkv_backward<rotate_composite>, apply_rope_qkv_backward<rotate_cpu>>;

struct ApplyRopeQkv : Function<ApplyRopeQkv> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                               c10::SymInt batch, c10::SymInt positions, c10::SymInt heads,
                               c10::SymInt kv_heads, bool overwrite_qkv) {
    TORCH_CHECK_VALUE(!overwrite_qkv || !qkv.requires_grad() || !qkv.is_leaf(),
                      "apply_rope_qkv: overwrite_qkv=True would destroy a projection that the caller made (a "
                      "leaf of the graph); leave it False.");
    TORCH_CHECK_VALUE(!cos.requires_grad() && !sin.requires_grad(),
                      "apply_rope_qkv: cos or sin requires a gradient, which is not computed; detach them.");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({cos, sin});
    if (!overwrite_qkv) {
      auto [q, k, v] = ApplyOp::call(qkv, cos, sin, batch, positions, heads, kv_heads, false);
      return {q, k, v};
    }
    RotateOp::call(qkv, cos, sin, batch, positions, heads, kv_heads);
    // Views that autograd does not know as views: their gradients go to backward() below, not one by one to
    // the history of qkv.
    auto [q, k, v] = heads_in_place(qkv, batch, positions, heads, kv_heads);
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(8);
    result[0] = BackwardOp::call(grads[0], grads[1], grads[2], saved[0], saved[1]);
    return result;
  }
};

TORCH_LIBRARY_FRAGMENT(pyruntime, m) {
  ApplyOp::define_differentiable<ApplyRopeQkv>(
      m,
      "apply_rope_qkv(Tensor qkv, Tensor cos, Tensor sin, SymInt batch, SymInt seq, SymInt num_heads, "
      "SymInt num_kv_heads, bool overwrite_qkv=False) -> (Tensor q, Tensor k, Tensor v)");
  RotateOp::define_without_gradient(
      m,
      "rotate_qkv_(Tensor(a!) qkv, Tensor cos, Tensor sin, SymInt batch, SymInt seq, SymInt num_heads, "
      "SymInt num_kv_heads) -> ()");
  BackwardOp::define_without_gradient(
      m, "apply_rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor");
}

}  // namespace

}  // namespace pyruntime::layers
