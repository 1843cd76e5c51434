// Rotary position embedding (Su et al. 2021, eq. 34, in Hugging Face's half-rotated convention) applied to
// the fused QKV projection while it is split into heads.
//
//   [a | b] are the halves of a head:   a' = a cos_a - b sin_a        b' = b cos_b + a sin_b
//   backward (the transpose):           da = da' cos_a + db' sin_b    db = db' cos_b - da' sin_a
//
// Layouts: qkv [B * S, (H + 2 Hkv) * hd] = [q heads | k heads | v heads];  cos, sin [S or more, hd], float32
// (float64 for float64 qkv);  q [B, H, S, hd], k and v [B, Hkv, S, hd], each a transposed view of a
// contiguous [B, S, heads, hd]: rows are then written in the order they are read in, and torch's CPU flash
// attention takes it at the same speed.
//
// In place (overwrite_qkv), q, k and v are views of qkv [B, S, heads, hd], of which v is not touched.
//
// Saved for the backward: cos and sin.

#include <array>
#include <tuple>

#include "common.h"
#include "composites.h"
#include "layers.h"
#include "simd.h"

namespace pyruntime::layers {
namespace {

// ---- CPU kernels ----

// One position: `heads` heads, `step_in` and `step_out` elements apart. HalfDim is hd / 2 where it is known
// when compiling, which lets short heads be vectorised as a whole, and 0 where it is not.
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

// Where the heads of one of q, k, v lie: element strides, and how many heads there are.
template <typename T>
struct Heads {
  T* data;
  int64_t batch_stride, head_stride, position_stride;
  int64_t count;

  T* at(int64_t batch, int64_t position) const {
    return data + batch * batch_stride + position * position_stride;
  }
};

template <typename T, typename S>
struct RopeArguments {
  std::array<Heads<T>, 3> parts;  // q, k, v
  T* qkv;
  int64_t qkv_stride;
  const S* cos;
  const S* sin;
  int64_t positions, head_dim;
};

template <int HalfDim, bool Backward>
struct RopeTokens {
  // Tokens begin..end of the B * S; forward reads qkv and writes the parts, backward the other way round.
  template <typename T, typename S>
  static PYRUNTIME_INLINE void run(const RopeArguments<T, S>* arguments, int64_t begin, int64_t end) {
    const RopeArguments<T, S>& a = *arguments;
    const int64_t head_dim = a.head_dim;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token / a.positions, position = token % a.positions;
      const S *cos = a.cos + position * head_dim, *sin = a.sin + position * head_dim;
      T* fused = a.qkv + token * a.qkv_stride;
      for (int part = 0; part < 3; ++part) {
        const Heads<T>& heads = a.parts[part];
        T* split = heads.at(batch, position);
        const T* in = Backward ? split : fused;
        T* out = Backward ? fused : split;
        const int64_t step_in = Backward ? heads.head_stride : head_dim;
        const int64_t step_out = Backward ? head_dim : heads.head_stride;
        if (part < 2) {
          rotate_heads<HalfDim, Backward>(in, step_in, out, step_out, cos, sin, heads.count, head_dim / 2);
        } else if (in != out) {
          for (int64_t head = 0; head < heads.count; ++head) {
            std::memcpy(out + head * step_out, in + head * step_in, head_dim * sizeof(T));
          }
        }
        fused += heads.count * head_dim;
      }
    }
  }
};

template <bool Backward, typename T, typename S>
void rope_tokens(const RopeArguments<T, S>& arguments, int64_t begin, int64_t end) {
  switch (arguments.head_dim) {
    case 32:
      return simd_run<RopeTokens<16, Backward>>(&arguments, begin, end);
    case 64:
      return simd_run<RopeTokens<32, Backward>>(&arguments, begin, end);
    case 128:
      return simd_run<RopeTokens<64, Backward>>(&arguments, begin, end);
    default:
      return simd_run<RopeTokens<0, Backward>>(&arguments, begin, end);
  }
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

void check_rope(const char* op, const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t batch,
                int64_t positions, int64_t heads, int64_t kv_heads) {
  check_floating(qkv, op, "qkv");
  TORCH_CHECK_VALUE(batch >= 0 && positions >= 0 && heads > 0 && kv_heads > 0, op, ": batch=", batch,
                    ", seq=", positions, ", num_heads=", heads, ", num_kv_heads=", kv_heads,
                    "; the head counts must be positive and none may be negative.");
  const int64_t all_heads = heads + 2 * kv_heads;
  TORCH_CHECK_VALUE(qkv.dim() == 2 && qkv.size(0) == batch * positions && qkv.size(1) > 0 &&
                        qkv.size(1) % (2 * all_heads) == 0,
                    op, ": qkv has shape ", qkv.sizes(), "; batch=", batch, ", seq=", positions,
                    ", num_heads=", heads, ", num_kv_heads=", kv_heads, " need [", batch * positions, ", ",
                    all_heads, " * head_dim] with an even head_dim.");
  check_tables(op, qkv, cos, sin, positions, qkv.size(1) / all_heads);
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

void check_rows_in_place(const Tensor& qkv) {
  TORCH_CHECK_VALUE(qkv.stride(1) == 1, "rotate_qkv_: qkv has strides ", qkv.strides(),
                    "; it is written in place and its rows must be contiguous.");
}

// ---- ops on the CPU ----

std::tuple<Tensor, Tensor, Tensor> heads_in_place(const Tensor& qkv, c10::SymInt batch, c10::SymInt positions,
                                                  c10::SymInt heads, c10::SymInt kv_heads) {
  const c10::SymInt all_heads = heads + kv_heads * 2;
  const Tensor split = qkv.view_symint({batch, positions, all_heads, qkv.sym_size(1) / all_heads});
  const auto part = [&](const c10::SymInt& first, const c10::SymInt& count) {
    return split.narrow_symint(2, first, count).transpose(1, 2);
  };
  return {part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)};
}

namespace {

Tensor with_contiguous_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

// `data` is what autograd and the dispatcher let through as const; only one direction writes to it.
template <typename T>
Heads<T> heads_of(const Tensor& part) {
  return {static_cast<T*>(const_cast<void*>(part.const_data_ptr())), part.stride(0), part.stride(1),
          part.stride(2), part.size(1)};
}

template <bool Backward>
void rope_cpu(const Tensor& qkv, const std::array<Tensor, 3>& parts, const Tensor& cos_in,
              const Tensor& sin_in) {
  const Tensor cos = cos_in.contiguous(), sin = sin_in.contiguous();
  PYRUNTIME_DISPATCH_FLOAT(qkv.scalar_type(), "apply_rope_qkv", [&] {
    using table_t = acc_t<scalar_t>;
    const RopeArguments<scalar_t, table_t> arguments{
        {heads_of<scalar_t>(parts[0]), heads_of<scalar_t>(parts[1]), heads_of<scalar_t>(parts[2])},
        static_cast<scalar_t*>(const_cast<void*>(qkv.const_data_ptr())),
        qkv.stride(0),
        cos.const_data_ptr<table_t>(),
        sin.const_data_ptr<table_t>(),
        parts[0].size(2),
        parts[0].size(3)};
    at::parallel_for(0, qkv.size(0), rows_per_task(qkv.size(1)),
                     [&](int64_t begin, int64_t end) { rope_tokens<Backward>(arguments, begin, end); });
  });
}

std::tuple<Tensor, Tensor, Tensor> apply_rope_qkv_cpu(const Tensor& qkv_in, const Tensor& cos,
                                                      const Tensor& sin, int64_t batch, int64_t positions,
                                                      int64_t heads, int64_t kv_heads,
                                                      bool /*overwrite_qkv*/) {
  check_rope("apply_rope_qkv", qkv_in, cos, sin, batch, positions, heads, kv_heads);
  const Tensor qkv = with_contiguous_rows(qkv_in);
  const int64_t head_dim = qkv.size(1) / (heads + 2 * kv_heads);
  const auto new_part = [&](int64_t count) {
    return at::empty({batch, positions, count, head_dim}, qkv.options()).transpose(1, 2);
  };
  const std::array<Tensor, 3> parts{new_part(heads), new_part(kv_heads), new_part(kv_heads)};
  rope_cpu</*Backward=*/false>(qkv, parts, cos, sin);
  return {parts[0], parts[1], parts[2]};
}

void rotate_qkv_cpu(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t batch, int64_t positions,
                    int64_t heads, int64_t kv_heads) {
  check_rope("rotate_qkv_", qkv, cos, sin, batch, positions, heads, kv_heads);
  check_rows_in_place(qkv);
  const auto [q, k, v] = heads_in_place(qkv, batch, positions, heads, kv_heads);
  rope_cpu</*Backward=*/false>(qkv, {q, k, v}, cos, sin);
  mark_written(qkv);
}

Tensor apply_rope_qkv_backward_cpu(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                                   const Tensor& sin) {
  check_rope_backward(dq, dk, dv, cos, sin);
  const Tensor dqkv =
      at::empty({dq.size(0) * dq.size(2), (dq.size(1) + 2 * dk.size(1)) * dq.size(3)}, dq.options());
  const std::array<Tensor, 3> parts{with_contiguous_rows(dq), with_contiguous_rows(dk),
                                    with_contiguous_rows(dv)};
  rope_cpu</*Backward=*/true>(dqkv, parts, cos, sin);
  return dqkv;
}

}  // namespace

// ---- ops on every other device ----

namespace {

// rotate_half [a | b] -> [-b | a], and its transpose.
Tensor rotate_half(const Tensor& x) {
  const std::vector<Tensor> halves = x.chunk(2, -1);
  return at::cat({halves[1].neg(), halves[0]}, -1);
}

Tensor rotate_half_transposed(const Tensor& x) {
  const std::vector<Tensor> halves = x.chunk(2, -1);
  return at::cat({halves[1], halves[0].neg()}, -1);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> apply_rope_qkv_composite(const Tensor& qkv, const Tensor& cos_in,
                                                            const Tensor& sin_in, int64_t batch,
                                                            int64_t positions, int64_t heads,
                                                            int64_t kv_heads, bool /*overwrite_qkv*/) {
  check_rope("apply_rope_qkv", qkv, cos_in, sin_in, batch, positions, heads, kv_heads);
  const int64_t all_heads = heads + 2 * kv_heads;
  const std::vector<Tensor> parts = qkv.reshape({batch, positions, all_heads, qkv.size(1) / all_heads})
                                        .split_with_sizes({heads, kv_heads, kv_heads}, 2);
  // [S, 1, hd] against [B, S, heads, hd]
  const Tensor cos = cos_in.narrow(0, 0, positions).unsqueeze(1),
               sin = sin_in.narrow(0, 0, positions).unsqueeze(1);
  const auto rotated = [&](const Tensor& part) {
    const Tensor wide = part.to(cos.scalar_type());
    return wide.mul(cos).add(rotate_half(wide).mul(sin)).to(qkv.scalar_type()).contiguous().transpose(1, 2);
  };
  return {rotated(parts[0]), rotated(parts[1]), parts[2].clone(at::MemoryFormat::Contiguous).transpose(1, 2)};
}

void rotate_qkv_composite(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t batch,
                          int64_t positions, int64_t heads, int64_t kv_heads) {
  check_rope("rotate_qkv_", qkv, cos, sin, batch, positions, heads, kv_heads);
  check_rows_in_place(qkv);
  const auto [q, k, v] = heads_in_place(qkv, batch, positions, heads, kv_heads);
  const auto [q_rotated, k_rotated, same_v] =
      apply_rope_qkv_composite(qkv, cos, sin, batch, positions, heads, kv_heads, /*overwrite_qkv=*/false);
  q.copy_(q_rotated);
  k.copy_(k_rotated);
}

Tensor apply_rope_qkv_backward_composite(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                         const Tensor& cos_in, const Tensor& sin_in) {
  check_rope_backward(dq, dk, dv, cos_in, sin_in);
  const int64_t positions = dq.size(2);
  const Tensor cos = cos_in.narrow(0, 0, positions).unsqueeze(1),
               sin = sin_in.narrow(0, 0, positions).unsqueeze(1);
  const auto rotated_back = [&](const Tensor& grad) {
    const Tensor wide = grad.transpose(1, 2).to(cos.scalar_type());
    return wide.mul(cos).add(rotate_half_transposed(wide.mul(sin))).to(dq.scalar_type());
  };
  const Tensor dqkv = at::cat({rotated_back(dq), rotated_back(dk), dv.transpose(1, 2)}, 2);
  return dqkv.reshape({dq.size(0) * positions, dqkv.size(2) * dqkv.size(3)});
}

// ---- autograd ----

namespace {

using RopeSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                         c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt,
                                                         bool);
using RotateSignature = void(const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                             c10::SymInt, c10::SymInt);
using RopeBackwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                     const Tensor&);

struct ApplyRopeQkv : torch::autograd::Function<ApplyRopeQkv> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                               c10::SymInt batch, c10::SymInt positions, c10::SymInt heads,
                               c10::SymInt kv_heads, bool overwrite_qkv) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_op<RopeSignature>("pyruntime::apply_rope_qkv");
    static const auto op_inplace = find_op<RotateSignature>("pyruntime::rotate_qkv_");
    ctx->save_for_backward({cos, sin});
    if (!overwrite_qkv) {
      auto [q, k, v] = op.call(qkv, cos, sin, batch, positions, heads, kv_heads, false);
      return {q, k, v};
    }
    op_inplace.call(qkv, cos, sin, batch, positions, heads, kv_heads);
    // Views that autograd does not know as such: their gradients come to backward() below, and not to qkv's
    // own history one by one.
    auto [q, k, v] = heads_in_place(qkv, batch, positions, heads, kv_heads);
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_op<RopeBackwardSignature>("pyruntime::apply_rope_qkv_backward");
    const auto saved = ctx->get_saved_variables();
    const Tensor none;
    return {
        op.call(grads[0], grads[1], grads[2], saved[0], saved[1]), none, none, none, none, none, none, none};
  }
};

std::tuple<Tensor, Tensor, Tensor> apply_rope_qkv_autograd(const Tensor& qkv, const Tensor& cos,
                                                           const Tensor& sin, c10::SymInt batch,
                                                           c10::SymInt positions, c10::SymInt heads,
                                                           c10::SymInt kv_heads, bool overwrite_qkv) {
  TORCH_CHECK_VALUE(!overwrite_qkv || !qkv.requires_grad() || !qkv.is_leaf(),
                    "apply_rope_qkv: overwrite_qkv=True would destroy a projection that the caller made (a "
                    "leaf of the graph); leave it False.");
  TORCH_CHECK_VALUE(!cos.requires_grad() && !sin.requires_grad(),
                    "apply_rope_qkv: cos or sin requires a gradient, which is not computed; detach them.");
  const variable_list out =
      ApplyRopeQkv::apply(qkv, cos, sin, batch, positions, heads, kv_heads, overwrite_qkv);
  return {out[0], out[1], out[2]};
}

}  // namespace

void register_rope(torch::Library& m) {
  m.def(
      "apply_rope_qkv(Tensor qkv, Tensor cos, Tensor sin, SymInt batch, SymInt seq, SymInt num_heads, "
      "SymInt num_kv_heads, bool overwrite_qkv=False) -> (Tensor q, Tensor k, Tensor v)");
  m.def(
      "rotate_qkv_(Tensor(a!) qkv, Tensor cos, Tensor sin, SymInt batch, SymInt seq, SymInt num_heads, "
      "SymInt num_kv_heads) -> ()");
  m.def("apply_rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor");
  implement(m, "apply_rope_qkv", apply_rope_qkv_cpu, apply_rope_qkv_composite);
  implement(m, "apply_rope_qkv_backward", apply_rope_qkv_backward_cpu, apply_rope_qkv_backward_composite);
  implement(m, "rotate_qkv_", rotate_qkv_cpu, rotate_qkv_composite);
  implement_autograd(m, "apply_rope_qkv", apply_rope_qkv_autograd);
  refuse_autograd_in_place(m, "rotate_qkv_");
  refuse_autograd(m, "apply_rope_qkv_backward");
}

}  // namespace pyruntime::layers
