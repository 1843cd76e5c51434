"""Which linears of a model read what other linears give, and the plan that follows.

A model of transformers is run once, without gradients, on its own dummy inputs, and every operator that runs
passes on whose outputs its operands were made of. Any other module is traced by torch.fx, whose graph says
the same. Then

    row             reads the outputs of column linears alone, which nothing else reads
    column          is read by such
    row_split       reads the outputs of column linears alone, which others read too
    column_gather   everything else

Whether what stands between them works on a rank's features is not looked at: the first call compares
(first_call.py).

Where the model's code takes a linear's output apart into views that lie one behind the other (split, chunk,
slices, an axis of 3), those are its parts, whatever they and it are called."""

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
"""Names of the layers that a tensor was made of, back to the last layers on each way; "" for the model's
input."""


@dataclasses.dataclass
class Flow:
    """reads: {linear: sources of its inputs}, in the order of first calls. embeddings: those that were
    called. results: sources of the model's output. read_elsewhere: layers whose weight is read by other code
    than their own. views: {linear: (its out_features, [start, stop) of those that a view of its output
    holds)}."""

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
    """{linear: sizes of the parts that its output is taken apart into}, of linears whose is."""
    parts = {name: _side_by_side(width, views) for name, (width, views) in flow.views.items()}
    return {name: sizes for name, sizes in parts.items() if len(sizes) > 1}


def _side_by_side(width: int, views: set[tuple[int, int]]) -> tuple[int, ...]:
    """Sizes of the widest views that together are all of `width`; () where none are."""
    sizes: list[int] = []
    while (at := sum(sizes)) < width:
        stop = max((stop for start, stop in views if start == at), default=at)
        if stop == at:
            return ()
        sizes.append(stop - at)
    return tuple(sizes)


def styles_of(flow: Flow) -> dict[str, str]:
    """{linear: style}. A pure function of the flow."""
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
    """The flow through `model`. Raises ValueError where it cannot be followed."""
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
            f"The plan 'auto' reads off how the linears of this {type(model).__name__} feed each other, but "
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
    """Keeps the sources of every storage that an operator has written."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.flow = Flow()
        self._sources: dict[int, Sources] = {}
        self._outputs: dict[int, tuple[str, int]] = {}  # {storage: (linear that gave it, out_features)}
        self._kept: list[Any] = []  # a storage that was freed would give its number to another
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
    """[start, stop) of the features that a view of a tensor [.., width] holds of every row, where they lie
    side by side; else None."""
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
"""What is asked of a tensor without reading it."""


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
