"""Tensor classes for weights that are cut over a tensor-parallel group. torch treats them as full tensors.

A cut weight is a `CutParameter`. Its gradient, an optimizer's moments, copies, and element-wise results are
`CutTensor`s. They have the shape and memory of this rank's shard, so layers and optimizers read them like any
tensor. An operation gives what it would give for the full tensor:

| operation on cut tensors | result |
|---|---|
| element by element (p.grad / 2, p.lerp_(q, 0.1), fused updates), copies, dtypes | cut in the same way |
| one number (norms, sum, mean, max, any, equal, ...) | of the full tensor, the same bits on every rank |
| random numbers (torch.nn.init, rand_like) | drawn for the full tensor; this rank takes its shard |
| a product that sums over features which every rank has, a transposed matrix | cut in the same way |
| anything else (p @ p.T, p[0], p.view(-1), p.sum(dim=0)) | an error that says why |

Single numbers are exchanged between ranks, so every rank must compute them. `p.full_tensor()` gathers the
full tensor on every rank, and all ranks must call it. `p.to_local()` is the shard as a plain tensor, without
these rules. Parallel layers compute with shards (ParallelModule.forward)."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from pyruntime import ops
from pyruntime.nn.layout import Layout

INSTEAD = "for data parallelism beside tensor parallelism call pyruntime.shard(model, runtime.dp)"
_TAKEN_FOR_WHOLE = (
    " Tools that take a shard for the full weight (FSDP, fully_shard, spectral_norm) cannot be used on a "
    f"tensor-parallel model: {INSTEAD}."
)

GRAD: Any = Tensor.grad
"""torch's own descriptor of `.grad`."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside this context, cut tensors act as plain shards, and results are plain tensors."""


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Reads `.grad` as it is stored, plain or cut, bypassing a class that would raise where there is none."""
    with as_plain():
        return GRAD.__get__(parameter)


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Sets `.grad`, bypassing a class that would store it elsewhere."""
    with as_plain():
        GRAD.__set__(parameter, gradient)


def memory_of(parameter: Tensor) -> Tensor:
    """Returns `.data` of a parameter: this rank's memory of it, cut or not, as a plain tensor."""
    with as_plain():
        return parameter.data


class CutTensor(Tensor):
    """This rank's shard of a tensor that is cut over a group. The module's docstring lists its operations."""

    tp_layout: Layout

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with as_plain():
            if "out" in kwargs and "extern_kernels" in sys._getframe(1).f_globals:
                return func(*args, **kwargs)  # Inductor's code for a layer reads the shard
            return _rule_of(func)(func, args, kwargs)

    def to_local(self) -> Tensor:
        """Returns this rank's shard, a plain tensor over the same memory."""
        with as_plain():
            return self.view_as(self)

    def full_tensor(self) -> Tensor:
        """Gathers the full tensor, plain and without a gradient. Every rank of the group must call it."""
        with as_plain(), torch.no_grad():
            layout = self.tp_layout
            parts = layout.to_dtensors(self.detach()).values()
            wholes = [part.full_tensor() for part in parts]
            return wholes[0] if len(wholes) == 1 else torch.cat(wholes, layout.dim or 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutTensor:
        with as_plain():
            if not self.is_leaf:
                raise RuntimeError(
                    "Only leaf tensors can be copied deeply, not results of operations; detach() it first."
                )
            memo[id(self)] = copied = _cut(self.detach().clone().requires_grad_(self.requires_grad), self)
            return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain():
            parts = list(self.tp_layout.to_dtensors(self.detach()).values())
            if len(parts) == 1:
                return parts[0].__reduce_ex__(protocol)
        raise ValueError(
            f"A tensor of {_words(self)} holds several tensors of the model; save state_dict(), which has "
            "each by its name."
        )


def shard_of(tensor: Tensor) -> Tensor:
    """Returns the shard of a cut tensor as a plain tensor over its memory, and a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, CutTensor) else tensor


class CutParameter(CutTensor, nn.Parameter):
    """A parameter that is cut over a group. `mark_cut` changes an nn.Parameter's class to this in place."""

    @property
    def grad(self) -> Tensor | None:
        gradient = gradient_of(self)
        if type(gradient) is Tensor:
            _cut(gradient, self)  # changes the class of the same object, which stays the gradient
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        set_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        set_gradient(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with as_plain():
            memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return mark_cut(copied, self.tp_layout)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its layer marks the parameter again when it is unpickled.
        with as_plain():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def mark_cut(parameter: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Attaches `layout` to a parameter. One that is cut over several ranks becomes a CutParameter."""
    parameter.tp_layout = layout
    parameter.tp_dim = layout.dim
    parameter.tp_group_name = layout.group.name
    if layout.cut_over and type(parameter) in (nn.Parameter, CutTensor):  # as `to` and `to_empty` leave it
        parameter.__class__ = CutParameter
    return parameter


def cut_like(tensor: Tensor, layout: Any) -> Tensor:
    """Returns `tensor`, which has a shard's shape, as a cut tensor where the layout has several ranks.
    layout: a Layout, or an object with the same interface."""
    if not layout.cut_over:
        return tensor
    with as_plain():
        tensor = tensor.view_as(tensor)
        tensor.__class__, tensor.tp_layout = CutTensor, layout
        return tensor


def _cut(tensor: Tensor, like: CutTensor) -> CutTensor:
    """Makes a plain tensor a CutTensor with the layout of `like`, in place."""
    tensor.__class__, tensor.tp_layout = CutTensor, like.tp_layout
    return tensor


def _words(tensor: CutTensor) -> str:
    layout = tensor.tp_layout
    keys = ", ".join(part.key for part in layout.parts)
    shapes = ", ".join(str(list(part.shape)) for part in layout.parts)
    return f"{keys} {shapes}, cut over group {layout.group}, of which this rank holds {list(tensor.shape)}"


def _name(func: Any) -> str:
    """Returns one name for the forms of a torch function: "mul_" for Tensor.mul_, "mul" for torch.mul and
    Tensor.__rmul__, "grad.get" for reading a property."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{func.__self__.__name__}.{name.strip('_')}"
    if name.startswith("__"):
        name = name.strip("_")
        return _OPERATORS.get(name, f"__{name}__")
    return name


_BINARY = {
    **{name: name for name in ("add", "sub", "mul", "pow", "mod")},
    **{"truediv": "div", "div": "div", "floordiv": "floor_divide"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
}
_OPERATORS = {
    **{f"{side}{name}": func for name, func in _BINARY.items() for side in ("", "r", "i")},
    **{name: name for name in ("neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "pos")},
    "invert": "bitwise_not",
}


# -- rules of the operations on cut tensors; each rule is called within as_plain()

Rule = Callable[[Any, tuple, dict[str, Any]], Any]


@functools.cache
def _rule_of(func: Any) -> Rule:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        # pyruntime.ops takes shards, and so does code that torch.compile generated for a model's layers.
        return _refuse_compiled if _is_arithmetic(func) else _plain
    if getattr(func, "__module__", "") == "torch.nn.init":
        return _initialised
    name = _name(func)
    if name in _RULES:
        return _RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _each
    if name.endswith(".get"):
        return _plain
    if name.endswith((".set", ".delete")) or (name.startswith("_") and name not in _ELEMENTS):
        return _plain  # internals of Python and torch
    return _element_by_element if _is_pointwise(name) else _refuse


def _is_arithmetic(func: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> bool:
    return isinstance(func, torch._ops.OpOverload) and torch.Tag.pointwise in func.tags


def _refuse_compiled(func: Any, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
    raise RuntimeError(
        f"{func} was called by code that torch.compile generated, on a tensor of "
        f"{_words(_first_cut((args, kwargs)))}. Only parallel layers may be compiled; keep other operations "
        "on cut tensors (the step() of an optimizer) out of torch.compile."
    )


def _is_pointwise(name: str) -> bool:
    for each in (name, name.rstrip("_")):
        packet = getattr(torch.ops.aten, each, None)
        if packet is not None and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        ):
            return True
    return False


def _first_cut(args: Any) -> CutTensor:
    return next(each for each in tree_leaves(args) if isinstance(each, CutTensor))


def _plain(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _refuse(func: Any, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
    name = _name(func).removesuffix(".get")
    raise RuntimeError(
        f"{name} was called on a tensor of {_words(_first_cut((args, kwargs)))}, and its result for a shard "
        "is no shard of its result for the full tensor; call it on tensor.full_tensor(), which every rank "
        "must call, or on tensor.to_local(), which is only the shard."
        + (_TAKEN_FOR_WHOLE if name in ("chunk", "flatten") else "")
    )


def _element_by_element(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    like = _check_alike(func, tree_leaves((args, kwargs)))
    result = func(*args, **kwargs)
    if isinstance(result, tuple):
        return tuple(_wrapped(func, each, like) for each in result)
    return _wrapped(func, result, like)


def _wrapped(func: Any, result: Any, like: CutTensor) -> Any:
    if type(result) is not Tensor:
        return result  # in place, or no tensor
    if result.shape != like.shape:
        raise RuntimeError(
            f"{_name(func)} would broadcast a tensor of {_words(like)}, to {list(result.shape)}; use "
            "tensor.full_tensor(), which every rank must call, or tensor.to_local()."
        )
    return _cut(result, like)


def _check_alike(func: Any, operands: Sequence[Any]) -> CutTensor:
    """Returns the first cut operand. Raises RuntimeError where others are cut in another way."""
    first: CutTensor | None = None
    for each in operands:
        if not isinstance(each, CutTensor):
            continue
        if first is None:
            first = each
        elif (theirs := each.tp_layout) is not (ours := first.tp_layout) and (
            (ours.dim, ours.dim_y, ours.group.name, first.shape)
            != (theirs.dim, theirs.dim_y, theirs.group.name, each.shape)
        ):
            raise RuntimeError(
                f"{_name(func)} was called on {_words(first)}, and on {_words(each)}, which are not cut "
                "alike; use full_tensor() of both, which every rank must call."
            )
    assert first is not None
    for each in operands:
        if isinstance(each, Tensor) and not isinstance(each, CutTensor) and hasattr(each, "sharded_as"):
            _check_whole(func, first, each)
    return first


def _check_whole(func: Any, rows: CutTensor, whole: Tensor) -> None:
    if whole.shape != rows.shape:
        raise RuntimeError(
            f"{_name(func)} was called on {_words(rows)}, and on the whole {whole.sharded_as} "
            f"{list(whole.shape)}. Gradients of a sharded model hold only the rows that a rank keeps: let an "
            "optimizer do it (weight_decay=, lr=), or use full_tensor(), within handle.writes() where "
            "weights are written."
        )


def _each(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs functions of lists, element by element. The i-th result is cut as the lists' i-th tensors."""
    results = func(*args, **kwargs)
    if not isinstance(results, list | tuple):
        return results  # in place
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    for i, result in enumerate(results):
        cut = [each[i] for each in lists if i < len(each) and isinstance(each[i], CutTensor)]
        if cut:
            _wrapped(func, result, _check_alike(func, cut))
    return results


def _of_layout(tensor: Tensor, dim: int | None, dim_y: int | None, like: CutTensor, turn: Any) -> CutTensor:
    """Marks `tensor` as cut along other dimensions than `like`. turn: maps the shapes of parts of `like` to
    its own."""
    layout = like.tp_layout
    parts = tuple(dataclasses.replace(part, shape=turn(part.shape)) for part in layout.parts)
    tensor.__class__ = CutTensor
    tensor.tp_layout = dataclasses.replace(layout, dim=dim, dim_y=dim_y, parts=parts)
    return tensor


def _turned(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """p.T, p.mT, p.t(), p.transpose(0, 1) of a matrix."""
    tensor = args[0]
    if tensor.dim() != 2 or {each % 2 for each in args[1:]} not in (set(), {0, 1}) or kwargs:
        _refuse(func, args, kwargs)
    dim, dim_y = (
        None if each is None else 1 - each for each in (tensor.tp_layout.dim, tensor.tp_layout.dim_y)
    )
    return _of_layout(func(*args), dim, dim_y, tensor, lambda shape: shape[::-1])


def _product(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A @ B, where only A's rows or B's columns are cut: every rank has all features that are summed."""
    operands = [each for each in args if isinstance(each, Tensor)]
    cut = [isinstance(each, CutTensor) for each in operands]
    if cut not in ([True, False], [False, True]) or any(each.dim() != 2 for each in operands) or kwargs:
        _refuse(func, args, kwargs)
    kept = cut.index(True)  # this dimension of that operand is one of the result too
    tensor, other = operands[kept], operands[1 - kept]
    if (tensor.tp_layout.dim, tensor.tp_layout.dim_y) != (kept, None):
        _refuse(func, args, kwargs)
    width = other.shape[1 - kept]
    turn = (lambda shape: (shape[0], width)) if kept == 0 else (lambda shape: (width, shape[1]))
    return _of_layout(func(*args), kept, None, tensor, turn)


def _copied(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """p.copy_(other): takes this rank's shard of a full tensor."""
    target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    if isinstance(target, CutTensor) and not isinstance(source, CutTensor):
        layout = target.tp_layout
        if source.shape != target.shape and len(layout.parts) == 1 and source.dim() > 0:
            source = layout.local_part(layout.parts[0], source)
        return target.copy_(source, *args[2:], **{k: v for k, v in kwargs.items() if k != "src"})
    _check_alike(func, args)
    return func(*args, **kwargs)


def _set_item(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """p[mask] = number."""
    tensor, index, value = args
    if (
        getattr(index, "dtype", None) != torch.bool
        or index.shape != tensor.shape
        or torch.numel(torch.as_tensor(value)) != 1
    ):
        _refuse(func, args, kwargs)
    return func(*args, **kwargs)


def _initialised(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.nn.init: initialises the full tensor, of which each rank takes its shard."""
    (tensor, *rest), kwargs = (args, kwargs) if args else ((kwargs["tensor"],), kwargs)
    others = {name: value for name, value in kwargs.items() if name != "tensor"}
    with torch.no_grad():
        tensor.copy_(_whole_drawn(tensor, lambda whole: func(whole, *rest, **others)))
    return tensor


def _random_like(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """rand_like, randn_like: draws the full tensor, of which each rank takes its shard."""
    like = _first_cut(args)
    return _cut(_whole_drawn(like, lambda whole: func(whole, *args[1:], **kwargs)), like)


def _whole_drawn(tensor: CutTensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    layout = tensor.tp_layout
    wholes = {
        part.key: draw(torch.empty(part.shape, dtype=tensor.dtype, device=tensor.device))
        for part in layout.parts
    }
    return layout.gather_parts(wholes).contiguous()


def _refuse_draw(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{_name(func)} was called on a tensor of {_words(_first_cut((args, kwargs)))}: each rank would draw "
        "its own numbers, and torch.nn.init's rules that count a weight's features (xavier) would count "
        "those of the shard. Use torch.nn.init.normal_, uniform_ or kaiming_uniform_, which draw the full "
        "tensor; the layer's reset_parameters(); or copy_() a full tensor into it."
    )


# -- numbers of the full tensor


class _SumOverRanks(torch.autograd.Function):
    """Sums one number over ranks. All ranks compute the same from the sum, so its gradient is passed on as it
    is."""

    @staticmethod
    def forward(ctx, local: Tensor, group: str) -> Tensor:
        return ops.all_gather_stats(local.double().reshape(1), group).sum(0).to(local.dtype).reshape(())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def _summed(local: Tensor, like: CutTensor) -> Tensor:
    for group in like.tp_layout.cut_over:
        local = _SumOverRanks.apply(local, group)
    return local


def _count(tensor: CutTensor) -> int:
    layout = tensor.tp_layout
    return sum(functools.reduce(int.__mul__, part.shape, 1) for part in layout.parts)


def _whole_number(func: Any, args: tuple, kwargs: dict[str, Any], given: str = "dim") -> CutTensor:
    """Returns the tensor to reduce to one number; refuses reductions along dimensions."""
    tensor = args[0] if args else kwargs.get("input", kwargs.get("self"))
    along = kwargs.get(given, kwargs.get("axis", args[1] if len(args) > 1 else None))
    if not isinstance(tensor, CutTensor) or along not in (None, ()) or kwargs.get("keepdim"):
        _refuse(func, args, kwargs)
    return tensor


def _sum(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    tensor = _whole_number(func, args, kwargs)
    return _summed(func(*args, **kwargs), tensor)


def _mean(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    tensor = _whole_number(func, args, kwargs)
    return _summed(torch.sum(tensor, dtype=kwargs.get("dtype")), tensor) / _count(tensor)


def _loss(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.nn.functional.mse_loss and similar losses, as used for penalties."""
    reduction = kwargs.get("reduction", "mean")
    each = _element_by_element(func, args, {**kwargs, "reduction": "none"})
    if reduction == "none":
        return each
    total = _summed(torch.sum(each), each)
    return total / _count(each) if reduction == "mean" else total


def _same_shape(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """p.view(p.shape), p.reshape(p.shape): refuses any other shape."""
    tensor, *given = args
    shape = given[0] if len(given) == 1 and not isinstance(given[0], int) else tuple(given)
    if not isinstance(tensor, CutTensor) or kwargs or shape != tuple(tensor.shape):
        _refuse(func, args, kwargs)
    return _element_by_element(func, args, kwargs)


def _variance(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """var and std."""
    tensor = _whole_number(func, args, {}) if len(args) == 1 else _refuse(func, args, kwargs)
    options = dict(kwargs)
    correction = options.pop("correction", 1 if options.pop("unbiased", True) else 0)
    if options:
        _refuse(func, args, kwargs)
    mean = _summed(tensor.sum(), tensor) / _count(tensor)
    variance = _summed((tensor - mean).square().sum(), tensor) / max(_count(tensor) - correction, 0)
    return variance.sqrt() if _name(func) == "std" else variance


class _ExtremeOverRanks(torch.autograd.Function):
    """Takes the greatest or least of the ranks' numbers. Ranks that have it share the gradient equally."""

    @staticmethod
    def forward(ctx, local: Tensor, group: str, combine: Callable[[Tensor], Tensor]) -> Tensor:
        every = ops.all_gather_stats(local.double().reshape(1), group)
        found = combine(every).to(local.dtype).reshape(())
        ctx.share = float(local == found) / max(int((every == found.double()).sum()), 1)
        return found

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient * ctx.share, None, None


def _extreme(combine: Callable[[Tensor], Tensor]) -> Rule:
    def rule(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
            return _element_by_element(func, args, kwargs)  # torch.max(p, q)
        tensor = _whole_number(func, args, kwargs)
        value = func(*args, **kwargs)
        for group in tensor.tp_layout.cut_over:
            value = _ExtremeOverRanks.apply(value, group, combine)
        return value

    return rule


def _alike_everywhere(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """torch.equal and allclose."""
    tensor = _check_alike(func, tree_leaves((args, kwargs)))
    same = torch.tensor([float(func(*args, **kwargs))])
    for group in tensor.tp_layout.cut_over:
        same = ops.all_gather_stats(same.double(), group).amin(0)
    return bool(same)


def _norms(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """torch._foreach_norm."""
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    return _of_all_ranks(list(func(*args, **kwargs)), args[0], float(order))


def _norm(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """torch.linalg.vector_norm, torch.norm and Tensor.norm."""
    arguments = {**dict(zip(("ord", "dim"), args[1:], strict=False)), **kwargs}
    if arguments.get("dim") is not None or not isinstance(args[0] if args else None, CutTensor):
        _refuse(func, args, kwargs)
    norm = func(*args, **kwargs)
    given = arguments.get("ord", arguments.get("p"))
    of_matrix = _name(func) == "linalg_norm" and args[0].dim() > 1  # a number means another norm there
    if (isinstance(given, str) and given != "fro") or (of_matrix and given not in ("fro", None)):
        _refuse(func, args, kwargs)
    order = 2.0 if given in ("fro", None) else float(given)
    if torch.is_grad_enabled() and norm.requires_grad:
        if order <= 0 or order == float("inf") or norm.dim() > 0:
            _refuse(func, args, kwargs)
        return _summed(norm**order, args[0]) ** (1 / order)
    return _of_all_ranks([norm], [args[0]], order)[0]


def _of_all_ranks(norms: list[Tensor], tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Replaces `norms` of this rank's shards by those of the full tensors, in place. Norms of plain tensors
    stay. One gather for each group."""
    for groups, places in _places(tensors).items():
        whole = torch.stack([norms[i].reshape(()) for i in places]).double()
        for group in groups:
            whole = _combined(ops.all_gather_stats(whole, group), order)  # of [P, len(places)]
        for i, norm in zip(places, whole, strict=True):
            norms[i] = norm.to(norms[i].dtype).reshape(norms[i].shape)
    return norms


def _combined(norms: Tensor, order: float) -> Tensor:
    """Combines the norms [P, n] of the parts of n vectors into their norms [n]."""
    if order == float("inf"):
        return norms.amax(0)
    if order == -float("inf"):
        return norms.amin(0)
    return norms.sum(0) if order == 0 else norms.pow(order).sum(0).pow(1 / order)


def _unscale(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """torch._amp_foreach_non_finite_check_and_unscale_: an inf found by one rank counts on all ranks."""
    gradients, found_inf, _ = args
    func(*args, **kwargs)
    for group in dict.fromkeys(group for groups in _places(gradients) for group in groups):
        found_inf.copy_(ops.all_gather_stats(found_inf.double(), group).amax(0))


def _places(tensors: Sequence[Tensor]) -> dict[tuple[str, ...], list[int]]:
    """Returns {groups over which tensors are cut: indices of these tensors}."""
    places: dict[tuple[str, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, CutTensor):
            places.setdefault(tensor.tp_layout.cut_over, []).append(i)
    return places


def _gradients(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad: each gradient is cut as its input is."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    found = func(*args, **kwargs)
    for gradient, of in zip(found, inputs, strict=True):
        if isinstance(of, CutTensor) and type(gradient) is Tensor:
            _cut(gradient, of)
    return found


# fmt: off
_ELEMENTS = {"__contains__", "__getitem__", "__setitem__", "__iter__", "__reversed__"}
_ELEMENTS |= {"__rmatmul__", "__imatmul__", "__divmod__", "__rdivmod__"}
"""Operators of Python on single elements."""
SHAPES_ALONE = frozenset({
    "__hash__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "element_size",
    "storage_offset", "stride", "is_contiguous", "untyped_storage", "data_ptr", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "is_floating_point", "is_complex",
    "get_device", "is_shared", "is_pinned",
})
"""Names of torch functions that read only a tensor's shape and storage, or its autograd state."""
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"})
_RULES: dict[str, Rule] = {
    **dict.fromkeys((
        *SHAPES_ALONE, "backward", "as_subclass", "numpy", "tolist", "type", "storage", "retain_grad",
        "data.set", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "share_memory_",
        "pin_memory",
        "is_same_size", "is_nonzero", "is_inference", "is_set_to", "is_signed", "is_conj", "is_neg",
        "set_", "resize_", "view_as",
        "result_type", "promote_types", "can_cast", "is_tensor", "is_storage", "typename", "unsafe_chunk",
    ), _plain),
    **dict.fromkeys((
        "clone", "detach", "detach_", "to", "float", "int", "long", "bool", "double",
        "half", "bfloat16", "cpu", "cuda", "type_as",
        "contiguous", "empty_like", "zeros_like", "ones_like", "full_like", "zero_", "fill_", "data.get",
        "multiply", "multiply_", "subtract", "subtract_", "divide", "divide_", "floor_divide",
        "floor_divide_", "negative", "negative_", "absolute", "absolute_", "isclose", "isfinite", "isreal",
        "square", "square_", "pos", "true_divide", "true_divide_",
    ), _element_by_element),
    **dict.fromkeys(("rand_like", "randn_like"), _random_like),
    **dict.fromkeys((
        "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
        "random_", "bernoulli", "dropout", "dropout_",
    ), _refuse_draw),
    **dict.fromkeys(("sum", "count_nonzero"), _sum),
    **dict.fromkeys(("var", "std"), _variance),
    **dict.fromkeys(("max", "amax", "any"), _extreme(lambda every: every.amax(0))),
    **dict.fromkeys(("min", "amin", "all"), _extreme(lambda every: every.amin(0))),
    **dict.fromkeys(("equal", "allclose"), _alike_everywhere),
    **dict.fromkeys(("norm", "linalg_vector_norm", "linalg_norm"), _norm),
    "mean": _mean,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _loss),
    **dict.fromkeys(("view", "reshape"), _same_shape),
    "copy_": _copied,
    **dict.fromkeys(("t", "T.get", "mT.get", "transpose"), _turned),
    **dict.fromkeys(("matmul", "mm", "__matmul__"), _product),
    "__setitem__": _set_item,
    "grad": _gradients,
    "_foreach_norm": _norms,
    "_foreach_max": _refuse,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
# fmt: on

# torch's optimizers and clip_grad_norm_ then take lists of cut tensors, and the norms of a list are one
# exchange between ranks. torch.distributed.tensor does the same for DTensors.
for _supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _supported += [each for each in (CutTensor, CutParameter) if each not in _supported]
