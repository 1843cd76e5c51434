"""The experts of a mixture, spread over a group: each rank holds some of them whole."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.module import LayerHook, ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.nn.tiers import OpUse, check_tier


class ParallelExperts(ParallelModule):
    """y = sum over slots j of p_j E_{i_j}(x), E_i(x) = down_i (silu(gate_i x) * up_i x), of E experts.

    Call: layer(x, ids, weights) with x [M, D], the experts of each row, ids [M, k], and their weights p,
    [M, k]. With sequence_parallel all three have this rank's rows, as torch.tensor_split cuts them, and so
    has y; without it all rows, on every rank. Nothing is dropped; how rows travel: `pyruntime.ops.experts`.

    Over `runtime.ep`, if `Runtime.start(ep=...)` made it another group than tp's, every rank has rows of its
    own, any number, and so has y; sequence_parallel is then not read. Each expert's gradient is summed over
    the rows of its group, and by `pyruntime.shard` over the ranks that hold it too.

    State dict: "gate_up_proj" [E, 2 F, D], the gate's rows first, and "down_proj" [E, D, F], DTensors with
    Shard(0): the names and shapes of transformers' experts.

    tier: as of `pyruntime.ops.experts`. hook: see ParallelModule. Raises ValueError where the group leaves a
    rank without an expert, and in a call without a group."""

    def __init__(
        self,
        experts: int,
        features: int,
        width: int,
        *,
        group: Group | TensorGroup,
        sequence_parallel: bool = True,
        tier: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        hook: LayerHook | None = None,
    ):
        super().__init__(group, hook)
        self.experts, self.features, self.width = experts, features, width
        self.sequence_parallel, self.tier = sequence_parallel, check_tier(tier)
        gate_up = [Part("gate_up_proj", (experts, 2 * width, features))]
        self.add_parameter("gate_up_proj", 0, gate_up, dtype, device)
        self.add_parameter("down_proj", 0, [Part("down_proj", (experts, features, width))], dtype, device)
        self.reset_parameters()

    @classmethod
    def from_experts(cls, module: nn.Module, group: Group | TensorGroup, **options) -> Self:
        """Builds the parallel form of transformers' experts, which every rank holds whole. options: as in the
        constructor. Raises ValueError where they compute something else (`why_not`)."""
        if why := why_not(module):
            raise ValueError(f"{type(module).__name__} cannot be spread over ranks: {why}.")
        experts, features, width = module.down_proj.shape
        options = {"dtype": module.down_proj.dtype, **options, "device": "meta"}
        return cls(experts, features, width, group=group, **options)._take({"": module})

    @property
    def weight(self) -> nn.Parameter:
        """The parameter whose dtype and device are the layer's."""
        return self.gate_up_proj

    def reset_parameters(self) -> None:
        """Draws all experts as nn.Linear draws its weight, and keeps this rank's: the same for every tp,
        provided that all ranks have the same seed."""
        if self.weight.is_meta:
            return
        for name, layout in self._layouts.items():
            (part,) = layout.parts
            bound = 1 / math.sqrt(part.shape[-1])
            parameter = self._parameters[name]
            whole = torch.empty(part.shape, dtype=parameter.dtype, device=parameter.device)
            with torch.no_grad():
                parameter.copy_(layout.local_part(part, whole.uniform_(-bound, bound)))

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have rows of their own, not shares of the same ones: experts over `runtime.ep`."""
        return self.group.copies is not None

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, rows: int | None = None) -> Tensor:
        """rows: M of all ranks, or with rows of their own the most of a rank, if the caller knows it; None:
        ranks exchange it."""
        if not self.has_own_rows:
            return self.multiply(x, ids, weights, cut=self.sequence_parallel, rows=rows)
        own, most = x.shape[0], self._most(x) if rows is None else rows
        if own > most:
            raise ValueError(
                f"This rank has {own} rows, and rows={most} is the most of a rank; pass its number."
            )
        # Ranks have equally many rows in the operator; rows beyond a rank's own go to no expert.
        x, ids, weights = (
            each if own == most else pad(each, (0, 0, 0, most - own), value=value)
            for each, value in ((x, 0.0), (ids, -1), (weights, 0.0))
        )
        return self.multiply(x, ids, weights, cut=True, rows=most * self.group.size)[:own]

    def _most(self, x: Tensor) -> int:
        """Returns the rows of the rank with most."""
        if self.group.size == 1:
            return x.shape[0]
        own = torch.tensor([x.shape[0]], dtype=torch.float64)
        return int(ops.all_gather_stats(own, self.group.name).max())

    def multiply(
        self, x: Tensor, ids: Tensor, weights: Tensor, *, cut: bool, rows: int | None = None
    ) -> Tensor:
        """Returns y [M, D]. cut: whether the arguments hold this rank's rows, of `rows` in all."""
        if not self.group.name:
            raise ValueError(
                "ParallelExperts needs a process group, of one rank at least; start pyruntime.Runtime and "
                "pass runtime.tp."
            )
        gate_up, down, device = self.gate_up_proj, self.down_proj, x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        weights = weights.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        y = ops.experts(
            x.contiguous(),
            ids,
            weights,
            gate_up,
            down,
            self.group.name,
            experts=self.experts,
            cut=cut,
            rows=rows,
            tier=self.tier,
        )
        if not is_compiling():
            every = x.shape[0] if not cut else rows or x.shape[0] * self.group.size
            self.__dict__.update(last_rows=every, last_cut_rows=cut)
        return y

    def op_uses(self) -> list[OpUse]:
        """The operator and its backward; n and k are those of gate_up."""
        n, k = self.weight.shape[1:]
        return [OpUse("forward", "experts", n, k), OpUse("backward", "experts_backward", n, k)]

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, features={self.features}, width={self.width}, group=({self.group}), "
            f"sequence_parallel={self.sequence_parallel}, tier={self.tier!r}"
        )


def looks_like_experts(module: nn.Module) -> bool:
    """Whether it is a class of experts of transformers, which keeps them in stacked parameters."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def why_not(module: nn.Module) -> str:
    """Says why the experts of a model are not those that ParallelExperts computes; "" where they are."""
    if not looks_like_experts(module):
        return "it has no gate_up_proj and down_proj of all experts"
    if not module.has_gate or module.has_bias or module.is_transposed or not module.is_concatenated:
        return "its experts have biases, no gate, or another order of their weights"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm"
    names = {name for name, _ in module.named_parameters()}
    if names != {"gate_up_proj", "down_proj"} or any(True for _ in module.buffers()):
        return f"it holds {', '.join(sorted(names)) or 'nothing'}, not gate_up_proj and down_proj alone"
    activation = getattr(module, "act_fn", None)
    probe = torch.linspace(-6, 6, 25, device="cpu")
    if activation is None or not torch.equal(activation(probe), nn.functional.silu(probe)):
        return f"its activation is {type(activation).__name__}, not SiLU"
    if type(module)._apply_gate.__name__ != "_default_apply_gate":
        return "it multiplies gate and up in its own way"
    experts, features, width = module.down_proj.shape
    if tuple(module.gate_up_proj.shape) != (experts, 2 * width, features):
        return f"gate_up_proj is {list(module.gate_up_proj.shape)} and down_proj {[experts, features, width]}"
    return ""
