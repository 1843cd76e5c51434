"""Follows the placements of tensors through functions of torch (see compositions.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyruntime.any_model.torch_functions import (
    ELEMENTWISE,
    LINEAR,
    MAXIMA,
    NORMS,
    PACKED,
    PRODUCTS,
    SCALED,
    SUMS,
    TRANSPOSES,
    VIEWS,
    WHOLE,
    dims_of,
    name_of,
    open_dim,
)
from pyruntime.nn.parameters import TensorGroup
from pyruntime.nn.signatures import SIGNATURES
from pyruntime.ops.conversions import convert, moved
from pyruntime.ops.placements import PlacementError, tensors_in


@dataclass(frozen=True)
class Placed:
    """A placement, and for S(d) the size of the whole tensor along d."""

    placement: str
    whole: int = 0

    @classmethod
    def of(cls, placement: str, own: Tensor, ranks: int) -> Self:
        """That of a rank's part `own`, if all parts are equal. Raises ValueError for what is no placement."""
        moved(placement, placement, 0, ranks)
        dim = int(placement[2]) if placement[0] == "S" else None
        return cls(placement, 0 if dim is None else own.shape[dim] * ranks)

    @property
    def dim(self) -> int | None:
        return int(self.placement[2:-1]) if self.placement[0] == "S" else None

    def along(self, dim: int, whole: int | None = None) -> Placed:
        return Placed(f"S({dim})", self.whole if whole is None else whole)


_B = Placed("B")


def at_dim(placement: str, dims: int, rows: int) -> str:
    """Returns a placement of a signature, whose tensors are [rows, features], for a tensor of so many
    dimensions whose rows are the dimension `rows`."""
    at = {"S(0)": f"S({rows % dims})", "S(1)": f"S({dims - 1})"}
    return at.get(placement, placement)


class Followed(TorchFunctionMode):
    """The placements of tensors over a group, while code runs within this context. A tensor that nothing has
    marked is B. unknown: functions that it could not follow, as "MODULE: FUNCTION"."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._found = WeakTensorKeyDictionary()
        self._modules: list[str] = []
        self.unknown: list[str] = []

    def enter(self, module: str) -> None:
        self._modules.append(module or "the model")

    def leave(self) -> None:
        self._modules.pop()

    def mark(self, tensor: Tensor, placed: Placed | None) -> None:
        self._found[tensor] = placed

    def of(self, tensor: Tensor) -> Placed | None:
        """None: something that could not be followed made it."""
        return self._found.get(tensor, _B)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is convert:
            return self._converted(*args, **kwargs)
        operands = list(tensors_in([*args, *kwargs.values()]))
        found = [self.of(each) for each in operands]
        name = name_of(func)
        is_ours = str(getattr(func, "_qualified_op_name", "")).startswith("pyruntime::")
        placed: Any = _B
        if is_ours and self._group.name in args:
            placed = self._of_ours(name, args, operands, found)
        elif any(each is None for each in found):
            placed = None
        elif any(each != _B for each in found):
            placed = self._of_torch(name, args, kwargs, operands, found)
        result = func(*args, **kwargs)
        results = list(tensors_in([result]))
        if placed is _UNKNOWN and results:
            self.unknown.append(f"{self._module}: {name}")
        for each in results:
            self.mark(each, None if placed is _UNKNOWN else self._viewed(placed, args, each, name))
        return result

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else "the model"

    def refuse(self, name: str, needs: str, x: Tensor, found: Placed, advice: str = "") -> NoReturn:
        if not advice:
            change = f"convert(x, {found.placement!r}, {needs.split()[0]!r}, group)"
            advice = f"{change} of pyruntime.ops.conversions makes it so"
        raise PlacementError(
            f"{self._module}: {name} needs {needs}, but gets {found.placement}, {list(x.shape)} on this "
            f"rank; {advice}."
        )

    def _converted(self, x: Tensor, source: str, target: str, group: Any, *, size: int | None = None):
        """The result of convert(), of which only the shape is computed."""
        found = self.of(x)
        if found is not None and found.placement != source:
            self.refuse("convert", f"{source} as its source", x, found, f"name {found.placement!r} there")
        ranks, rank, shape = self._group.size, self._group.rank, list(x.shape)
        whole = found or Placed.of(source, x, ranks)
        if whole.dim is not None:
            shape[whole.dim] = size or whole.whole
        made = Placed.of(target, x, ranks)
        if made.dim is not None:
            size = shape[made.dim]
            shape[made.dim] = size // ranks + (rank < size % ranks)
            made = Placed(target, size)
        y = x.new_empty(shape)
        self.mark(y, made)
        return y

    def _of_ours(
        self, name: str, args: Sequence[Any], operands: list[Tensor], found: list[Placed | None]
    ) -> Any:
        """Returns the placement that a communicating operator gives."""
        x, of_x = operands[0], found[0]
        if name == "replicate_grad":
            return of_x
        dim = args[2] % x.dim() if name in ("all_gather", "reduce_scatter") else 0
        needs, gives = {
            "all_gather": (f"S({dim})", "B"),
            "reduce_scatter": ("P", f"S({dim})"),
            "all_reduce": ("P", "B"),
            "all_gather_stats": (None, "B"),  # stacked terms, of which every rank has all
            "cross_entropy_loss": (f"S({x.dim() - 1})", "B"),
            "linear_cross_entropy": ("S(0)", "B"),
        }.get(name, (None, None))
        if name in SIGNATURES and gives is None:
            first, *_, last = SIGNATURES[name]
            rows = args[4] if name in ("all_gather_matmul", "matmul_reduce_scatter") else 0
            needs = at_dim(first.placement, x.dim(), rows)
            gives = at_dim(last.converted or last.placement, x.dim(), rows)
        if gives is None:
            return _UNKNOWN
        if needs and of_x is not None and of_x.placement != needs:
            self.refuse(name, needs, x, of_x)
        return Placed(gives, 0)

    def _of_torch(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Tensor], found: list[Any]
    ) -> Any:
        x, of_x = operands[0], found[0]
        if name == "cross_entropy_stats":
            return self._statistics(x, of_x)
        if name in ("cross_entropy", "cross_entropy_loss"):  # torch's, ours
            return self._loss(name, operands, found)
        if name in SUMS | MAXIMA | WHOLE | NORMS:
            return self._reduced(name, x, of_x, args, kwargs)
        if name == "scaled_dot_product_attention":
            for each, placed in zip(operands[:3], found[:3], strict=True):
                if placed.dim is not None and placed.dim >= each.dim() - 2:
                    self.refuse(name, "whole rows and features of each head", each, placed, _GATHER)
            return self._alike(name, operands[:3], found[:3])
        if name == "apply_rope_qkv" and of_x.dim == x.dim() - 1:
            return Placed("S(1)")  # heads
        if name == "embedding" and found[1] == _B:
            return of_x
        if name in PRODUCTS:
            return self._product(name, operands, found)
        if name in TRANSPOSES:
            return of_x if of_x.dim is None else _transposed(name, x, of_x, args)
        if name in VIEWS or name == "getitem":
            return of_x
        if name in ("cat", "stack"):
            placed = self._alike(name, operands, found)
            return placed if name == "cat" or placed.dim is None else _UNKNOWN
        if name in LINEAR | SCALED | ELEMENTWISE:
            return self._elementwise(name, args, operands, found)
        return _UNKNOWN

    def _statistics(self, logits: Tensor, placed: Placed) -> Placed:
        if placed.placement != f"S({logits.dim() - 1})":
            self.refuse("cross_entropy_stats", f"S({logits.dim() - 1})", logits, placed)
        return Placed("P(max) and P")  # a term of a maximum, and two of sums

    def _loss(self, name: str, operands: list[Tensor], found: list[Placed]) -> Any:
        logits, placed = operands[0], found[0]
        last = logits.dim() - 1
        if name == "cross_entropy_loss" and found[2] == _B and placed.dim == last:
            return _B  # every rank has all ranks' statistics
        if placed.dim == (1 if logits.dim() > 1 else 0) or placed.dim == last:
            self.refuse(name, "B along the vocabulary", logits, placed, _LOSS)
        if placed.dim is None:
            self.refuse(name, "B", logits, placed)
        return _UNKNOWN

    def _reduced(
        self, name: str, x: Tensor, placed: Placed, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a reduction, or of a function that needs all of some dimensions."""
        if placed == _B:  # with a weight that is not
            return _UNKNOWN
        if placed.dim is None:
            if (name, placed.placement) in (("sum", "P"), ("amax", "P(max)")):
                return placed
            self.refuse(name, "B", x, placed)
        dims = dims_of(name, x, args, kwargs)
        if placed.dim in dims:
            if name in SUMS:
                return Placed("P")
            if name in MAXIMA:
                return Placed("P(max)")
            is_loss = name in ("softmax", "log_softmax", "logsumexp")
            advice = "" if placed.dim < x.dim() - 1 else _LOSS if is_loss else _GATHER
            self.refuse(name, f"B along dimension {placed.dim}", x, placed, advice)
        keeps = kwargs.get("keepdim") or (len(args) > 2 and args[2] is True)
        if keeps or name not in SUMS | MAXIMA | {"mean", "logsumexp", "norm", "vector_norm", "var", "std"}:
            return placed if name not in ("argmax", "argmin", "max", "min", "median") else _UNKNOWN
        return placed.along(placed.dim - sum(dim < placed.dim for dim in dims))

    def _product(self, name: str, operands: list[Tensor], found: list[Placed]) -> Any:
        x, weight, *_ = operands
        of_x, of_w, *of_bias = found
        contracted = weight.dim() - 1 if name == "linear" else max(weight.dim() - 2, 0)
        last = x.dim() - 1
        if of_x.placement == "P" and of_w == _B and not of_bias:
            return of_x
        if of_x.dim == last and of_w.dim == contracted and not of_bias:
            return Placed("P")
        if of_x == _B and of_w.dim == (0 if name == "linear" else weight.dim() - 1) != contracted:
            return of_w.along(last)
        if of_x.dim is None and of_x != _B:
            self._refuse_term(name, x, of_x)
        if of_x.dim == last:
            self.refuse(name, "B or rows, with a weight that is B", x, of_x, _GATHER)
        if of_w == _B:
            return of_x
        if of_x.dim == of_w.dim and x.dim() == weight.dim() and of_x.dim < last - 1:  # heads of both
            return of_x
        return _UNKNOWN

    def _elementwise(
        self, name: str, args: Sequence[Any], operands: list[Tensor], found: list[Placed]
    ) -> Any:
        terms = [
            (each, placed)
            for each, placed in zip(operands, found, strict=True)
            if placed.dim is None and placed != _B
        ]
        if not terms:
            return self._alike(name, operands, found)
        of_x = terms[0][1]
        is_sum = of_x.placement == "P"
        together = len(terms) == len(found) and all(placed == of_x for placed in found)
        numbers = any(isinstance(each, int | float) and not isinstance(each, bool) for each in args[1:])
        moves = name in LINEAR and together and not (name[-3:] in ("add", "sub") and numbers)
        adds = is_sum or name not in ("add", "radd", "iadd", "sub", "rsub", "isub", "neg")
        if moves and adds:
            return of_x
        scales = name in SCALED and len(terms) == 1 and all(placed in (of_x, _B) for placed in found)
        if is_sum and scales and (name.endswith("mul") or found[0] == of_x):
            return of_x
        if not is_sum and name == "maximum" and together:
            return of_x
        self._refuse_term(name, *terms[0])

    def _refuse_term(self, name: str, x: Tensor, found: Placed) -> NoReturn:
        kind = "a sum" if found.placement == "P" else "a maximum"
        change = f"convert(x, {found.placement!r}, 'B', group)"
        advice = f"it is each rank's term of {kind}; {change} takes {kind} first"
        self.refuse(name, "B or S", x, found, advice)

    def _alike(self, name: str, operands: list[Tensor], found: list[Placed]) -> Any:
        """The common placement of operands that are broadcast together."""
        cut = []
        for each, placed in zip(operands, found, strict=True):
            if placed.dim is not None:
                cut.append((each, placed))
            elif placed != _B:
                self._refuse_term(name, each, placed)
        if not cut:
            return _B
        x, of_x = max(cut, key=lambda pair: pair[0].dim())
        assert of_x.dim is not None
        from_last = of_x.dim - x.dim()
        for each, placed in zip(operands, found, strict=True):
            is_one = each.dim() < -from_last or each.shape[from_last] == 1
            is_like = placed.dim is not None and placed.dim - each.dim() == from_last
            if not (is_like or (placed == _B and is_one)):
                needed = f"S({each.dim() + from_last})" if each.dim() >= -from_last else "B"
                beside = f"beside {list(x.shape)} {of_x.placement}"
                self.refuse(name, f"{needed} {beside}", each, placed)
        dims = max(each.dim() for each in operands)
        return of_x.along(dims + from_last)

    def _viewed(self, placed: Placed | None, args: Sequence[Any], y: Tensor, name: str) -> Placed | None:
        """The placement of y, where views may have moved the dimension that is cut."""
        if placed is None or placed.dim is None:
            return placed
        if not placed.whole:  # of an operator: as all ranks hold equal parts
            return placed.along(placed.dim, y.shape[placed.dim] * self._group.size)
        if name not in VIEWS:
            return self._sliced(placed, args[0], y) if name == "getitem" else _parts(placed, args, y, name)
        x = args[0]
        if name == "unsqueeze" and len(args) > 1:
            return placed.along(placed.dim + (args[1] % y.dim() <= placed.dim))
        before, size = math.prod(x.shape[: placed.dim]), x.shape[placed.dim]
        # A view keeps the elements before the cut dimension.
        dims = [
            dim
            for dim, new in enumerate(y.shape)
            if math.prod(y.shape[:dim]) == before and size and placed.whole * new % size == 0
        ]
        if len(dims) > 1:  # beside dimensions of one element; "-1" is the number that differs between ranks
            dims = [dim for dim in dims if dim == open_dim(name, x, args)]
        if not dims:
            self.unknown.append(f"{self._module}: {name}")
            return None
        return placed.along(dims[0], placed.whole * y.shape[dims[0]] // size)

    def _sliced(self, placed: Placed, x: Tensor, y: Tensor) -> Placed | None:
        """The placement of x[...], if no dimension has gone or come before the one that is cut."""
        dim = placed.dim
        if dim is not None and y.dim() >= x.dim() and y.shape[: dim + 1] == x.shape[: dim + 1]:
            return placed
        self.unknown.append(f"{self._module}: getitem")
        return None


def _parts(placed: Placed, args: Sequence[Any], y: Tensor, name: str) -> Placed:
    """That of a part of a packed tensor, or of several that are packed."""
    dim, x = placed.dim, next(tensors_in(args))
    if dim is None or name not in PACKED:
        return placed
    return placed.along(dim, placed.whole * y.shape[dim] // max(1, x.shape[dim]))


_UNKNOWN = object()
_GATHER = "set gather_output=True at the layer before it, or put it behind a row-parallel linear"
_LOSS = "use vocab_parallel_cross_entropy for a loss, or set gather_output=True at the layer before it"


def _transposed(name: str, x: Tensor, placed: Placed, args: Sequence[Any]) -> Placed:
    order = torch.arange(x.dim())
    if name in ("t", "mT", "T"):
        order = order.flip(0) if name == "T" else torch.cat([order[:-2], order[-2:].flip(0)])
    else:
        with torch._C.DisableTorchFunction():
            shape = torch.empty([1 + dim for dim in range(x.dim())], device="meta")
            order = torch.tensor(list(getattr(torch.Tensor, name)(shape, *args[1:]).shape), device="cpu") - 1
    return placed.along(order.tolist().index(placed.dim))
