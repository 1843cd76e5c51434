"""A tensor class for activations of which a rank holds some rows, while the model's code seems to read all.

A `RowShard` has the shape of the whole tensor, [.., N], with M rows (M: the product of all dimensions but the
last). Rank r holds M_r of them, [M_r, N], cut as torch.tensor_split cuts. Its gradient is a RowShard too, and
every operation gives the result for the whole tensor:

    on its own rows   pointwise operations with other RowShards of the same rows, numbers and vectors [N];
                      means, sums and norms over the last dimension; layer and RMS norm
    over the ranks    the sum over all rows, such as the gradient of a vector [N]
    gathered          anything else: all rows are gathered first, once for each RowShard

So it is right for any code, and fast for the usual code between a row and a column linear: residuals and
norms. It works below autograd (`__torch_dispatch__`), so derivatives, checkpoints and hooks see an ordinary
tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pyruntime import ops
from pyruntime.nn.parameters import TensorGroup

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes that can travel


class RowGroup:
    """The ranks over which rows are cut. reads: how often column linears took rows; gathers: how often all
    rows were gathered for code that needs them."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.reads = self.gathers = 0


class _Held:
    """Memory that RowShards which are views of each other share: this rank's rows [M_r, N], and, once
    gathered, all rows [M, N]. This rank's rows then lie inside the latter."""

    __slots__ = ("rows", "whole")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.whole: Tensor | None = None


class RowShard(Tensor):
    """This rank's rows of a tensor that acts as the whole one; see the module's docstring."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: _Held
    form: RowGroup

    @staticmethod
    def __new__(cls, held: _Held, shape: Sequence[int], form: RowGroup) -> RowShard:
        rows = held.rows
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=rows.dtype, device=rows.device)
        self.held, self.form = held, form
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"RowShard({list(self.shape)}, {len(self.held.rows)} rows on this rank, {self.dtype})"

    @property
    def row_count(self) -> int:
        """M, the number of rows over all ranks."""
        return math.prod(self.shape[:-1])

    def rows(self) -> Tensor:
        """This rank's rows, [M_r, N]."""
        return self.held.rows

    def whole(self) -> Tensor:
        """Gathers all rows, [.., N]. Every rank must call it; no gradient. Code may write into the result."""
        held = self.held
        if held.whole is None:
            self.form.gathers += 1
            name = self.form.group.name
            held.whole = ops.all_gather(held.rows.contiguous(), name, rows=self.row_count)
            held.rows = _own(held.whole, self.form)
        return held.whole.view(self.shape)

    def write(self, whole: Tensor | None = None) -> None:
        """Takes this rank's rows of `whole`; None: records that code has written into this rank's rows."""
        if whole is not None:
            self.held.rows.copy_(_own(whole, self.form))
        self.held.whole = None

    def has_rows_of(self, other: RowShard) -> bool:
        return self.shape[:-1] == other.shape[:-1] and self.form.group.name == other.form.group.name

    def like(self, rows: Tensor) -> RowShard:
        """Makes a RowShard of as many other rows, [M_r, N']."""
        return RowShard(_Held(rows), (*self.shape[:-1], rows.shape[-1]), self.form)

    def viewed(self, shape: Sequence[int]) -> RowShard:
        """Returns a view of another shape over the same memory."""
        return RowShard(self.held, shape, self.form)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = _rule_of(func)
        if rule is not None and (result := rule(func, args, kwargs)) is not NotImplemented:
            return result
        written = _written(func, args, kwargs)
        copies = {id(shard): shard.whole().clone() for shard in written}

        def whole(x: RowShard) -> Tensor:
            return copies[id(x)] if id(x) in copies else x.whole()

        args, kwargs = tree_map_only(RowShard, whole, (args, kwargs))
        result = func(*args, **kwargs)
        for shard in written:
            shard.write(copies[id(shard)])
        return written[0] if written and isinstance(result, Tensor) else result


class _Turned(torch.autograd.Function):
    """Applies `there` to x in the forward pass, and `back` to the gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Any], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad), None, None


def from_rows(rows: Tensor, shape: Sequence[int], form: RowGroup) -> Tensor:
    """Makes a RowShard of that shape from this rank's rows [M_r, N]."""
    return _Turned.apply(
        rows,
        lambda x: RowShard(_Held(x.view_as(x)), shape, form),
        lambda grad: _rows_of(grad, form).contiguous(),
    )


def to_rows(x: RowShard) -> Tensor:
    """Returns this rank's rows [M_r, N] of a RowShard, with a gradient."""
    shape, form = x.shape, x.form
    return _Turned.apply(
        x, lambda x: x.rows().view_as(x.rows()), lambda grad: RowShard(_Held(grad), shape, form)
    )


def cut_rows(x: Tensor, form: RowGroup) -> Tensor:
    """Makes a RowShard from x [.., N], which is whole on every rank."""
    return _Turned.apply(
        x,
        lambda x: RowShard(_Held(_own(x, form).clone()), x.shape, form),
        lambda grad: grad.whole() if isinstance(grad, RowShard) else grad,
    )


def to_whole(x: RowShard) -> Tensor:
    """Returns all rows of a RowShard, in new memory. Code that reads them must do the same on every rank."""
    shape, form = x.shape, x.form
    return _Turned.apply(
        x,
        lambda x: x.whole().clone(),
        lambda grad: RowShard(_Held(_rows_of(grad, form).clone()), shape, form),
    )


def _own(whole: Tensor, form: RowGroup) -> Tensor:
    """Returns this rank's rows of a whole tensor."""
    rows = whole.reshape(-1, whole.shape[-1])
    return rows.tensor_split(form.group.size)[form.group.rank]


def _rows_of(x: Tensor, form: RowGroup) -> Tensor:
    return x.rows() if isinstance(x, RowShard) else _own(x, form)


# -- rules: (operator, args, kwargs) -> its result, or NotImplemented where all rows are needed

aten = torch.ops.aten
Rule = Callable[[Any, tuple, dict], Any]


def _pointwise(func, args: tuple, kwargs: dict) -> Any:
    first = next((x for x in args if isinstance(x, RowShard)), None)
    if first is None or any(isinstance(x, Tensor) for x in kwargs.values()):
        return NotImplemented
    on_rows = []
    for x in args:
        if isinstance(x, RowShard):
            if not first.has_rows_of(x):
                return NotImplemented
            x = x.rows()
        elif isinstance(x, Tensor) and x.dim() > 1:  # maybe a rank's features: never cut here
            return NotImplemented
        on_rows.append(x)
    if func._schema.is_mutable:
        if first is not args[0]:
            return NotImplemented
        func(*on_rows, **kwargs)
        first.write()
        return first
    result = func(*on_rows, **kwargs)
    kept = isinstance(result, Tensor) and result.dtype in _FLOATS
    return first.like(result) if kept else NotImplemented


def _same(func, args: tuple, kwargs: dict) -> Any:
    return args[0].viewed(args[0].shape)


def _view(func, args: tuple, kwargs: dict) -> Any:
    x, size = args[0], list(args[1])
    if not size or not x.numel():
        return NotImplemented
    if -1 in size:
        size[size.index(-1)] = x.numel() // -math.prod(size)
    return x.viewed(size) if size[-1] == x.shape[-1] else NotImplemented


def _slice(func, args: tuple, kwargs: dict) -> Any:
    given = _named(func, args, kwargs)
    x = given["self"]
    stops = given["end"] is None or given["end"] >= x.shape[given["dim"]]
    return x.viewed(x.shape) if not given["start"] and stops and given["step"] == 1 else NotImplemented


def _expand(func, args: tuple, kwargs: dict) -> Any:
    x, size = args[0], list(args[1])
    if len(size) != x.dim() or any(n not in (-1, m) for n, m in zip(size[:-1], x.shape[:-1], strict=True)):
        return NotImplemented
    return x.like(x.rows().expand(-1, size[-1]))


def _reduce(func, args: tuple, kwargs: dict) -> Any:
    given = _named(func, args, kwargs)
    x, dims = given["self"], given.get("dim")
    if not isinstance(dims, list | tuple) or not isinstance(x, RowShard):
        return NotImplemented
    dims, last = sorted(dim % x.dim() for dim in dims), x.dim() - 1
    if dims == [last] and given["keepdim"]:
        return x.like(_called(func, given | {"self": x.rows(), "dim": [1]}))
    if dims == list(range(last)) and func is aten.sum.dim_IntList:
        total = _called(func, given | {"self": x.rows(), "dim": [0]})
        total = ops.all_reduce(total.contiguous(), x.form.group.name)
        return total.view((1,) * last + (-1,)) if given["keepdim"] else total.view(-1)
    return NotImplemented


def _norm(func, args: tuple, kwargs: dict) -> Any:
    x, shape, *rest = args
    if not isinstance(x, RowShard) or list(shape) != [x.shape[-1]] or _any_shard((rest, kwargs)):
        return NotImplemented
    return tuple(x.like(result) for result in func(x.rows(), shape, *rest, **kwargs))


def _norm_backward(func, args: tuple, kwargs: dict) -> Any:
    grad, x, *rest = args
    if not isinstance(x, RowShard):
        return NotImplemented
    rest, kwargs = tree_map_only(RowShard, RowShard.rows, (rest, kwargs))
    grad_rows = _rows_of(grad, x.form).contiguous()
    dx, *of_weights = func(grad_rows, x.rows(), *rest, **kwargs)
    name = x.form.group.name
    summed = (None if g is None else ops.all_reduce(g.contiguous(), name) for g in of_weights)
    return None if dx is None else x.like(dx), *summed


def _rms_norm(func, args: tuple, kwargs: dict) -> Any:
    x, weight, eps = args
    if not isinstance(x, RowShard) or isinstance(weight, RowShard):
        return NotImplemented
    y, scale = func(x.rows(), weight, eps)
    return x.like(y), scale  # only the backward reads the scale, for its own rows


def _rms_norm_backward(func, args: tuple, kwargs: dict) -> Any:
    grad, x, weight, scale, also = args
    if not isinstance(x, RowShard):
        return NotImplemented
    also = None if also is None else _rows_of(also, x.form)
    dx, dweight = func(_rows_of(grad, x.form), x.rows(), weight, scale, also)
    return x.like(dx), ops.all_reduce(dweight, x.form.group.name) if weight.requires_grad else dweight


def _new(func, args: tuple, kwargs: dict) -> Any:
    """Runs functions that read only the dtype and device of their argument."""
    return func(args[0].rows(), *args[1:], **kwargs)


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.detach, aten.alias), _same),
    **dict.fromkeys((aten._to_copy, aten.clone, aten.zeros_like, aten.ones_like, aten.full_like), _pointwise),
    **dict.fromkeys((aten.view, aten._unsafe_view), _view),
    aten.slice: _slice,
    aten.expand: _expand,
    **dict.fromkeys((aten.mean, aten.sum, aten.var, aten.amax, aten.linalg_vector_norm), _reduce),
    **dict.fromkeys((aten.native_layer_norm, aten._fused_rms_norm), _norm),
    torch.ops.pyruntime.rms_norm: _rms_norm,
    torch.ops.pyruntime.rms_norm_backward: _rms_norm_backward,
    **dict.fromkeys((aten.native_layer_norm_backward, aten._fused_rms_norm_backward), _norm_backward),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), _new),
}


@functools.cache
def _rule_of(func) -> Rule | None:
    if (rule := _RULES.get(func.overloadpacket)) is not None:
        return rule
    random = torch.Tag.nondeterministic_seeded in func.tags
    return _pointwise if torch.Tag.pointwise in func.tags and not random else None


def _named(func, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Returns every argument by its name, with defaults."""
    given = {a.name: a.default_value for a in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    return given | kwargs


def _called(func, given: dict[str, Any]) -> Any:
    arguments = func._schema.arguments
    return func(
        *(given[a.name] for a in arguments if not a.kwarg_only),
        **{a.name: given[a.name] for a in arguments if a.kwarg_only},
    )


def _any_shard(arguments: Any) -> bool:
    return any(isinstance(t, RowShard) for t in tree_leaves(arguments))


def _written(func, args: tuple, kwargs: dict) -> list[RowShard]:
    """Returns the RowShards into which the operator writes."""
    if not func._schema.is_mutable:
        return []
    given = _named(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [x for x in tree_leaves([given[name] for name in names]) if isinstance(x, RowShard)]
