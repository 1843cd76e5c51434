"""The contenders of bench/moe: pyruntime, two exchanges by torch.distributed, that of transformers, and the
work alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pyruntime
from bench.moe.problem import Case, Operands
from pyruntime import ops
from pyruntime.ops.layers import swiglu

# torch 2.13 renamed these functions.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Contender(ABC):
    """An expert layer on this rank's operands: forward(x, p, gate_up, down) -> y."""

    def __init__(self, case: Case, operands: Operands, group: dist.ProcessGroup):
        self.case, self.group, self.ids, self.dy = case, group, operands.ids, operands.dy
        self.ranks, self.held = group.size(), operands.gate_up.shape[0]
        leaves = (operands.x, operands.p, operands.gate_up, operands.down)
        self.leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    @abstractmethod
    def layer(self, x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Returns y of this rank's rows."""

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.layer(*self.leaves)

    def forward_backward(self) -> list[Tensor]:
        y = self.layer(*self.leaves)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]


class Ours(Contender):
    def layer(self, x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, count = self.case.rows * self.ranks, self.case.experts
        return ops.experts(x, self.ids, p, gate_up, down, self.group, experts=count, rows=rows)


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows, and backward the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = (received, sent, group)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad.contiguous(), *ctx.back), None, None, None


def loop(rows: Tensor, counts: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """Rows in the order of this rank's experts, through each of them."""
    made = []
    for some, first, second in zip(rows.split(counts), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = F.linear(some, first).chunk(2, -1)
        made.append(F.linear(F.silu(gate) * up, second))
    return torch.cat(made)


class AllToAll(Contender):
    """The usual dispatcher: rows sorted by expert are sent to its rank and sorted once more there; each
    expert's come back and are weighted and added at their source."""

    def layer(self, x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        flat = self.ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.case.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        here = theirs.view(self.ranks, self.held)
        received = here.sum(1).tolist()
        source = order // self.case.k
        rows = _Exchange.apply(x.index_select(0, source), sent, received, self.group)
        expert_of = torch.arange(self.held).repeat(self.ranks).repeat_interleave(theirs)
        by_expert = expert_of.argsort(stable=True)
        made = loop(rows.index_select(0, by_expert), here.sum(0).tolist(), gate_up, down)
        inverse = torch.empty_like(by_expert)
        inverse[by_expert] = torch.arange(len(by_expert))
        back = _Exchange.apply(made.index_select(0, inverse), received, sent, self.group)
        weighted = back * p.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros(x.shape).index_add(0, source, weighted).to(x.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        whole = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
        all_gather(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return _Scatter.apply(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, terms, group):
        ctx.group = group
        own = terms.new_empty(terms.shape[0] // group.size(), *terms.shape[1:])
        reduce_scatter(own, terms.contiguous(), group=group)
        return own

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, ctx.group), None


class AllGather(Contender):
    """Every rank gathers all rows, and its experts' results for all rows are summed by a reduce-scatter."""

    def layer(self, x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        with torch.no_grad():
            ids = _Gather.apply(self.ids, self.group).flatten()
        every, weights = _Gather.apply(x, self.group), _Gather.apply(p, self.group).flatten()
        first = self.group.rank() * self.held
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=self.case.experts).tolist()
        begin, here = sum(counts[:first]), counts[first : first + self.held]
        order = order[begin : begin + sum(here)]
        source = order // self.case.k
        made = loop(every.index_select(0, source), here, gate_up, down)
        weighted = made * weights.index_select(0, order).unsqueeze(1)
        sums = torch.zeros(every.shape).index_add(0, source, weighted)
        return _Scatter.apply(sums.to(x.dtype), self.group)


class Transformers(Contender):
    """transformers' expert parallelism, AllToAllEP: rows sorted by expert are sent to its rank, which runs a
    grouped product on them; each expert's come back and are weighted and added at their source."""

    def __init__(self, case: Case, operands: Operands, group: dist.ProcessGroup):
        from transformers import MixtralConfig
        from transformers.distributed.expert_parallel import AllToAllEP
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__(case, operands, group)
        config = MixtralConfig(
            hidden_size=case.features,
            intermediate_size=case.width,
            num_local_experts=self.held,
            experts_implementation="grouped_mm",
        )
        with torch.device("meta"):
            self.experts = MixtralExperts(config)
        for name, leaf in zip(("gate_up_proj", "down_proj"), self.leaves[2:], strict=True):
            delattr(self.experts, name)
            setattr(self.experts, name, leaf)
        mesh = init_device_mesh("cpu", (self.ranks, 1), mesh_dim_names=("ep", "tp"))
        self.run = AllToAllEP(self.experts, mesh["ep"], mesh["tp"])

    def layer(self, x: Tensor, p: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return self.run(x, self.ids, p).to(x.dtype)


def alone(operands: Operands, routed: list[int], *, backward: bool) -> Callable[[], None]:
    """Returns a run of what this rank's experts compute on their rows [sum(routed), D], which lie in their
    order: the GEMMs into preallocated memory and SwiGLU, no weight p, nothing moved."""
    experts, double, features = operands.gate_up.shape
    rows = sum(routed)

    def normal(width: int) -> Tensor:
        return torch.randn(rows, width).to(operands.x.dtype)

    x, dy, dx, y = (normal(features) for _ in range(4))
    hidden, dhidden, products, dproducts = (
        normal(double),
        normal(double),
        normal(double // 2),
        normal(double // 2),
    )
    dgate_up, ddown = torch.empty_like(operands.gate_up), torch.empty_like(operands.down)
    begins = [sum(routed[:expert]) for expert in range(experts)]
    leaf = hidden.requires_grad_(backward)

    def each(use: Callable[[int, slice], object]) -> None:
        for expert in range(experts):
            if routed[expert]:
                use(expert, slice(begins[expert], begins[expert] + routed[expert]))

    def run() -> None:
        up, down = operands.gate_up, operands.down
        with torch.no_grad():
            each(lambda e, own: torch.mm(x[own], up[e].t(), out=hidden.detach()[own]))
        made = swiglu(leaf)
        with torch.no_grad():
            each(lambda e, own: torch.mm(made[own], down[e].t(), out=y[own]))
            if not backward:
                return
            each(lambda e, own: torch.mm(dy[own], down[e], out=dproducts[own]))
        dhidden.copy_(torch.autograd.grad(made, leaf, dproducts)[0])
        with torch.no_grad():
            each(lambda e, own: torch.mm(dhidden[own], up[e], out=dx[own]))
            each(lambda e, own: torch.mm(dhidden[own].t(), x[own], out=dgate_up[e]))
            each(lambda e, own: torch.mm(dy[own].t(), products[own], out=ddown[e]))

    return run


def collectives(operands: Operands, group: dist.ProcessGroup, *, backward: bool) -> Callable[[], None]:
    """Returns a run of what must travel, without computation: a gather and a reduce-scatter of all rows for
    each direction, by pyruntime."""
    whole = torch.randn(operands.x.shape[0] * group.size(), operands.x.shape[1]).to(operands.x.dtype)

    def run() -> None:
        for _ in range(1 + backward):
            pyruntime.all_gather(operands.x, group, rows=whole.shape[0])
            pyruntime.reduce_scatter(whole, group)

    return run


def grouped_and_dense(operands: Operands, routed: list[int]) -> dict[str, Callable[[], None]]:
    """Returns the gate_up product of each expert with its rows, and one product of the same work with one
    expert's matrix."""
    rows = sum(routed)
    x = torch.randn(rows, operands.x.shape[1]).to(operands.x.dtype)
    out = x.new_empty(rows, operands.gate_up.shape[1])

    def grouped() -> None:
        for some, made, weight in zip(x.split(routed), out.split(routed), operands.gate_up, strict=True):
            pyruntime._C.WeightGemm(weight, True, some.shape[0]).write(made[None], some[None], False)

    return {"grouped": grouped, "dense": lambda: torch.mm(x, operands.gate_up[0].t(), out=out)}
