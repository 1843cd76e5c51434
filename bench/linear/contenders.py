"""The contenders of bench/linear: pyruntime, PyTorch's DTensor, bare GEMMs, bare collectives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import pyruntime
from bench.linear.problem import Case, Operands, Outcome
from pyruntime.nn import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import memory_of
from pyruntime.ops.layers import swiglu


class Contender:
    """A module on this rank's shards of the operands, run forward, or forward and backward."""

    def __init__(self, case: Case, operands: Operands, module: nn.Module, mesh: DeviceMesh):
        self.module = module
        rank, size = mesh.get_local_rank(), mesh.size()
        local = operands.inner_part(slice(case.inner * rank // size, case.inner * (rank + 1) // size))
        rows = slice(case.rows * rank // size, case.rows * (rank + 1) // size)
        x = local.x if case.kind == "row" else operands.x[rows]
        dy = local.dy if case.kind == "column" else operands.dy[rows]
        self.x = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        self.dy = dy.detach().clone(memory_format=torch.contiguous_format)

    def forward(self) -> Tensor:
        with torch.no_grad():
            y = self.module(self.x)
        _await(y)
        return y

    def forward_backward(self) -> Tensor:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)
        y = self.module(self.x)
        _await(y)
        y.backward(self.dy)
        _await(self.x.grad)
        return y

    def outcome(self) -> Outcome:
        """Returns the results of one forward and backward; DTensors as their local shards."""
        y = self.forward_backward().detach()
        return Outcome(y, self.x.grad, {key: _local(g) for key, g in self.weight_gradients().items()})

    def weight_gradients(self) -> dict[str, Tensor]:
        return {name.removesuffix(".weight"): memory_of(p.grad) for name, p in self.module.named_parameters()}


class Ours(Contender):
    """pyruntime's layers on one tier."""

    def __init__(self, case: Case, operands: Operands, mesh: DeviceMesh, tier: str):
        options = {"group": mesh, "tier": tier}
        linears = {name: _linear(weight) for name, weight in operands.weights.items()}
        if case.kind == "mlp":
            module: nn.Module = OurMLP(case, linears, options)
        elif case.kind == "column":
            module = OurColumn(case, linears, options)
        else:
            module = nn.Sequential(OrderedDict(row=RowParallelLinear.from_linear(linears["row"], **options)))
        super().__init__(case, operands, module, mesh)

    def weight_gradients(self) -> dict[str, Tensor]:
        gradients = super().weight_gradients()
        if "gate_up" in gradients:
            gradients["gate"], gradients["up"] = gradients.pop("gate_up").chunk(2)
        return gradients

    def tiers(self, *, backward: bool) -> str:
        """Returns the tiers that ran, each once, in the order of their use."""
        lines = pyruntime.explain(self.module).rows
        return "+".join(dict.fromkeys(line.tier for line in lines if backward or line.when == "forward"))


class OurMLP(nn.Module):
    def __init__(self, case: Case, linears: dict[str, nn.Linear], options: dict):
        super().__init__()
        self.rows = case.rows
        merged = {"gate": linears["gate"], "up": linears["up"]}
        self.gate_up = MergedColumnParallelLinear.from_linears(merged, **options)
        self.down = RowParallelLinear.from_linear(linears["down"], **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x, self.rows)))


class OurColumn(nn.Module):
    def __init__(self, case: Case, linears: dict[str, nn.Linear], options: dict):
        super().__init__()
        self.rows = case.rows
        self.column = ColumnParallelLinear.from_linear(linears["column"], **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.column(x, self.rows)


class PlainMLP(nn.Module):
    def __init__(self, linears: dict[str, nn.Linear]):
        super().__init__()
        self.gate, self.up, self.down = linears["gate"], linears["up"], linears["down"]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def dtensor(case: Case, operands: Operands, mesh: DeviceMesh) -> Contender:
    """Returns PyTorch's tensor parallelism with sequence-sharded ends; gate and up share one gather."""
    linears = {name: _linear(weight) for name, weight in operands.weights.items()}
    if case.kind == "mlp":
        module: nn.Module = PlainMLP(linears)
        gather = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
        parallelize_module(module, mesh, gather)
        plan = {
            "gate": ColwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    else:
        module = nn.Sequential(OrderedDict(linears))
        column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        plan = {"column": column} if case.kind == "column" else {"row": row}
    parallelize_module(module, mesh, plan)
    return Contender(case, operands, module, mesh)


@dataclass(frozen=True)
class Gemms:
    """The GEMMs a @ b of a rank in a case, not split, into preallocated memory."""

    pairs: list[tuple[Tensor, Tensor]]
    results: list[Tensor]

    def run(self) -> None:
        for (a, b), result in zip(self.pairs, self.results, strict=True):
            torch.mm(a, b, out=result)

    def run_onednn(self) -> None:
        for a, b in self.pairs:
            torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def bare_gemms(case: Case, operands: Operands, mesh: DeviceMesh, *, backward: bool) -> Gemms:
    m, size = case.rows, mesh.size()
    inner = case.inner // size
    local = operands.inner_part(slice(0, inner))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape).to(case.dtype)

    if case.kind == "mlp":
        gate_up, down = (
            torch.cat([local.weights["gate"], local.weights["up"]]),
            local.weights["down"].contiguous(),
        )
        h, dgate_up = normal(m, inner), normal(m, 2 * inner)
        pairs = [(operands.x, gate_up.t()), (h, down.t())]
        if backward:
            dy = operands.dy
            pairs += [(dy, down), (dy.t(), h), (dgate_up, gate_up), (dgate_up.t(), operands.x)]
    else:
        x, (weight,), dy = local.x.contiguous(), local.weights.values(), local.dy.contiguous()
        weight = weight.contiguous()
        pairs = [(x, weight.t())]
        if backward:
            pairs += [(dy, weight), (dy.t(), x)]
    return Gemms(pairs, [a.new_empty(a.shape[0], b.shape[1]) for a, b in pairs])


def collectives(case: Case, mesh: DeviceMesh, *, backward: bool) -> dict[str, Callable[[], None]]:
    """Returns the collectives that a case needs, without computation, one after the other: {library: run}.

    Forward a gather for a column linear and a reduce-scatter for a row linear, backward the other of the two.
    The second gather of x, for a weight gradient without the gathered x, is not counted.
    """
    order = {"mlp": ["gather", "scatter"], "column": ["gather"], "row": ["scatter"]}[case.kind]
    if backward:
        order += [{"gather": "scatter", "scatter": "gather"}[step] for step in reversed(order)]
    shard = torch.randn(case.rows // mesh.size(), case.hidden).to(case.dtype)
    whole = torch.randn(case.rows, case.hidden).to(case.dtype)
    gathered, scattered = torch.empty_like(whole), torch.empty_like(shard)
    group = mesh.get_group()

    # torch 2.13 renamed these functions.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gloo() -> None:
        for step in order:
            if step == "gather":
                all_gather(gathered, shard, group=group)
            else:
                reduce_scatter(scattered, whole, group=group)

    def ours() -> None:
        for step in order:
            if step == "gather":
                pyruntime.all_gather(shard, mesh, rows=case.rows)
            else:
                pyruntime.reduce_scatter(whole, mesh)

    return {"gloo": gloo, "pyruntime": ours}


def activation(case: Case, mesh: DeviceMesh, *, backward: bool) -> Callable[[], None] | None:
    """Returns a run of only silu(gate) * up in the local shapes; None if the case has none."""
    if case.kind != "mlp":
        return None
    width = case.inner // mesh.size()
    gate_up = torch.randn(case.rows, 2 * width).to(case.dtype).requires_grad_(backward)
    dh = torch.randn(case.rows, width).to(case.dtype)

    def run() -> None:
        h = swiglu(gate_up)
        if backward:
            torch.autograd.grad(h, gate_up, dh)

    return run


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    return linear


def _await(tensor: Tensor) -> None:
    """Waits for DTensor's last collective; DTensor returns before it has ended."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
