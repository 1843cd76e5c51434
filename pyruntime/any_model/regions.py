"""Sums the gradients of tensors that are whole on every rank and are combined with cut activations.

A region is the code between a column linear and the next row linear. There each rank computes on its own
features or heads. A tensor that is whole there (the weight of a norm over each head, a gain, a gate, keys
that all heads share) contributes to every rank's result, so each rank computes only a part of its gradient:

    z = sum_r f(y_r, w)        dL/dw = sum_r (dL/dz) df(y_r, w)/dw

So that gradient is summed over the group where it leaves the region. The autograd graph of the forward pass
shows which tensors need it: it is walked from the row linear's input back to the column linears' outputs. No
name matters. Of a tensor that is read both inside and outside, only the inside part is summed."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.any_model.random_streams import RandomStreams
from pyruntime.nn.parameters import TensorGroup

# Keys of a node's metadata:
_MARKS = "pyruntime.regions"  # {number of the output: its Region where it is cut, None where it is whole}
_SUMMED = "pyruntime.summed"  # the node's gradients are summed already: two row linears may share a region
_WHOLE = "pyruntime.whole"  # an earlier walk found that nothing behind the node is cut
_LEAF = torch._C._functions.AccumulateGrad


class Region:
    """The cut activations that one layer begins (column) or ends (row).

    settled: whether an eager pass has found that no gradient needs a sum here; torch.compile may then trace
    the layer. None before the first pass.
    streams: the random numbers that are drawn in the region."""

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
        """Registers the sums of gradients behind x [..., K/P], the input of a row linear. Returns x."""
        self.streams.leave()
        return self._eagerly(Region._end, x)

    def whole(self, y: Tensor) -> Tensor:
        """Marks y as whole on every rank."""
        return self._eagerly(Region._whole, y)

    def _eagerly(self, method: Callable[[Region, Tensor], Tensor], x: Tensor) -> Tensor:
        """Runs the method outside of torch.compile, and only where gradients are on."""
        if not torch.is_grad_enabled() or (is_compiling() and self.settled):
            return x
        return _run_eagerly(method, self, x) if is_compiling() else method(self, x)

    def _whole(self, y: Tensor) -> Tensor:
        return _mark(y, None)

    def _begin(self, y: Tensor) -> Tensor:
        # Frozen layers leave no graph, but only the graph tells what is cut.
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
    """Gives y a graph node that takes gradients and passes none on."""

    @staticmethod
    def forward(ctx, y: Tensor, anchor: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def mark_whole(x: Tensor) -> None:
    """Marks x as the same on every rank, so that regions which read it ignore the graph behind it."""
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
    """Registers the sum for every edge from a cut tensor to a whole one. Returns the regions that begin
    behind `root`, and whether there was such an edge."""
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
                f"torch.compile has fused the code that feeds {end.label}. It reads a tensor that is whole "
                "on every rank, whose gradient must be summed over the ranks; leave the module that holds "
                f"{end.label} out of torch.compile (torch.compiler.disable)."
            )
        node.metadata[_SUMMED] = True
        node.register_hook(_SumHook(tuple(crossing), end.group.name))
    return begun, found


class _SumHook:
    """A hook of a node that sums some of the gradients which the node passes on."""

    def __init__(self, edges: tuple[int, ...], group: str) -> None:
        self.edges, self.group = edges, group

    def __call__(self, passed_on, _):
        return tuple(
            ops.all_reduce(g.contiguous(), self.group) if i in self.edges and g is not None else g
            for i, g in enumerate(passed_on)
        )


def _nodes_behind(root: Any, end: Region, begun: set[Region]) -> tuple[dict[Any, tuple], bool]:
    """Returns ({node: its edges}, whether nothing whole feeds any of them) for the nodes from `root` back to
    marked outputs, leaves, and nodes known to be whole. Adds regions that begin there to `begun`."""
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
    """Returns the nodes into which the column linears' cut outputs flow. `root` is always one of them,
    because a row linear's input is cut. Marks the others as whole."""
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
            f"Code that feeds {end.label} reads a parallel layer's weight {list(leaf.shape)} directly, which "
            "is only this rank's shard; call the layer, or leave it out of the plan."
        )
    if not isinstance(leaf, torch.nn.Parameter) and not getattr(leaf, "tp_whole", False):
        raise RuntimeError(
            f"Code that feeds {end.label} starts from a tensor {list(leaf.shape)} that is no parameter, so "
            "it is unknown whether it is cut; use checkpoint(use_reentrant=False), or detach the tensor."
        )


_run_eagerly = torch.compiler.disable(
    lambda method, region, x: method(region, x),
    reason="gradients around parallel layers are checked in the first eager step: run one forward pass "
    "before torch.compile, or compile without fullgraph=True",
)
