"""Queries, keys and values of multi-head latent attention (`LatentAttention` has its sizes).

With P ranks, T tokens, H heads of d = n + r features (r of them rotated), values of v features::

    x [T/P, D] -> c_q, c_kv, k_r [T/P, q_rank + kv_rank + r]      every rank has this linear whole
    norm(c_q)  -> all_gather_matmul -> q [T, H d / P]             the last r features of a head are rotated
    norm(c_kv) -> all_gather_matmul -> k_n, v [T, H (n + v) / P]
    k_r        -> gathered, rotated -> the last r features of every key

So the ranks send T (q_rank + kv_rank + r) features in place of the T D of a column linear of q, k and v.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyruntime import ops
from pyruntime.llama.elementwise import Elementwise
from pyruntime.nn import ColumnParallelLinear, RMSNorm
from pyruntime.nn.replicated_linear import ReplicatedLinear
from pyruntime.plan.models import LatentAttention

NORM_EPS = 1e-6
"""The eps of the norms of latent features, whatever the model's is, as in transformers."""


class LatentHeads(nn.Module):
    """Makes the heads of this rank. Call: layer(x, rows, batch, seq, cos, sin, between) with this rank's rows
    x [T/P, D] of the T = batch * seq rows, and cos and sin [seq, r] of their positions; returns q, k and v
    [batch, H/P, seq, d]. Attention kernels take one width: a value has d - v zeros behind it."""

    def __init__(
        self,
        latent: LatentAttention,
        hidden: int,
        heads: int,
        bias: bool,
        keep_gathered: bool | None,
        options: dict[str, Any],
    ):
        """bias: of the linear that makes latent features."""
        super().__init__()
        place = {name: options[name] for name in ("group", "dtype", "device")}
        column = {**options, "keep_gathered": keep_gathered}
        self.sizes = latent
        of_queries, of_keys = {}, {"kv": latent.kv_rank + latent.rope_dim}
        if latent.q_rank is None:
            self.q = ColumnParallelLinear(hidden, heads * latent.head_dim, **column)
        else:
            of_queries = {"q": latent.q_rank}
            self.q_norm = RMSNorm(latent.q_rank, NORM_EPS, **place)
            self.q_up = ColumnParallelLinear(latent.q_rank, heads * latent.head_dim, **column)
        self.down = ReplicatedLinear(hidden, of_queries | of_keys, bias, **place)
        self.kv_norm = RMSNorm(latent.kv_rank, NORM_EPS, **place)
        wide = heads * (latent.nope_dim + latent.value_dim)
        self.kv_up = ColumnParallelLinear(latent.kv_rank, wide, **column)

    def forward(
        self, x: Tensor, rows: int, batch: int, seq: int, cos: Tensor, sin: Tensor, between: Elementwise
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, group = self.sizes, self.down.group
        widths = [sizes.q_rank or 0, sizes.kv_rank, sizes.rope_dim]
        of_queries, of_keys, shared = (each.contiguous() for each in self.down(x).split(widths, -1))
        q = self.q(x, rows) if sizes.q_rank is None else self.q_up(self.q_norm(of_queries), rows)
        kv = self.kv_up(self.kv_norm(of_keys), rows)
        if group.size > 1:  # every rank's keys have these features, so their gradients are summed
            shared = ops.all_gather(shared, group.name, rows=rows)
        q, k, v = between.latent_heads(
            q.view(batch, seq, -1, sizes.head_dim),
            kv.view(batch, seq, -1, sizes.nope_dim + sizes.value_dim),
            shared.view(batch, seq, 1, sizes.rope_dim),
            cos,
            sin,
            sizes.interleaved,
        )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
