"""Keys and values that later slices of a sequence read from earlier ones, and their gradients.

A stage runs a sequence slice by slice. Attention in slice s sees the keys and values of slices 0 .. s, so
those of earlier slices are kept, detached from their graphs. The backward pass of a later slice adds to their
gradients, which then enter the backward pass of the slice that made them (TeraPipe, arXiv 2102.07988,
section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Carry:
    """Keys and values of one sequence in one stage, by layer and slice."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens of the slices before the current one."""
        self.part = 0
        """The current slice."""
        self._next_length = 0
        self._made: list[list[tuple[Tensor, Tensor]]] = []  # by slice, in the order of the layers
        self._kept: list[list[tuple[Tensor, Tensor]]] = []  # the same, detached

    def begin(self, part: int) -> Carry:
        """Begins slice `part`, the next to run. Returns this object."""
        assert part == len(self._made)
        self.length, self.part = self._next_length, part
        self._made.append([])
        self._kept.append([])
        return self

    def of_layers(self, layers: int) -> list[LayerCarry]:
        """Returns the object that each layer of the stage, in order, appends to in the current slice."""
        return [LayerCarry(self, layer) for layer in range(layers)]

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Stores the keys and values [B, G, S, d] of the next layer in the current slice."""
        self._made[-1].append((k, v))
        self._kept[-1].append((k.detach().requires_grad_(), v.detach().requires_grad_()))
        self._next_length = self.length + k.shape[2]

    def before(self, part: int, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the keys and values of a layer in the slices before `part`, detached."""
        return [kept[layer] for kept in self._kept[:part]]

    def roots(self, part: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the keys and values of slice `part` that later slices read, and their gradients; drops them
        from the carry."""
        tensors, gradients = [], []
        for made, kept in zip(self._made[part], self._kept[part], strict=True):
            for tensor, leaf in zip(made, kept, strict=True):
                if leaf.grad is not None and tensor.requires_grad:
                    tensors.append(tensor)
                    gradients.append(leaf.grad)
        self._made[part], self._kept[part] = [], []
        return tensors, gradients


class LayerCarry:
    """One layer's access to the `Carry` in one slice."""

    def __init__(self, carry: Carry, layer: int):
        self._carry, self._layer, self._part = carry, layer, carry.part
        self._has_appended = False

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the keys and values [B, G, S, d] of this slice; returns those of all slices so far.

        A layer that is recomputed for its backward pass (activation checkpointing) appends nothing: later
        slices have read the tensors of its first run.
        """
        if not self._has_appended:
            self._carry.keep(k, v)
            self._has_appended = True
        earlier = self._carry.before(self._part, self._layer)
        if not earlier:
            return k, v
        return torch.cat([*(x for x, _ in earlier), k], 2), torch.cat([*(x for _, x in earlier), v], 2)
