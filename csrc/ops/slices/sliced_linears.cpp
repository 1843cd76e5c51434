// Column and row linears in two steps each, between which other work runs while rows travel.
//
//     column   begin: this rank's rows of x leave            end: Y = gather(x) @ W^T
//              end, backward: dX = dY @ W leaves, and x      begin, backward: its sums are taken, and
//              again if it was not kept                      gather(x) for dW
//     row      begin: X @ W^T leaves                         end: its sums are taken
//              end, backward: this rank's rows of dY leave   begin, backward: dX = gather(dY) @ W
//
// Autograd runs the backward steps in the reverse order of the forward ones (by its nodes' sequence numbers).
// So whatever ran between a begin and an end has its backward between theirs too, and all ranks begin their
// flights in one order in both directions. A SlicedFlight holds what two steps share; the tensor between
// them, without elements, only tells autograd that one follows the other.
//
// For a weight that several slices multiply, dY and X are kept until autograd has seen all slices. Then dW is
// one product of all rows, rounded once; a sink is called once, and between hosts dW may come later. Gathered
// rows of all slices lie in one tensor from the beginning.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/gather_matmul.h"
#include "ops/gemm/gemm.h"
#include "ops/matmul_scatter.h"
#include "ops/operators.h"
#include "ops/slices/steps.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

namespace {

// The parts as one tensor: without a copy, if each lies behind the one before it in the same memory.
at::Tensor joined_rows(const Tensors& parts) {
  if (parts.size() == 1) return parts.front();
  int64_t rows = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor& part = parts[i];
    const bool follows = part.is_contiguous() && part.is_alias_of(parts[0]) &&
                         part.storage_offset() == parts[0].storage_offset() + rows * part.size(1);
    if (!follows) return at::cat(parts, 0);
    rows += part.size(0);
  }
  return parts[0].as_strided({rows, parts[0].size(1)}, parts[0].strides());
}

// A linear's weight in one forward pass over slices, which have so many rows over all ranks.
struct SlicedWeight : torch::CustomClassHolder {
  explicit SlicedWeight(std::vector<int64_t> rows_of_slices) : rows(std::move(rows_of_slices)) {}

  std::vector<int64_t> rows;
  at::Tensor weight;
  std::map<int64_t, std::pair<at::Tensor, at::Tensor>> operands;  // dY and X, by slice, in this pass
  int pass = -1;                                                  // autograd's number of the pass
  bool later = false;                                             // between hosts

  // The rows of a slice in the memory for gathered rows of all slices.
  at::Tensor gathered(int64_t slice, int64_t width) {
    int64_t begin = 0, all = 0;
    for (int64_t each = 0; each < static_cast<int64_t>(rows.size()); ++each) {
      if (each < slice) begin += rows[each];
      all += rows[each];
    }
    if (!memory_.defined()) memory_ = at::empty({1, all, width}, weight.options());
    return memory_.narrow(1, begin, rows.at(slice));
  }

  void add(int64_t slice, const at::Tensor& dy, const at::Tensor& x, Group& group) {
    // A failed pass may have left some, which do not belong to this one.
    const int now = torch::autograd::get_current_graph_task_id();
    if (std::exchange(pass, now) != now) operands.clear();
    later = group.crosses_hosts(dy.device());
    operands[slice] = {as_matrix(dy), as_matrix(x)};
  }
  // Undefined if it comes later, or the weight's sink took it.
  at::Tensor gradient() {
    Tensors dys, xs;
    for (const auto& [slice, each] : std::exchange(operands, {})) {
      dys.push_back(each.first);
      xs.push_back(each.second);
    }
    const at::Tensor dy = joined_rows(dys).unsqueeze(0), x = joined_rows(xs).unsqueeze(0);
    forget_gathered();
    if (!later || !may_come_later(weight)) return weight_gradient(weight, dy, x, /*in_pieces=*/later);
    multiply_later(weight, "sliced weight gradient", dy, x);
    return {};
  }
  // Leaves the memory to the tensors that lie in it.
  void forget_gathered() { memory_ = at::Tensor(); }

 private:
  at::Tensor memory_;
};

// One slice's pass through one linear: its flights between two steps, in each direction.
struct SlicedFlight : torch::CustomClassHolder {
  explicit SlicedFlight(int64_t number) : slice(number) {}

  int64_t slice;
  std::string group;
  std::string tier;
  std::string wire;                    // of the gathered rows
  int64_t rows = 0;                    // of the slice, over all ranks
  int64_t width = 0;                   // of x
  bool keeps = true;                   // a column's gathered x, for the backward
  at::Tensor x, dy;                    // a column's, until the next step; x is gathered
  std::optional<GatherMatmul> gather;  // a column's forward, and backward if x was not kept; a row's backward
  std::optional<MatmulScatter> scatter;  // a row's forward, a column's backward
};

using Weight = c10::intrusive_ptr<SlicedWeight>;
using Flight = c10::intrusive_ptr<SlicedFlight>;

// The route of rows that travel under another slice's work. `rows`: the rows of all ranks, if x has only this
// rank's.
Route route_of(const SlicedFlight& flight, const char* op, const Operand& x, int64_t n, int64_t k,
               std::optional<int64_t> rows = {}) {
  return choose_route({.op = op,
                       .x = x,
                       .n = n,
                       .k = k,
                       .group = flight.group,
                       .tier = flight.tier,
                       .rows = rows,
                       .wire = flight.wire,
                       .under_other_work = true});
}

// The place of a slice's gathered rows among those of all slices, if they need memory.
std::function<at::Tensor()> memory_for(const Weight& weight, const SlicedFlight& flight, int64_t width) {
  return [weight, slice = flight.slice, width] { return weight->gathered(slice, width); };
}

// --- kernels

at::Tensor share_weight(const at::Tensor& weight, const Weight& shared) {
  shared->weight = weight;
  return mark_like(weight);
}

at::Tensor begin_column(const at::Tensor& x_shard, const at::Tensor& w,
                        const std::optional<at::Tensor>& shared, c10::string_view group, int64_t rows,
                        c10::string_view tier, c10::string_view wire, const Weight& /*weight*/,
                        const Flight& flight) {
  constexpr const char* kOp = "all_gather_matmul";
  const Operand x = Operand::of_linear(kOp, x_shard, 0, "x_shard", {w}, {at::Tensor()});
  const c10::DeviceGuard on(x_shard.device());
  flight->group = std::string(group);
  flight->tier = std::string(tier);
  flight->wire = std::string(wire);
  flight->rows = rows;
  flight->width = x.width;
  flight->keeps = !shared.has_value();
  flight->gather.emplace(route_of(*flight, kOp, x, w.size(0), x.width, rows), Op::kAllGatherMatmul, x,
                         flight->keeps ? RowsAre::kKept : RowsAre::kLent);
  return mark_like(x_shard);
}

at::Tensor end_column(const at::Tensor& /*begun*/, const at::Tensor& /*x_shard: what autograd may save*/,
                      const at::Tensor& /*shared*/, const std::optional<at::Tensor>& bias,
                      const Weight& weight, const Flight& flight) {
  const at::Tensor& w = weight->weight;
  const c10::DeviceGuard on(w.device());
  at::Tensor y = at::empty({flight->rows, w.size(0)}, w.options());
  if (flight->keeps) flight->gather->keep_in(memory_for(weight, *flight, flight->width));
  flight->gather->multiply({{y.unsqueeze(0), w, bias.value_or(at::Tensor())}}, /*transposed=*/true);
  if (flight->keeps) flight->x = flight->gather->rows();
  if (flight->slice + 1 == static_cast<int64_t>(weight->rows.size())) weight->forget_gathered();
  flight->gather->finish();
  flight->gather.reset();
  return y;
}

at::Tensor begin_row(const at::Tensor& x, const at::Tensor& /*shared*/, const std::optional<at::Tensor>& bias,
                     const Weight& weight, c10::string_view group, c10::string_view tier,
                     c10::string_view wire, const Flight& flight) {
  constexpr const char* kOp = "matmul_reduce_scatter";
  const at::Tensor added = bias.value_or(at::Tensor());
  const Operand rows = Operand::of_linear(kOp, x, 0, "x", {weight->weight}, {added});
  const c10::DeviceGuard on(x.device());
  flight->group = std::string(group);
  flight->tier = std::string(tier);
  flight->wire = std::string(wire);  // used by the backward; errors are raised here
  flight->rows = rows.rows;
  flight->width = rows.width;
  flight->scatter.emplace(route_of(*flight, kOp, rows, weight->weight.size(0), rows.width),
                          MatmulScatter::Parts{{rows}, {weight->weight}, /*transposed=*/true, added},
                          /*all=*/false);
  flight->scatter->reduce_beside();
  return mark_like(x);
}

at::Tensor end_row(const at::Tensor& /*begun*/, const Flight& flight) {
  const at::Tensor y = flight->scatter->finish().squeeze(0);
  flight->scatter.reset();
  return y;
}

// --- autograd

// The weight's gradient, once autograd has seen every slice.
struct ShareWeight : Function<ShareWeight> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& weight, const Weight& shared) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["weight"] = shared;
    return Operator<share_weight>::call(weight, shared);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*marks*/) {
    refuse_second_derivatives("a sliced linear");
    return {held<Weight>(ctx, "weight")->gradient(), at::Tensor()};
  }
};

struct BeginColumn : Function<BeginColumn> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x_shard, const at::Tensor& w,
                          const std::optional<at::Tensor>& shared, c10::string_view group, int64_t rows,
                          c10::string_view tier, c10::string_view wire, const Weight& weight,
                          const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["flight"] = flight;
    return Operator<begin_column>::call(x_shard, w, shared, group, rows, tier, wire, weight, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*marks*/) {
    const Flight flight = held<Flight>(ctx, "flight");
    variable_list result(9);
    if (flight->gather) {  // x again
      const at::Tensor dy = std::exchange(flight->dy, at::Tensor());
      held<Weight>(ctx, "weight")->add(flight->slice, dy, flight->gather->rows(), Group::get(flight->group));
      flight->gather->finish();
      flight->gather.reset();
      result[2] = mark_like(dy);
    }
    result[0] = flight->scatter->finish().squeeze(0);
    flight->scatter.reset();
    return result;
  }
};

struct EndColumn : Function<EndColumn> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& begun, const at::Tensor& x_shard,
                          const at::Tensor& shared, const std::optional<at::Tensor>& bias,
                          const Weight& weight, const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor y = Operator<end_column>::call(begun, x_shard, shared, bias, weight, flight);
    // Undefined where only shapes are computed.
    const at::Tensor x = flight->keeps ? std::exchange(flight->x, at::Tensor()) : x_shard;
    ctx->save_for_backward({x.defined() ? saved_input(x, {weight->weight}) : x, weight->weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["flight"] = flight;
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_second_derivatives("a sliced column linear");
    const Weight weight = held<Weight>(ctx, "weight");
    const Flight flight = held<Flight>(ctx, "flight");
    const Tensors saved = ctx->get_saved_variables();  // only once: checkpointing frees them then
    const at::Tensor& x = saved[0];
    const Operand dy = Operand::of(grads[0], 0, "grad");
    const c10::DeviceGuard on(dy.data.device());
    variable_list result(6);
    const bool need_dw = ctx->needs_input_grad(2);
    flight->gather.reset();  // of a pass that failed
    flight->dy = at::Tensor();
    if (need_dw && !flight->keeps) gather_again(*flight, Operand::of(x, 0, "x_shard"), weight, dy.data);
    if (ctx->needs_input_grad(0)) {
      flight->scatter.emplace(route_of(*flight, "all_gather_matmul_backward", dy, dy.width, flight->width),
                              MatmulScatter::Parts{{dy}, {saved[1]}, /*transposed=*/false}, /*all=*/false);
      flight->scatter->reduce_beside();
      result[0] = mark_like(x);
    }
    if (need_dw && flight->keeps) {
      weight->add(flight->slice, dy.data, x, Group::get(flight->group));
      result[2] = mark_like(x);
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(3)) result[3] = sum_over_rows(grads[0]);
    return result;
  }

 private:
  // x leaves again, for dW; dY is kept until it has come.
  static void gather_again(SlicedFlight& flight, const Operand& x, const Weight& weight,
                           const at::Tensor& dy) {
    const Route route =
        route_of(flight, "all_gather_matmul", x, weight->weight.size(0), x.width, flight.rows);
    flight.gather.emplace(route, Op::kAllGather, x, RowsAre::kKept);
    flight.gather->keep_in(memory_for(weight, flight, flight.width));
    flight.dy = dy;
  }
};

struct BeginRow : Function<BeginRow> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& shared,
                          const std::optional<at::Tensor>& bias, const Weight& weight, c10::string_view group,
                          c10::string_view tier, c10::string_view wire, const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({saved_input(x, {weight->weight}), weight->weight});
    ctx->saved_data["has_bias"] = bias.has_value() && bias->defined();
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["flight"] = flight;
    return Operator<begin_row>::call(x, shared, bias, weight, group, tier, wire, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*marks*/) {
    refuse_second_derivatives("a sliced row linear");
    const Weight weight = held<Weight>(ctx, "weight");
    const Flight flight = held<Flight>(ctx, "flight");
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const c10::DeviceGuard on(x.device());
    GatherMatmul& gather = *flight->gather;
    if (ctx->needs_input_grad(1)) gather.keep_in(memory_for(weight, *flight, weight->weight.size(0)));
    variable_list result(8);
    if (ctx->needs_input_grad(0)) {
      result[0] = at::empty(x.sizes(), x.options());
      gather.multiply({{result[0].unsqueeze(0), saved[1]}}, /*transposed=*/false);
    }
    if (ctx->needs_input_grad(1)) {
      weight->add(flight->slice, gather.rows(), x, Group::get(flight->group));
      result[1] = mark_like(x);
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2))
      result[2] = sum_over_rows(gather.rows());
    gather.finish();
    flight->gather.reset();
    return result;
  }
};

struct EndRow : Function<EndRow> {
  static Variable forward(AutogradContext* ctx, const at::Tensor& begun, const Flight& flight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["flight"] = flight;
    return Operator<end_row>::call(begun, flight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Flight flight = held<Flight>(ctx, "flight");
    const Operand dy = Operand::of(grads[0], 0, "grad");
    const c10::DeviceGuard on(dy.data.device());
    // The own rows are read again when dX is multiplied.
    flight->gather.emplace(
        route_of(*flight, "matmul_reduce_scatter_backward", dy, dy.width, flight->width, flight->rows),
        Op::kAllGatherMatmul, dy, RowsAre::kKept);
    return {mark_like(grads[0]), at::Tensor()};
  }
};

}  // namespace

void register_sliced_linears(torch::Library& m) {
  m.class_<SlicedWeight>("SlicedWeight").def(torch::init<std::vector<int64_t>>());
  m.class_<SlicedFlight>("SlicedFlight").def(torch::init<int64_t>());
  const std::string weight = "__torch__.torch.classes.pyruntime.SlicedWeight weight";
  const std::string flight = "__torch__.torch.classes.pyruntime.SlicedFlight flight";
  Operator<share_weight>::define_differentiable<ShareWeight>(
      m, "share_weight(Tensor tensor, " + weight + ") -> Tensor");
  Operator<begin_column>::define_differentiable<BeginColumn>(
      m,
      "begin_column(Tensor x_shard, Tensor weight, Tensor? shared, str group, int rows, str tier, "
      "str wire, " +
          weight + ", " + flight + ") -> Tensor");
  Operator<end_column>::define_differentiable<EndColumn>(
      m, "end_column(Tensor begun, Tensor x_shard, Tensor shared, Tensor? bias, " + weight + ", " + flight +
             ") -> Tensor");
  Operator<begin_row>::define_differentiable<BeginRow>(
      m, "begin_row(Tensor x, Tensor shared, Tensor? bias, " + weight + ", str group, str tier, str wire, " +
             flight + ") -> Tensor");
  Operator<end_row>::define_differentiable<EndRow>(m, "end_row(Tensor begun, " + flight + ") -> Tensor");
}

}  // namespace pyruntime
