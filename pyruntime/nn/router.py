"""Routers of experts: the experts that a token goes to and their weights, and the losses that spread tokens.

Scores and choice are fp32 (fp64 for fp64 rows); of equal scores the lowest expert's is taken. With T tokens
of all ranks that share a step, E experts, k for each token, logits z [T, E], p = softmax(z), C_i the number
of tokens of expert i::

    balance loss   E / (k T^2) sum_i C_i sum_t p_ti                         (1 where all experts get alike)
    z loss         1 / T sum_t logsumexp(z_t)^2

(Fedus et al. 2022, arXiv 2101.03961, equation 4, divided by k as Megatron-LM does; Zoph et al. 2022, arXiv
2202.08906, equation 5.)
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.ops.attention import statistics_dtype


class Routed(NamedTuple):
    """The experts of rows and their weights."""

    ids: Tensor
    """[M, k], int64"""
    weights: Tensor
    """[M, k], fp32 (fp64 for fp64 logits)"""


def top_k(scores: Tensor, k: int) -> Tensor:
    """Returns the indices [..., k] of the k largest of scores [..., E], largest first; of equal ones the
    lowest index first, which torch.topk does not promise."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def softmax_routes(logits: Tensor, k: int, *, renormalize: bool = True) -> Routed:
    """Routes rows by the k largest of logits [M, E]. The weights are softmax over all experts; renormalize:
    divided by their sum, which is the softmax over the chosen (Mixtral, Qwen3; not Qwen2-MoE, OLMoE)."""
    ids = top_k(logits, k)
    weights = logits.softmax(-1).gather(-1, ids)
    return Routed(ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights)


def why_no_groups(experts: int, k: int, groups: int, best_groups: int) -> str:
    """Says why experts cannot be chosen in the best of so many groups; "" if they can."""
    size = experts // groups
    if groups == 1 or not (experts % groups or size < 2 or best_groups * size < k or best_groups > groups):
        return ""
    return (
        f"{experts} experts in {groups} groups, of which {best_groups} are open to a token that takes {k}: "
        "groups must be equal, of two experts at least, and the open ones must hold as many as it takes."
    )


def sigmoid_routes(
    logits: Tensor,
    k: int,
    bias: Tensor,
    *,
    groups: int = 1,
    best_groups: int = 1,
    factor: float = 1.0,
    renormalize: bool = True,
) -> Routed:
    """Routes rows by the k largest of sigmoid(logits) + bias, in the groups of experts whose two best of
    these have the largest sums (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; GLM-4-MoE).

    The weights are sigmoid(logits), without bias, with `renormalize` divided by their sum, times factor.
    bias: [E], no gradient. Raises ValueError unless `groups` divides the experts into groups of two at least,
    of which the best ones have k experts."""
    experts = logits.shape[-1]
    size = experts // groups
    if why := why_no_groups(experts, k, groups, best_groups):
        raise ValueError(why)
    scores = logits.sigmoid()
    biased = scores.detach() + bias
    if groups > 1:
        best = biased.unflatten(-1, (groups, size)).topk(2, -1).values.sum(-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, top_k(best, best_groups), False)
        # Not 0: biased scores may be negative, and a closed group would win.
        biased = biased.masked_fill(closed.repeat_interleave(size, -1), -math.inf)
    ids = top_k(biased, k)
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routed(ids, weights * factor)


def moved_bias(bias: Tensor, counts: Tensor, rate: float, *, centred: bool = False) -> Tensor:
    """Returns the bias [E] of `sigmoid_routes` after a step in which the experts had `counts` rows: raised by
    `rate` for experts with fewer rows than the mean, lowered for those with more (arXiv 2408.15664). centred:
    the change has the mean 0."""
    change = torch.sign(counts.double().mean() - counts)
    return bias + rate * (change - change.mean() if centred else change)


def counts_of(ids: Tensor, experts: int) -> Tensor:
    """Returns the rows of each expert, [E], fp64."""
    ids = ids.reshape(-1)
    # Whole numbers, so their sums have the same bits in any order.
    ones = torch.ones(ids.shape, dtype=torch.float64, device=ids.device)
    return torch.zeros(experts, dtype=torch.float64, device=ids.device).scatter_add_(0, ids, ones)


def balance_loss(probabilities: Tensor, counts: Tensor, k: int) -> Tensor:
    """Returns the share of rows [M, E] in the balance loss of all tokens, whose experts had `counts` rows."""
    tokens = counts.sum() / k
    shares = (counts / tokens / (k * tokens) * counts.numel()).to(probabilities.dtype)
    return (shares * probabilities.sum(0)).sum()


def z_loss(logits: Tensor, tokens: Tensor | int) -> Tensor:
    """Returns the share of the rows of logits [M, E] in the z loss of all tokens."""
    return logits.logsumexp(-1).square().sum() / tokens


@dataclass
class RouterLosses:
    """The losses that routers add to a step, and the ranks that its tokens are spread over. Each router adds
    its own; nothing is added in evaluation mode and without gradients."""

    balance: float = 0.0
    """Weight of the balance loss."""
    z: float = 0.0
    """Weight of the z loss."""
    groups: Sequence[Group] = ()
    """Groups over which the tokens of a step are cut; counts are summed over one after the other."""
    shares: int = 1
    """Ranks of these groups over which gradients are averaged, not summed (dp times cp)."""
    scale: float = 1.0
    """The factor of the main loss, 1 over the number of micro-batches."""

    def of(self, logits: Tensor, shares: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's share of the losses of logits [M, E], such that gradients that are summed over
        tensor-parallel and averaged over all other ranks are those of all tokens, and what `Router.take_load`
        sums of it. shares: the probabilities [M, E] of each row. All ranks of the groups call it alike."""
        counts, k = counts_of(ids, logits.shape[-1]), ids.shape[-1]
        for group in self.groups:
            counts = ops.all_gather_stats(counts, group).sum(0)
        tokens = (counts.sum() / k).to(logits.dtype)
        balance, z = balance_loss(shares, counts, k), z_loss(logits, tokens)
        entropy = torch.special.entr(shares.detach()).sum() / tokens
        load = torch.cat([counts, self.scale * torch.stack([entropy, balance.detach(), z.detach()]).double()])
        parts = [weight * loss for weight, loss in ((self.balance, balance), (self.z, z)) if weight]
        return sum(parts, logits.new_zeros(())) * (self.shares * self.scale), load


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _beside(*read: Tensor) -> AbstractContextManager[Any]:
    """Within it a device computes losses on a stream of its own, from what the caller's stream has made of
    `read`: ranks exchange counts for them, which only the backward pass needs. On the CPU nothing changes."""
    device = read[0].device
    if device.type == "cpu" or is_compiling():
        return contextlib.nullcontext()
    stream = _stream_of(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    for each in read:
        each.record_stream(stream)
    return stream


class _WithLoss(torch.autograd.Function):
    """Identity of the weights. Its backward pass is also that of the loss: so a pipeline stage needs no
    further output. There `load` is added to `total`: once, though recomputation repeats the forward pass."""

    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor, load: Tensor, total: Tensor) -> Tensor:
        ctx.dtype, ctx.load, ctx.total = loss.dtype, load, total
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        with _beside(ctx.load):
            ctx.total += ctx.load
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device), None, None


class _Logits(torch.autograd.Function):
    """x W^T in fp32. Keeps x as it is, not its fp32 copy."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype, wide = x.dtype, statistics_dtype(x)
        return x.to(wide) @ weight.to(wide).T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dx = (grad @ weight.to(grad.dtype)).to(ctx.dtype)
        return dx, None if x is None else (grad.T @ x.to(grad.dtype)).to(weight.dtype)


class Scores(ParallelModule):
    """x W^T of this rank's rows x [M, D] of those that the group shares, in fp32: [M, N].

    Every rank of the group has the whole weight [N, D], and its gradient is summed over the group. State
    dict: "weight"."""

    def __init__(
        self,
        features: int,
        scores: int,
        *,
        group: Group | TensorGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group)
        self.add_parameter("weight", None, [Part("weight", (scores, features))], dtype, device)
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)

    def compute(self, x: Tensor) -> Tensor:
        return self.of(x, self.shared_weight())

    def shared_weight(self) -> Tensor:
        """Returns the weight for a forward pass, whose gradient is summed over the group."""
        return self.weight if self.group.size == 1 else ops.replicate_grad(self.weight, self.group.name)

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the scores of x. weight: from `shared_weight`, for any number of calls."""
        return _Logits.apply(x, weight)


class Router(Scores):
    """Chooses k of E experts for every row by softmax of a linear, `softmax_routes`.

    Call: router(x) with this rank's rows [M, D] of those that the group shares; returns (ids, weights), as
    `pyruntime.nn.ParallelExperts` takes them. losses: what it adds to a step in training mode; None: nothing.
    Raises ValueError for more experts of a row than there are."""

    def __init__(
        self,
        features: int,
        experts: int,
        k: int,
        *,
        renormalize: bool = True,
        losses: RouterLosses | None = None,
        **place: Any,
    ):
        super().__init__(features, experts, **place)
        if not 1 <= k <= experts:
            raise ValueError(f"A row cannot have {k} of {experts} experts; use 1 to {experts}.")
        self.experts, self.k, self.renormalize, self.losses = experts, k, renormalize, losses
        self._load: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether rows are counted in training mode: losses need it."""
        return self.losses is not None and bool(self.losses.balance or self.losses.z)

    def routes(self, logits: Tensor) -> Routed:
        """Returns the experts of rows by their logits [M, E]."""
        return softmax_routes(logits, self.k, renormalize=self.renormalize)

    def shares(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of a row's experts, [M, E]."""
        return logits.softmax(-1)

    def compute(self, x: Tensor) -> Routed:
        logits = super().compute(x)
        routed = self.routes(logits)
        return self.with_losses(routed, logits, routed.ids)

    def with_losses(self, routed: Routed, logits: Tensor, ids: Tensor) -> Routed:
        """Returns `routed`, whose backward pass is also that of the losses of these logits [M, E] and ids
        [M, k]: those of `routed`, and of all other rows of the forward pass if it comes slice by slice."""
        if self.losses is None or not (self.counts and self.training and torch.is_grad_enabled()):
            return routed
        shares = self.shares(logits)
        with _beside(logits, shares, ids):
            loss, load = self.losses.of(logits, shares, ids)
            if self._load is None:
                self._load = torch.zeros_like(load)
        return Routed(routed.ids, _WithLoss.apply(routed.weights, loss, load, self._load))

    def take_load(self) -> Tensor | None:
        """Returns what backward passes since the last call have summed, fp64 [E + 3]: the rows of each expert
        on all ranks of the losses' groups, and this rank's shares of the mean entropy of probabilities, in
        nats, the balance loss and the z loss. None if there were no losses."""
        load, self._load = self._load, None
        if load is not None and load.device.type != "cpu":
            caller = torch.accelerator.current_stream(load.device)
            caller.wait_stream(_stream_of(load.device))
            load.record_stream(caller)
        return load

    def extra_repr(self) -> str:
        return f"experts={self.experts}, k={self.k}, renormalize={self.renormalize}, group=({self.group})"


class SigmoidRouter(Router):
    """Chooses experts by `sigmoid_routes`, with a bias in place of, or beside, a loss that spreads tokens
    (DeepSeek-V3). Call and losses are those of `Router`; the balance loss takes a row's scores over their sum
    as its probabilities (arXiv 2412.19437, equation 19).

    The bias [E] is an fp32 buffer, "bias" in the state dict, the same on all ranks. `move_bias` changes it
    after a step, by the rows that experts had in it on all ranks of the losses' groups."""

    def __init__(
        self, *sizes: int, groups: int = 1, best_groups: int = 1, factor: float = 1.0, **options: Any
    ):
        super().__init__(*sizes, **options)
        if why := why_no_groups(self.experts, self.k, groups, best_groups):
            raise ValueError(why)
        self.groups, self.best_groups, self.factor = groups, best_groups, factor
        self.register_buffer(
            "bias", torch.zeros(self.experts, dtype=torch.float32, device=self.weight.device)
        )
        self._rows: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether rows are counted in training mode: the bias needs it."""
        return self.losses is not None

    def routes(self, logits: Tensor) -> Routed:
        return sigmoid_routes(
            logits,
            self.k,
            self.bias,
            groups=self.groups,
            best_groups=self.best_groups,
            factor=self.factor,
            renormalize=self.renormalize,
        )

    def shares(self, logits: Tensor) -> Tensor:
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def take_load(self) -> Tensor | None:
        load = super().take_load()
        self._rows = None if load is None else load[: self.experts]
        return load

    @torch.no_grad()
    def move_bias(self, rate: float) -> None:
        """Moves the bias by the rows that `take_load` has returned last: call it once after each step that
        counts."""
        if self._rows is not None:
            self.bias.copy_(moved_bias(self.bias, self._rows, rate))
        self._rows = None

    def extra_repr(self) -> str:
        of_groups = f", the best {self.best_groups} of {self.groups} groups" if self.groups > 1 else ""
        return f"{super().extra_repr()}, factor={self.factor}{of_groups}"
