"""A token embedding whose vocabulary is cut over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.nn.module import LayerHook, ParallelModule
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.nn.tiers import OpUse


class VocabParallelEmbedding(ParallelModule):
    """An nn.Embedding of which rank r holds the rows [vocab_start, vocab_end) of the table, W_r [V/P, D].

    A rank looks up the ids that it holds and writes zeros for the others; the sum over ranks is the
    embedding. Input: ids, int64, the same on every rank, [T] or [B, S]. Result: this rank's tokens [...,
    rows_r, ..., D], cut along `dim` of ids as torch.tensor_split cuts (sequence_parallel: reduce-scatter), or
    all tokens (all-reduce). State dict: "weight", DTensor with Shard(0). With a group of two axes, rank (r,
    s) holds [V/X, D/Y], and the result has this rank's features of D, cut over y.

    padding_idx: as in nn.Embedding, its row gets no gradient. shares: the rows of the table that each rank
    holds; (): as Shard cuts, and always with two axes. hook: see ParallelModule. Raises ValueError
    where the group leaves a rank without rows, and IndexError for an id outside [0, V) on CPU; elsewhere the
    device asserts it."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group | TensorGroup | None,
        sequence_parallel: bool = True,
        dim: int = 0,
        padding_idx: int | None = None,
        shares: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        hook: LayerHook | None = None,
    ):
        super().__init__(group, hook)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.sequence_parallel = sequence_parallel
        self.dim = dim
        self.last_cut_rows = sequence_parallel
        self.padding_idx = padding_idx
        table = [Part("weight", (num_embeddings, embedding_dim), shares=tuple(shares))]
        self.add_parameter("weight", 0, table, dtype, device, dim_y=1)
        layout = self._layouts["weight"]
        self.vocab_start, self.vocab_end = layout.ranges(layout.parts[0])[0][0]
        self._local_padding_idx = None
        if padding_idx is not None and self.vocab_start <= padding_idx < self.vocab_end:
            self._local_padding_idx = padding_idx - self.vocab_start
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the full table as nn.Embedding does, N(0, 1) with a zero padding row, and keeps this rank's
        shard. The table is the same for every tp, provided that all ranks have the same seed."""
        if self.weight.is_meta:
            return
        full = torch.empty(
            self.num_embeddings, self.embedding_dim, dtype=self.weight.dtype, device=self.weight.device
        ).normal_()
        if self.padding_idx is not None:
            full[self.padding_idx].zero_()
        self.load_full({"weight": full})

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: Group | TensorGroup | None, **options) -> Self:
        """Builds the parallel form of `embedding`, whole on every rank. options: as in the constructor."""
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(
                    f"nn.Embedding has {option}={getattr(embedding, option)}, which a vocabulary-parallel "
                    f"embedding does not support; build it without {option}, or leave it out of the plan."
                )
        options = {"dtype": embedding.weight.dtype, "padding_idx": embedding.padding_idx, **options}
        new = cls(embedding.num_embeddings, embedding.embedding_dim, group=group, device="meta", **options)
        return new._take({"": embedding})

    def compute(self, ids: Tensor) -> Tensor:
        y = self.own_share(ids, self.sequence_parallel)
        if self.group.size == 1:
            return y
        if self.sequence_parallel:
            return ops.reduce_scatter(y, self.group.name, dim=self.dim)
        return ops.all_reduce(y, self.group.name)

    def own_share(self, ids: Tensor, cut_rows: bool) -> Tensor:
        """Returns the share [..., D] of the result that comes from this rank's rows of the table.

        cut_rows: whether a rank keeps only its own rows of the sum, for explain()."""
        if not is_compiling():
            self.__dict__.update(last_rows=ids.numel(), last_cut_rows=cut_rows)
            name = self.label or type(self).__name__
            if ids.device.type == "cpu":
                _check_ids(ids, self.num_embeddings, name)
            elif self.group.size > 1:  # no rank has such a row; F.embedding alone would assert it
                is_inside = ((ids >= 0) & (ids < self.num_embeddings)).all()
                torch._assert_async(is_inside, f"{name}: an id is outside [0, {self.num_embeddings}).")
        if self.group.size == 1:
            return F.embedding(ids, self.weight, self._local_padding_idx)
        local = ids - self.vocab_start
        elsewhere = (local < 0) | (local >= self.weight.size(0))
        mine = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._local_padding_idx)
        return mine.masked_fill(elsewhere.unsqueeze(-1), 0)

    def op_uses(self) -> list[OpUse]:
        """The collective of the forward pass, and that of its backward pass."""
        op, (n, k) = "reduce_scatter" if self.last_cut_rows else "all_reduce", self.weight.shape
        why = "a table look-up has no GEMM to hide a collective under"
        return [
            OpUse(when, f"{op}{suffix}", n, k, collective=why)
            for when, suffix in (("forward", ""), ("backward", "_backward"))
        ]

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"group=({self.group}), sequence_parallel={self.sequence_parallel}, dim={self.dim}"
        )


def _check_ids(ids: Tensor, num_embeddings: int, name: str) -> None:
    if ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    if low.item() < 0 or high.item() >= num_embeddings:
        raise IndexError(
            f"{name} has num_embeddings={num_embeddings}, but the ids given reach from {low.item()} to "
            f"{high.item()}; ids must lie in [0, {num_embeddings})."
        )
