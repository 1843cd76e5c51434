"""Runs column linears that read the same input as one op.

q, k and v read one x, gate and up another. Separately, each would sum its part of dX over the ranks.
Together they sum once, and every dW is computed during that sum:

    dX = sum over ranks of (dQ @ W_q + dK @ W_k + dV @ W_v)

So the linear that is called first multiplies for all, and the others take their results. Weights stay where
they are, under their own names. The first call shows which linears read which input (first_call.py). No name
matters, except that the linears belong to one module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pyruntime.any_model import lora
from pyruntime.any_model.activations.row_shard import RowShard, to_rows
from pyruntime.nn.linear import ColumnParallelLinear


def products(linears: Sequence[ColumnParallelLinear], x: Tensor) -> Sequence[Tensor]:
    """Returns x @ W_i^T + b_i of each linear, by one op. x [.., K] is whole on every rank, or a RowShard."""
    first, *others = linears
    if not isinstance(x, RowShard):
        return first.multiply(x, others=others)
    x.form.reads += len(linears)
    ys = first.multiply(to_rows(x), x.row_count, others=others, cut_rows=True)
    return [y.view(*x.shape[:-1], -1) for y in ys]


def _may_bring_weights(layer: ColumnParallelLinear) -> bool:
    """Whether a call of the layer may first do other work, such as gathering its weight."""
    hooks = layer._forward_pre_hooks.values()
    return "forward" in vars(layer) or not all(getattr(hook, "brings_no_weight", False) for hook in hooks)


class SharedInput:
    """Column linears that read one input, and their results of one call that have not been taken yet.

    features: the sum of their features on a rank; 0 once it turned out that they do not read one input."""

    def __init__(self, layers: Iterable[ColumnParallelLinear]) -> None:
        self.layers = tuple(layers)
        self.features = sum(layer.matrix.size(0) for layer in self.layers)
        self._x: Tensor | None = None
        self._state: tuple = ()
        self._outputs: dict[ColumnParallelLinear, Tensor] = {}

    def output(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor | None:
        """Returns the layer's result for x, or None where the layer must compute it by itself: where nothing
        travels (x needs no gradient), while torch.compile traces, and where hooks gather a weight when its
        layer is called, as ZeRO's do.

        A call with another x before all results are taken ends the sharing: the inputs are not one."""
        if not self.layers or is_compiling() or not torch.is_grad_enabled():
            return None
        if not (isinstance(x, RowShard) or x.requires_grad):
            return None
        state = self._state_of(x)
        if self._x is x and self._state == state and layer in self._outputs:
            y = self._outputs.pop(layer)
        elif self._outputs:
            self.layers, self.features, self._x, self._outputs = (), 0, None, {}
            return None
        elif any(_may_bring_weights(each) for each in self.layers):
            return None
        else:
            self._outputs = dict(zip(self.layers, products(self.layers, x), strict=True))
            self._x, self._state = x, state
            y = self._outputs.pop(layer)
        if not self._outputs:
            self._x = None
        return y

    def _state_of(self, x: Tensor) -> tuple:
        """Returns a value that changes when anything changes on which a product depends."""
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        tensors = (x, *(p for each in self.layers for p in (each.weight, each.bias) if p is not None))
        return autocast, *((id(tensor), tensor._version) for tensor in tensors)

    def __getstate__(self) -> dict:
        """Leaves waiting results, which belong to one call, out of copies and pickles."""
        return vars(SharedInput(self.layers))


class SeenInputs:
    """Notes, during one forward pass, which column linears of one module read the same tensor."""

    def __init__(self) -> None:
        self._groups: dict[ColumnParallelLinear, tuple[ColumnParallelLinear, ...]] = {}
        self._module = ""
        self._open: list[tuple[Tensor, int, dict[ColumnParallelLinear, None]]] = []  # inputs of the module

    def note(self, layer: ColumnParallelLinear, x: Tensor) -> None:
        module = lora.wrapper_of(layer.label).rpartition(".")[0]
        if module != self._module:
            self._close()
            self._module = module
        version = 0 if x.is_inference() else x._version
        for seen, its_version, layers in self._open:
            if seen is x and its_version == version:
                layers[layer] = None
                return
        self._open.append((x, version, {layer: None}))

    def _close(self) -> None:
        for _, _, layers in self._open:
            group = tuple(layers)
            for layer in group:
                before = self._groups.setdefault(layer, group)
                if before != group:  # linears whose group changes between calls compute separately
                    self._groups |= {each: (each,) for each in (*before, *group)}
        self._open = []

    def connect(self) -> None:
        """Makes linears that read one input compute together from now on."""
        self._close()
        for group in dict.fromkeys(self._groups.values()):
            hooks: list[Any] = [layer.hook for layer in group]
            if len(group) > 1 and all(hook.shared is None for hook in hooks):
                shared = SharedInput(group)
                for hook in hooks:
                    hook.shared = shared
