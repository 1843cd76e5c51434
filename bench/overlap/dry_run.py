"""Records the operators of a forward pass of some layers without ranks and without memory: the model runs on
the meta device, and operators that would communicate are recorded instead of run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyruntime.llama import Llama, LlamaConfig
from pyruntime.llama.model import ModelPart
from pyruntime.nn.parameters import TensorGroup

ATTENTION = ("pyruntime.llama.block.causal_attention", "pyruntime.llama.slices.causal_attention")


@dataclass(frozen=True)
class Call:
    """One recorded operator, in the order in which the computing thread calls them."""

    name: str
    """begin_column, end_column, begin_row, end_row (whole linears are two of these), share_weight, attention
    or norm."""
    flight: int = -1
    """Number that a begin shares with its end."""
    weight: int = -1
    flops: float = 0.0
    """Operations of this rank's GEMM, or of causal attention."""
    bytes: float = 0.0
    """Bytes of all gathered or scattered rows; for a norm, of one pass over its rows."""
    whole: bool = False
    """Whether the two steps of this linear are one operator, forward and backward."""


class _Recorder(TorchDispatchMode):
    def __init__(self, ranks: int):
        super().__init__()
        self.calls: list[Call] = []
        self._ranks = ranks
        self._numbers: dict[int, int] = {}
        self._marks: dict[
            int, tuple[Tensor, int]
        ] = {}  # number of a mark: the tensor it stands for, its rows
        self._alive: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        """Returns the number of the tensor's memory."""
        self._alive.append(tensor)
        return self._numbers.setdefault(tensor.untyped_storage()._cdata, len(self._numbers))

    def _mark(self, tensor: Tensor, rows: int = 0) -> Tensor:
        mark = tensor.new_empty(1)
        self._marks[self.number(mark)] = tensor, rows
        return mark

    def _behind(self, mark: Tensor) -> tuple[Tensor, int]:
        return self._marks[self.number(mark)]

    def add(self, name: str, **facts) -> None:
        self.calls.append(Call(name, **facts))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        take = getattr(self, "_" + func._schema.name.rpartition("::")[2], None)
        if func.namespace == "pyruntime" and take is not None:
            return take(*args)
        return func(*args, **(kwargs or {}))

    def _linear(self, names, flight: int, x: Tensor, weight: Tensor, rows: int, width: int, whole: bool):
        facts = {
            "flight": flight,
            "weight": self.number(weight),
            "flops": 2.0 * rows * weight.numel(),
            "bytes": float(rows * width * x.element_size()),
            "whole": whole,
        }
        for name in names:
            self.add(name, **facts)

    def _all_gather_matmul(self, x, weights, biases, group, dim, rows, return_gathered, *_):
        (weight,) = weights
        names = ("begin_column", "end_column")
        self._linear(names, -1 - len(self.calls), x, weight, rows, x.shape[-1], True)
        y = x.new_empty(rows, weight.shape[0])
        return [y, x.new_empty(rows, x.shape[-1])] if return_gathered else [y]

    def _matmul_reduce_scatter(self, x, weight, *_):
        names = ("begin_row", "end_row")
        self._linear(names, -1 - len(self.calls), x, weight, len(x), weight.shape[0], True)
        return x.new_empty(len(x) // self._ranks, weight.shape[0])

    def _share_weight(self, weight, shared):
        self.add("share_weight", weight=self.number(weight))
        return self._mark(weight)

    def _begin_column(self, x, weight, shared, group, rows, *_):
        begun = self._mark(x, rows)
        self._linear(("begin_column",), self.number(begun), x, weight, rows, x.shape[-1], False)
        return begun

    def _end_column(self, begun, x_shard, shared, *_):
        (weight, _), (x, rows) = self._behind(shared), self._behind(begun)
        self._linear(("end_column",), self.number(begun), x, weight, rows, x.shape[-1], False)
        return x.new_empty(rows, weight.shape[0])

    def _begin_row(self, x, shared, *_):
        weight, _ = self._behind(shared)
        begun = self._mark(x.new_empty(len(x), weight.shape[0]))
        self._linear(("begin_row",), self.number(begun), x, weight, len(x), weight.shape[0], False)
        return begun

    def _end_row(self, begun, flight):
        y, _ = self._behind(begun)
        self.add("end_row", flight=self.number(begun), bytes=float(y.numel() * y.element_size()))
        return y.new_empty(len(y) // self._ranks, y.shape[1])

    def _add_rms_norm(self, y, residual, weight, eps):
        self.add("norm", bytes=float(2 * y.numel()))
        return y.new_empty(y.shape), y.new_empty(y.shape), y.new_empty(len(y), dtype=torch.float32)

    def _replicate_grad(self, x, group):
        return x.new_empty(x.shape)


def calls_of(
    config: LlamaConfig, layers: int, ranks: int, seq: int, slices: int, keep_gathered: bool | None = None
) -> list[Call]:
    """Returns the calls of a forward pass of one sequence, bf16, `layers` layers, `ranks` ranks of tp."""
    group = TensorGroup("dry run", 0, ranks)
    part = ModelPart(tuple(range(layers)), embed=False, head=False)
    kept = None if slices > 1 else keep_gathered
    model = Llama(
        dataclasses.replace(config, num_hidden_layers=layers + 1),  # none of them is the last
        group,
        dtype=torch.bfloat16,
        device="meta",
        slices=slices,
        keep_gathered=kept,
        part=part,
        seed=None,
    )
    recorder = _Recorder(ranks)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        seen = queries * (keys - queries) + queries * (queries + 1) / 2
        recorder.add("attention", flops=4.0 * q.shape[0] * q.shape[1] * q.shape[3] * seen)
        return q

    with contextlib.ExitStack() as stack:
        for place in ATTENTION:
            stack.enter_context(mock.patch(place, attention))
        # torch refuses to say whether autocast is on for meta tensors.
        stack.enter_context(mock.patch("torch.is_autocast_enabled", lambda device: False))
        stack.enter_context(recorder)
        x = torch.empty(seq // ranks, config.hidden_size, dtype=torch.bfloat16, device="meta")
        model.run(x, part.layers, 1, seq)
    return recorder.calls


def backward(calls: list[Call]) -> Iterator[Call]:
    """Yields the calls in autograd's order: by sequence number, the last one first."""
    return reversed(calls)
