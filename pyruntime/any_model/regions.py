"""Gradients of whatever is whole on every rank and is combined with activations that are cut.

Between a column linear and the row linear that follows, each rank computes on its own features or heads. A
tensor that is whole there (the weight of a norm over each head, a gain, a gate, keys that all heads share)
takes part in every rank's share, and what flows back to it on one rank is that rank's share of its
gradient:

    z = sum_r f(y_r, w)        dL/dw = sum_r (dL/dz) df(y_r, w)/dw

So that gradient is summed over the group where it leaves the region. Which tensors those are is read off
the autograd graph that the forward has just left, from the row linear's input back to the column linears'
outputs: no name is looked at, and a tensor that is read both inside and outside gets the sum of its inside
part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.any_model.random_streams import RandomStreams
from pyruntime.nn.parameters import TensorGroup

# In a node's metadata:
_MARKS = "pyruntime.regions"  # {number of the output: its Region where it is cut, None where it is whole}
_SUMMED = "pyruntime.summed"  # the node's gradients are summed already: two row linears may share a region
_WHOLE = "pyruntime.whole"  # nothing behind the node is cut, as an earlier walk has found
_LEAF = torch._C._functions.AccumulateGrad


class Region:
    """What one layer knows of the cut activations that it begins (column) or ends (row).

    settled: whether an eager pass has found that nothing needs a sum here, which is what lets torch.compile
    trace the layer; None before the first pass.
    streams: which random numbers are drawn in the region."""

    def __init__(self, label: str, group: TensorGroup, streams: RandomStreams) -> None:
        self.label = label
        self.group = group
        self.streams = streams
        self.settled: bool | None = None

    def begin(self, y: Tensor) -> Tensor:
        """Marks y [..., N/P], the output of a column linear, as cut."""
        self.streams.enter()
        return self._eagerly(Region._begin, y)

    def end(self, x: Tensor) -> Tensor:
        """x [..., K/P], the input of a row linear, once the gradients behind it are seen to."""
        self.streams.leave()
        return self._eagerly(Region._end, x)

    def whole(self, y: Tensor) -> Tensor:
        """Marks y as whole on every rank."""
        return self._eagerly(Region._whole, y)

    def _eagerly(self, method: Callable[[Region, Tensor], Tensor], x: Tensor) -> Tensor:
        """The method outside of torch.compile, where there are gradients."""
        if not torch.is_grad_enabled() or (is_compiling() and self.settled):
            return x
        return _run_eagerly(method, self, x) if is_compiling() else method(self, x)

    def _whole(self, y: Tensor) -> Tensor:
        return _mark(y, None)

    def _begin(self, y: Tensor) -> Tensor:
        # Frozen layers leave no graph, and what is cut must be known by it.
        return _mark(y if y.requires_grad else _Graph.apply(y, torch.empty(0, requires_grad=True)), self)

    def _end(self, x: Tensor) -> Tensor:
        if x.grad_fn is None:
            return x
        marks = x.grad_fn.metadata.get(_MARKS, {})
        begun, summed = {marks.get(x.output_nr)}, False
        if x.output_nr not in marks:
            begun, summed = _sum_gradients(x.grad_fn, self)
        for region in {self, *begun} - {None}:
            region.settled = region.settled is not False and not summed
        return x


class _Graph(torch.autograd.Function):
    """y with a node of its own, which takes gradients and passes none on."""

    @staticmethod
    def forward(ctx, y: Tensor, anchor: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def mark_whole(x: Tensor) -> None:
    """x is the same on every rank, so the graph behind it is of no concern to a region that reads it."""
    if not torch.is_grad_enabled() or is_compiling():
        return
    _mark(x, None)
    if x.is_leaf and x.requires_grad:  # it has no node to mark
        x.tp_whole = True


def _mark(y: Tensor, region: Region | None) -> Tensor:
    if y.grad_fn is not None:
        y.grad_fn.metadata.setdefault(_MARKS, {})[y.output_nr] = region
    return y


def _sum_gradients(root: Any, end: Region) -> tuple[set[Region], bool]:
    """Sees to every edge from a cut tensor to a whole one. Returns the regions that begin behind `root`, and
    whether there was such an edge."""
    begun: set[Region] = set()
    edges, all_cut = _nodes_behind(root, end, begun)
    if all_cut:
        return begun, False
    cut = _cut_nodes(root, edges)
    found = False
    for node in cut:
        crossing = [
            i
            for i, (other, number) in enumerate(edges[node])
            if other is not None and not _is_cut(other, number, cut)
        ]
        if not crossing:
            continue
        found = True
        if node.metadata.get(_SUMMED):
            continue
        if "CompiledFunction" in node.name():
            raise RuntimeError(
                f"torch.compile has made one piece of what feeds {end.label}, and a tensor that is whole "
                "on every rank is read in it, whose gradient must be summed over the ranks; leave the "
                f"module that holds {end.label} out of torch.compile (torch.compiler.disable)."
            )
        node.metadata[_SUMMED] = True
        node.register_hook(_SumHook(tuple(crossing), end.group.name))
    return begun, found


class _SumHook:
    """A node's hook: sums some of the gradients that it passes on."""

    def __init__(self, edges: tuple[int, ...], group: str) -> None:
        self.edges, self.group = edges, group

    def __call__(self, passed_on, _):
        return tuple(
            ops.all_reduce(g.contiguous(), self.group) if i in self.edges and g is not None else g
            for i, g in enumerate(passed_on)
        )


def _nodes_behind(root: Any, end: Region, begun: set[Region]) -> tuple[dict[Any, tuple], bool]:
    """The nodes from `root` back to marked outputs, leaves and what is known to be whole, with their edges;
    regions that begin there go to `begun`. And whether all of them are cut: nothing whole feeds any."""
    edges: dict[Any, tuple] = {}
    all_cut = True
    stack = [root]
    while stack:
        node = stack.pop()
        if node in edges:
            continue
        edges[node] = following = node.next_functions
        for other, number in following:
            if other is None:
                continue
            if type(other) is _LEAF:
                _check_leaf(other.variable, end)
                all_cut = False
                continue
            known = other.metadata
            if number in (marks := known.get(_MARKS, ())):
                if marks[number] is None:
                    all_cut = False
                else:
                    begun.add(marks[number])
            elif _WHOLE in known:
                all_cut = False
            else:
                stack.append(other)
    return edges, all_cut


def _cut_nodes(root: Any, edges: dict[Any, tuple]) -> set[Any]:
    """Those of the nodes that the column linears' cut outputs flow into; `root` is one whatever it reads,
    because a row linear's input is. The others are remembered as whole."""
    readers: dict[Any, list] = {}
    seeds = [root]
    for node, following in edges.items():
        for other, number in following:
            if other in edges and number not in other.metadata.get(_MARKS, ()):
                readers.setdefault(other, []).append(node)
            elif other is not None and _is_cut(other, number, ()):
                seeds.append(node)
    cut: set[Any] = set()
    while seeds:
        node = seeds.pop()
        if node not in cut:
            cut.add(node)
            seeds.extend(readers.get(node, ()))
    for node in edges.keys() - cut:
        node.metadata[_WHOLE] = True
    return cut


def _is_cut(node: Any, number: int, cut: Container[Any]) -> bool:
    marks = node.metadata.get(_MARKS, {})
    return marks[number] is not None if number in marks else node in cut


def _check_leaf(leaf: Tensor, end: Region) -> None:
    if getattr(leaf, "tp_dim", None) is not None:
        raise RuntimeError(
            f"What feeds {end.label} reads a parallel layer's weight {list(leaf.shape)} itself, which "
            "holds this rank's shard alone; call the layer, or leave it out of the plan."
        )
    if not isinstance(leaf, torch.nn.Parameter) and not getattr(leaf, "tp_whole", False):
        raise RuntimeError(
            f"What feeds {end.label} begins at a tensor {list(leaf.shape)} that is no parameter, and "
            "whether it is cut cannot be told; use checkpoint(use_reentrant=False), or detach the tensor."
        )


_run_eagerly = torch.compiler.disable(
    lambda method, region, x: method(region, x),
    reason="gradients around parallel layers are checked in the first eager step: run one forward pass "
    "before torch.compile, or compile without fullgraph=True",
)
