"""Finds which linears of a model read the outputs of which others, and makes a plan from that.

A model of transformers is run once, without gradients, on its own dummy inputs. Each operator then passes on
which layers' outputs its operands came from. Any other module is traced by torch.fx, whose graph shows the
same. The style of a linear is

    row             if it reads only outputs of column linears, which nothing else reads
    column          if only row linears read it
    row_split       if it reads only outputs of column linears, which others read too
    column_gather   otherwise

Whether the code between them works on a rank's features is not examined: the first call compares
(first_call.py).

If the model's code splits a linear's output into adjacent views (split, chunk, slices, an axis of 3), those
are the linear's parts. No name matters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyruntime.any_model import lora
from pyruntime.any_model.comparing import forwards, tensors_of, untouched
from pyruntime.nn.linear import is_transposed

Sources = frozenset[str]
"""Names of the last layers from whose outputs a tensor was computed; "" stands for the model's input."""


@dataclasses.dataclass
class Flow:
    """The data flow between a model's layers. reads: {linear: sources of its inputs}, in the order of first
    calls. embeddings: those that were called. results: sources of the model's output. read_elsewhere: layers
    whose weight is read by code outside the layer. views: {linear: (its out_features, {[start, stop) of the
    features in each view of its output})}."""

    reads: dict[str, Sources] = dataclasses.field(default_factory=dict)
    embeddings: dict[str, None] = dataclasses.field(default_factory=dict)
    results: Sources = frozenset()
    read_elsewhere: dict[str, None] = dataclasses.field(default_factory=dict)
    views: dict[str, tuple[int, set[tuple[int, int]]]] = dataclasses.field(default_factory=dict)

    def called(self, name: str, layer: nn.Module, sources: Sources) -> None:
        if isinstance(layer, nn.Embedding):
            self.embeddings[name] = None
        else:
            self.reads[name] = self.reads.get(name, frozenset()) | sources


def parts_of(flow: Flow) -> dict[str, tuple[int, ...]]:
    """Returns {linear: sizes of its parts} of the linears whose output is split into parts."""
    parts = {name: _side_by_side(width, views) for name, (width, views) in flow.views.items()}
    return {name: sizes for name, sizes in parts.items() if len(sizes) > 1}


def _side_by_side(width: int, views: set[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the sizes of the widest views that together cover `width`; () where views do not cover it."""
    sizes: list[int] = []
    while (at := sum(sizes)) < width:
        stop = max((stop for start, stop in views if start == at), default=at)
        if stop == at:
            return ()
        sizes.append(stop - at)
    return tuple(sizes)


def styles_of(flow: Flow) -> dict[str, str]:
    """Returns {linear: style}. A pure function of the flow."""
    reads = {name: sources for name, sources in flow.reads.items() if name not in flow.read_elsewhere}
    columns: set[str] = set()
    rows: dict[str, Sources] = {}
    for name, sources in reads.items():
        if sources and sources <= columns:
            rows[name] = sources
        else:
            columns.add(name)
    others = frozenset().union(
        flow.results, *(sources for name, sources in flow.reads.items() if name not in rows)
    )
    whole = set(columns & others)
    while more := {s for sources in rows.values() if sources & whole for s in sources} - whole:
        whole |= more
    read = frozenset().union(*rows.values())
    styles = {}
    for name in reads:
        if name in rows:
            styles[name] = "row_split" if rows[name] & whole else "row"
        else:
            styles[name] = "column" if name in read and name not in whole else "column_gather"
    return styles


def flow_of(model: nn.Module) -> Flow:
    """Follows the flow through `model`. Raises ValueError where it cannot be followed."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if lora.wrapper_of(name) == name and (lora.is_wrapper(module) or _is_layer(module))
    }
    inputs = getattr(model, "dummy_inputs", None)
    how = "running it on its dummy_inputs" if isinstance(inputs, dict) else "tracing it with torch.fx"
    try:
        return _run(model, layers, inputs) if isinstance(inputs, dict) else _traced(model, layers)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"The plan 'auto' follows how the linears of this {type(model).__name__} feed each other, but "
            f"{how} failed ({type(error).__name__}: {first_line}); pass a mapping such as "
            "{'*.up_proj': 'column', '*.down_proj': 'row'}."
        ) from error


def _is_layer(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) or is_transposed(module)


# -- models of transformers


def _run(model: nn.Module, layers: dict[str, nn.Module], inputs: dict[str, Any]) -> Flow:
    device = next(model.parameters()).device
    inputs = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}
    follower = _Follower(layers)
    for value in inputs.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            follower.note(value, frozenset({""}))
    names = {layer: name for name, layer in layers.items()}
    followed = forwards(list(layers.values()), lambda layer: follower.forward_of(layer, names[layer]))
    with untouched(model), followed, follower:
        output = model(**inputs)
    follower.flow.results = follower.sources(value for _, value in tensors_of(output))
    return follower.flow


class _Follower(TorchDispatchMode):
    """Tracks the sources of every storage that an operator has written."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.flow = Flow()
        self._sources: dict[int, Sources] = {}
        self._outputs: dict[int, tuple[str, int]] = {}  # {storage: (linear that returned it, out_features)}
        self._kept: list[Any] = []  # the number of a freed storage would be used again
        self._weights = {p.untyped_storage()._cdata: n for n, m in layers.items() for p in m.parameters()}
        self._in_layer = False

    def note(self, tensor: Tensor, sources: Sources) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._sources[storage._cdata] = sources

    def sources(self, tensors: Iterable[Tensor]) -> Sources:
        found = (self._sources.get(t.untyped_storage()._cdata, frozenset()) for t in tensors)
        return frozenset().union(*found)

    def forward_of(self, layer: nn.Module, name: str):
        own = layer.forward

        def forward(x: Tensor) -> Tensor:
            self.flow.called(name, layer, self.sources([x]))
            self._in_layer = True
            try:
                y = own(x)
            finally:
                self._in_layer = False
            self.note(y, frozenset({name}))
            if not isinstance(layer, nn.Embedding) and y.is_contiguous() and y.storage_offset() == 0:
                self._outputs[y.untyped_storage()._cdata] = name, y.shape[-1]
            return y

        return forward

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._in_layer:
            return output
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in read:
            if name := self._weights.get(tensor.untyped_storage()._cdata):
                self.flow.read_elsewhere[name] = None
        sources = self.sources(read)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and sources:
                self.note(tensor, sources | self.sources([tensor]))
                self._note_view(tensor)
        return output

    def _note_view(self, tensor: Tensor) -> None:
        name, width = self._outputs.get(tensor.untyped_storage()._cdata, ("", 0))
        if (held := _features_in(tensor, width)) and held != (0, width):
            self.flow.views.setdefault(name, (width, set()))[1].add(held)


def _features_in(view: Tensor, width: int) -> tuple[int, int] | None:
    """Returns [start, stop) of the features that a view of a tensor [.., width] holds of every row; None
    where they are not adjacent."""
    if not width:
        return None
    dense = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride % width:
            if stride != dense:
                return None
            dense *= size
    start = view.storage_offset() % width
    return (start, start + dense) if start + dense <= width else None


# -- any other module


class _Tracer(fx.Tracer):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._layers = set(layers.values())

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return module in self._layers or super().is_leaf_module(module, name)


_SHAPES = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride"}
"""Attributes and methods of a tensor that do not read its elements."""


def _traced(model: nn.Module, layers: dict[str, nn.Module]) -> Flow:
    flow = Flow()
    sources: dict[fx.Node, Sources] = {}
    names = {layer: name for name, layer in layers.items()}
    owners = {f"{name}.{leaf}": name for name, m in layers.items() for leaf, _ in m.named_parameters()}
    modules = dict(model.named_modules())
    first = True
    for node in _Tracer(layers).trace(model).nodes:
        found = frozenset().union(*(sources[read] for read in node.all_input_nodes))
        if node.op == "placeholder":
            found, first = frozenset({""}) if first else frozenset(), False
        elif node.op == "get_attr" and node.target in owners:
            flow.read_elsewhere[owners[node.target]] = None
        elif node.op == "call_module" and (layer := modules[node.target]) in names:
            flow.called(names[layer], layer, found)
            found = frozenset({names[layer]})
        elif _asks_shape(node):
            found = frozenset()
        elif node.op == "output":
            flow.results = found
        sources[node] = found
    return flow


def _asks_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPES
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPES
