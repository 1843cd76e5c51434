"""Type-checks the training graph: over each axis of ranks every tensor has a placement.

    replicated   the same on every rank
    sharded      each rank's own: rows of activations, a shard of a weight
    partial      each rank's term of a sum that has not been taken yet

`OPS` has the result's placement for each communicating operator; all other results follow from their
operands. `PlacementCheck` follows tensors through forward passes and raises if one is used against its
placement. The rule about gradients is that of JAX's shard_map (`check_vma`): if a replicated tensor meets a
sharded one, its gradient depends on each rank's own operands and is partial. So it must first go through
`replicate_grad`, whose backward takes the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

Placement: TypeAlias = Literal["replicated", "sharded", "partial"]


class PlacementError(RuntimeError):
    """Raised if a tensor is used against its placement over an axis."""


@dataclass(frozen=True)
class Rule:
    """An operator's rule. result: placement over the axis of its group; None: that of its operands. sums: it
    takes the sum of partial operands. like: index of the argument whose placement the result has. The
    operator's backward sums the gradients of replicated operands, or they have none."""

    result: Placement | None = None
    sums: bool = False
    like: int | None = None


OPS: Mapping[str, Rule] = {
    "all_gather": Rule("sharded"),  # the values are replicated, but its backward sums each rank's gradient
    "all_gather_stats": Rule("replicated", sums=True),  # gathers all terms
    "all_reduce": Rule("replicated", sums=True),
    "reduce_scatter": Rule("sharded", sums=True),
    "replicate_grad": Rule("sharded"),
    "all_gather_matmul": Rule("sharded"),
    "matmul_reduce_scatter": Rule("sharded"),
    "matmul_all_reduce": Rule("replicated"),
    "replicated_matmul": Rule("sharded"),
    **dict.fromkeys(("begin_column", "end_column", "begin_row", "end_row", "share_weight"), Rule("sharded")),
    # With statistics of the whole vocabulary, a rank's own logits give the same loss on every rank.
    "cross_entropy_loss": Rule(like=2),
    "linear_cross_entropy": Rule("replicated"),
}
"""Rules by name in torch.ops.pyruntime."""

_MOVES = {
    *("__get__", "__getitem__", "clone", "contiguous", "detach", "detach_", "double", "expand", "flatten"),
    *("float", "requires_grad_", "reshape", "squeeze", "sum", "to", "transpose", "unbind", "unsqueeze"),
    *("view", "view_as"),
}
_TOGETHER = {
    *("cat", "stack", "add", "__add__", "__radd__", "__iadd__", "add_"),
    *("sub", "__sub__", "__isub__", "sub_"),
}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "__imul__", "mul_"}
_QUOTIENTS = {"div", "__div__", "__truediv__", "true_divide", "div_", "__itruediv__"}
"""Functions of torch, methods and operators that may take partial sums, by name."""


class PlacementCheck(TorchFunctionMode):
    """Checks every function of torch that makes tensors within this context.

    axes: the groups of each axis, by its name. `mark` gives the placements of parameters and inputs. Without
    a mark, a tensor that requires a gradient is sharded over all axes, as activations of other stages are;
    any other is replicated.

    Raises PlacementError if a replicated tensor that requires a gradient meets a sharded one, or if a partial
    one is used other than in a sum; also from `expect`."""

    def __init__(self, axes: Mapping[str, Collection[str]]):
        super().__init__()
        self._axes = {axis: frozenset(groups) for axis, groups in axes.items()}
        self._found = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()

    def mark(self, tensor: Tensor, name: str = "", **placements: Placement) -> None:
        """Sets a tensor's placement by axis; it is replicated over axes that are not named."""
        self._found[tensor] = {axis: placements.get(axis, "replicated") for axis in self._axes}
        if name:
            self._names[tensor] = name

    def mark_parameters(
        self, model: nn.Module, tp: str, summed: Mapping[str, Collection[nn.Parameter]]
    ) -> None:
        """Marks parameters by their layouts over the axis `tp`. summed: by axis, the parameters whose
        gradients are summed over it after the backward pass; in the graph they count as sharded."""
        own = {axis: {id(parameter) for parameter in parameters} for axis, parameters in summed.items()}
        for name, parameter in model.named_parameters():
            layout = getattr(parameter, "tp_layout", None)
            placements: dict[str, Placement] = {
                axis: "sharded" for axis, parameters in own.items() if id(parameter) in parameters
            }
            if layout is not None and layout.dim is not None:
                placements[tp] = "sharded"
            self.mark(parameter, name, **placements)

    def expect(self, tensor: Tensor, name: str, **placements: Placement) -> None:
        """Raises PlacementError unless the tensor has these placements."""
        for axis, wanted in placements.items():
            if axis in self._axes and (found := self.of(tensor, axis)) != wanted:
                raise PlacementError(f"{name} is {found} over the axis {axis}, but must be {wanted} there.")

    def of(self, tensor: Tensor, axis: str) -> Placement:
        known = self._found.get(tensor)
        if known is not None:
            return known[axis]
        return "sharded" if tensor.requires_grad else "replicated"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results, operands = list(tensors_in([result])), list(tensors_in([*args, *kwargs.values()]))
        if not results or not any(each in self._found for each in operands):
            return result  # not part of the graph: a number for the log, or backward()
        name = getattr(func, "__name__", "")
        groups = {each for each in [*args, *kwargs.values()] if isinstance(each, str)}
        is_ours = str(getattr(func, "_qualified_op_name", "")).startswith("pyruntime::")
        rule = OPS.get(name) if is_ours else None
        placements = {
            axis: self._over(axis, name, rule, bool(groups & named), operands, args, kwargs)
            for axis, named in self._axes.items()
        }
        called = self._name_of(name, operands)
        for each in results:
            self._found[each] = placements
            if called:
                self._names[each] = called
        return result

    def _name_of(self, name: str, operands: Sequence[Tensor]) -> str:
        """Returns a name for errors if the result is made only from parameters; else an empty string."""
        names = [self._names[each] for each in operands if each in self._names]
        if not names or len(names) < len(operands) or not (name in _MOVES or name in _TOGETHER):
            return ""
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    def _over(
        self,
        axis: str,
        name: str,
        rule: Rule | None,
        exchanges: bool,
        operands: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Placement:
        """Returns the result's placement over an axis. exchanges: the function communicates over it."""
        found = [self.of(each, axis) for each in operands]
        if rule is not None and rule.like is not None:
            return self.of(args[rule.like], axis)
        if "partial" in found and not (rule and rule.sums and exchanges):
            return self._of_partial(axis, name, operands, found, args)
        if rule is not None and exchanges and rule.result is not None:
            return rule.result
        if "sharded" not in found:
            return "partial" if "partial" in found else "replicated"
        if rule is None and torch.is_grad_enabled():
            self._check_gradients(axis, name, operands, found)
        return "partial" if name == "sum" and _sums_rows(args[1:], kwargs) else "sharded"

    def _of_partial(
        self,
        axis: str,
        name: str,
        operands: Sequence[Tensor],
        found: Sequence[Placement],
        args: Sequence[Any],
    ) -> Placement:
        """Returns "partial"; raises PlacementError unless the function is linear in its partial operands."""
        partial, others = found.count("partial"), set(found) - {"partial"}
        is_first = isinstance(args[0], Tensor) and self.of(args[0], axis) == "partial"
        alone = partial == 1 and others <= {"replicated"}
        if (
            (name in _MOVES and partial == len(found))
            or (name in _TOGETHER and partial == len(found) > 1)
            or (name in _PRODUCTS and alone)
            or (name in _QUOTIENTS and alone and is_first)
        ):
            return "partial"
        shapes = ", ".join(self._text(each, placed) for each, placed in zip(operands, found, strict=True))
        raise PlacementError(
            f"{name} was given {shapes}, over the axis {axis}: a partial tensor is each rank's term of a sum "
            "that has not been taken, and only sums, and products with replicated tensors, may use it; "
            "all_reduce or reduce_scatter it first."
        )

    def _check_gradients(
        self, axis: str, name: str, operands: Sequence[Tensor], found: Sequence[Placement]
    ) -> None:
        for each, placed in zip(operands, found, strict=True):
            if placed == "replicated" and each.requires_grad:
                raise PlacementError(
                    f"{name} was given {self._text(each, placed)}, with operands that are sharded over the "
                    f"axis {axis}: its gradient would be partial, but is used as if it were replicated; pass "
                    "it through replicate_grad, whose backward sums over the ranks."
                )

    def _text(self, tensor: Tensor, placed: Placement) -> str:
        return f"{self._names.get(tensor) or 'a tensor'} {list(tensor.shape)} ({placed})"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _sums_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a sum is over all dimensions or the first, which is the one that is cut."""
    dims = args[0] if args else kwargs.get("dim")
    return dims is None or 0 in (dims if isinstance(dims, list | tuple) else [dims])
