"""The experts of a mixture, spread over a group: each rank holds some of them whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from pyruntime import ops
from pyruntime.nn.module import LayerHook, ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.nn.tiers import OpUse, check_tier
from pyruntime.ops.experts import SWIGLU, ExpertForm


class ParallelExperts(ParallelModule):
    """y = sum over slots j of p_j E_{i_j}(x), E_i(x) = down_i (silu(gate_i x) * up_i x), of E experts; with
    `bias` and `form` as `pyruntime.ops.experts` says.

    Call: layer(x, ids, weights) with x [M, D], the experts of each row, ids [M, k], and their weights p,
    [M, k]. With sequence_parallel all three have this rank's rows, as torch.tensor_split cuts them, and so
    has y; without it all rows, on every rank. Nothing is dropped; how rows travel: `pyruntime.ops.experts`.

    Over `runtime.ep`, if `Runtime.start(ep=...)` made it another group than tp's, every rank has rows of its
    own, any number, and so has y; sequence_parallel is then not read. Each expert's gradient is summed over
    the rows of its group, and by `pyruntime.shard` over the ranks that hold it too.

    State dict: "gate_up_proj" [E, 2 F, D], the gate's rows first, and "down_proj" [E, D, F], or as `form`
    says, and with bias "gate_up_proj_bias" [E, 2 F] and "down_proj_bias" [E, D]; DTensors with Shard(0): the
    names and shapes of transformers' experts.

    tier: as of `pyruntime.ops.experts`. hook: see ParallelModule. Raises ValueError where the group leaves a
    rank without an expert, and in a call without a group."""

    def __init__(
        self,
        experts: int,
        features: int,
        width: int,
        *,
        group: Group | TensorGroup,
        bias: bool = False,
        form: ExpertForm = SWIGLU,
        sequence_parallel: bool = True,
        tier: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        hook: LayerHook | None = None,
    ):
        super().__init__(group, hook)
        self.experts, self.features, self.width, self.form = experts, features, width, form
        self.sequence_parallel, self.tier = sequence_parallel, check_tier(tier)
        self.last_cut_rows, self.last_per_token = sequence_parallel, 0
        shapes = {"gate_up_proj": (2 * width, features), "down_proj": (features, width)}
        for name, shape in shapes.items():
            whole = (experts, *(reversed(shape) if form.transposed else shape))
            self.add_parameter(name, 0, [Part(name, whole)], dtype, device)
        for name, (rows, _) in shapes.items() if bias else ():
            self.add_parameter(f"{name}_bias", 0, [Part(f"{name}_bias", (experts, rows))], dtype, device)
        self.reset_parameters()

    @classmethod
    def from_experts(cls, module: nn.Module, group: Group | TensorGroup, **options) -> Self:
        """Builds the parallel form of transformers' experts, which every rank holds whole. options: as in the
        constructor. Raises ValueError where they compute something else (`why_not`)."""
        form = form_of(module)
        experts, features, width = _shape_of(module, form)
        options = {"dtype": module.down_proj.dtype, **options, "device": "meta"}
        options |= {"bias": hasattr(module, "down_proj_bias"), "form": form}
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
            bound = 1 / math.sqrt(self.features if name.startswith("gate_up") else self.width)
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
        own, most = x.shape[0], self.most_rows([x.shape[0]])[0] if rows is None else rows
        x, ids, weights = self.padded(x, ids, weights, most)
        return self.multiply(x, ids, weights, cut=True, rows=most * self.group.size)[:own]

    def padded(self, x: Tensor, ids: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the arguments with `most` rows, which every rank has in the operator. Those beyond a rank's
        own go to no expert."""
        own = x.shape[0]
        if own > most:
            raise ValueError(
                f"This rank has {own} rows, and rows={most} is the most of a rank; pass its number."
            )
        if own == most:
            return x, ids, weights
        more = (0, 0, 0, most - own)
        return pad(x, more), pad(ids, more, value=-1), pad(weights, more)

    def most_rows(self, own: Sequence[int]) -> list[int]:
        """Returns for each of this rank's numbers of rows that of the rank with most."""
        if self.group.size == 1:
            return list(own)
        numbers = torch.tensor(own, dtype=torch.float64)
        return [int(each) for each in ops.all_gather_stats(numbers, self.group.name).amax(0)]

    def multiply(
        self, x: Tensor, ids: Tensor, weights: Tensor, *, cut: bool, rows: int | None = None
    ) -> Tensor:
        """Returns y [M, D]. cut: whether the arguments hold this rank's rows, of `rows` in all."""
        x, weights, parameters = self.operands(x, weights)
        y = ops.experts(
            x,
            ids,
            weights,
            parameters["gate_up_proj"],
            parameters["down_proj"],
            self.group.name,
            experts=self.experts,
            cut=cut,
            rows=rows,
            tier=self.tier,
            gate_up_bias=parameters.get("gate_up_proj_bias"),
            down_bias=parameters.get("down_proj_bias"),
            form=self.form,
        )
        self.note(x.shape[0] if not cut else rows or x.shape[0] * self.group.size, cut, ids.shape[1])
        return y

    def operands(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns x, weights and parameters as the operator takes them, cast to autocast's dtype where
        torch.autocast is on."""
        if not self.group.name:
            raise ValueError(
                "ParallelExperts needs a process group, of one rank at least; start pyruntime.Runtime and "
                "pass runtime.tp."
            )
        parameters, device = self._parameters, x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, parameters = x.to(dtype), {name: p.to(dtype) for name, p in parameters.items()}
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        return x.contiguous(), weights.to(precise), parameters

    def note(self, rows: int, cut: bool, per_token: int) -> None:
        """Records a call for explain()."""
        if not is_compiling():
            self.__dict__.update(last_rows=rows, last_cut_rows=cut, last_per_token=per_token)

    def op_uses(self) -> list[OpUse]:
        """The operator and its backward; n and k are those of gate_up."""
        sizes = 2 * self.width, self.features
        return [OpUse("forward", "experts", *sizes), OpUse("backward", "experts_backward", *sizes)]

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, features={self.features}, width={self.width}, group=({self.group}), "
            f"sequence_parallel={self.sequence_parallel}, tier={self.tier!r}"
        )


@dataclass(frozen=True)
class _Given:
    """What transformers' experts say of themselves."""

    transposed: bool = False
    concatenated: bool = True
    has_bias: bool = False
    has_gate: bool = True
    has_norm: bool = False
    scales_input: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """None: it is no class of experts that keeps them in stacked parameters."""
        if type(module).__name__ == "Llama4TextExperts":  # which says nothing
            return cls(transposed=True, scales_input=True)
        if not hasattr(module, "is_concatenated") or not hasattr(module, "has_gate"):
            return None
        has_norm = getattr(module, "has_post_expert_norm", False)
        return cls(module.is_transposed, module.is_concatenated, module.has_bias, module.has_gate, has_norm)


def looks_like_experts(module: nn.Module) -> bool:
    """Whether it is a class of experts of transformers, which keeps them in stacked parameters."""
    return _Given.of(module) is not None


def why_not(module: nn.Module) -> str:
    """Says why the experts of a model are not those that ParallelExperts computes; "" where they are."""
    given = _Given.of(module)
    if given is None:
        return "it has no gate_up_proj and down_proj of all experts"
    if not given.has_gate:
        return "its experts have no gate"
    if given.has_norm:
        return "its experts have a norm"
    names = {name for name, _ in module.named_parameters()}
    wanted = {"gate_up_proj", "down_proj"}
    if given.has_bias:
        wanted |= {"gate_up_proj_bias", "down_proj_bias"}
    if names != wanted or any(True for _ in module.buffers()):
        return f"it holds {', '.join(sorted(names)) or 'nothing'}, not {', '.join(sorted(wanted))} alone"
    form = _form_of(module, given)
    if form is None:
        return "it joins gate and up in its own way"
    experts, features, width = _shape_of(module, form)
    shape = (features, 2 * width) if form.transposed else (2 * width, features)
    gate_up, down = (list(p.shape) for p in (module.gate_up_proj, module.down_proj))
    if gate_up != [experts, *shape]:
        return f"gate_up_proj is {gate_up} and down_proj {down}"
    return ""


def form_of(module: nn.Module) -> ExpertForm:
    """Returns the form of a model's experts. Raises ValueError where ParallelExperts computes something else
    (`why_not`)."""
    why, given = why_not(module), _Given.of(module)
    form = None if why or given is None else _form_of(module, given)
    if form is None:
        raise ValueError(f"{type(module).__name__} cannot be spread over ranks: {why}.")
    return form


def _shape_of(module: nn.Module, form: ExpertForm) -> tuple[int, int, int]:
    """Returns E, D and F of experts."""
    experts, rows, columns = module.down_proj.shape
    return (experts, columns, rows) if form.transposed else (experts, rows, columns)


_PROBE = torch.arange(96, dtype=torch.float64, device="cpu").mul(1.7).sin().view(12, 8)


def _form_of(module: nn.Module, given: _Given) -> ExpertForm | None:
    """Returns the form whose results on some numbers are those of the experts; None where there is none."""
    numbers: dict[str, float] = {}
    for name in ("alpha", "limit"):
        for number in (getattr(module, key, None) for key in (name, f"swiglu_{name}")):
            if isinstance(number, int | float) and math.isfinite(number):
                numbers[name] = float(number)
    probe = _PROBE * (2 * numbers.get("limit", 3.0))
    if hasattr(type(module), "_apply_gate"):
        found = type(module)._apply_gate(module, probe)
    else:
        gate, up = probe.chunk(2, -1)
        found = module.act_fn(gate) * up
    for shift in (0.0, 1.0):
        form = ExpertForm(
            given.transposed, not given.concatenated, given.scales_input, shift=shift, **numbers
        )
        if torch.allclose(found.double(), form.join(probe), rtol=1e-5, atol=1e-6):
            return form
    return None
