"""The context of a model: the ranks that share its sequences, and how these are cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyruntime import ops
from pyruntime.choices import ContextLayout, ContextVariant, WireFormat, check_value, values
from pyruntime.comm import Group, companion, group_name, group_rank, group_size
from pyruntime.context.attention import ring_attention
from pyruntime.context.layouts import check_layout, positions, take_shard


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and the layout of its tokens.

    group: the ranks. layout, variant, wire: as in `ring_attention`, but no layout that needs documents
    ("placed" takes them where there are some).

    Raises ValueError for another layout or variant. Every rank of the group makes the same context.
    """

    group: Group
    layout: str = "zigzag"
    variant: str = "ring"
    wire: WireFormat = "same"
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        check_value("layout", self.layout, values(ContextLayout))
        check_value("variant", self.variant, values(ContextVariant))
        object.__setattr__(self, "rank", group_rank(self.group))
        object.__setattr__(self, "size", group_size(self.group))
        object.__setattr__(self, "group", group_name(self.group))

    def check(self, seq: int) -> None:
        """Raises ValueError unless sequences of `seq` tokens can be cut."""
        check_layout(self.layout, seq, self.size)

    def positions(
        self, seq: int, device: torch.device | str = "cpu", document_ids: Tensor | None = None
    ) -> Tensor:
        """Returns the places of this rank's tokens in the sequence, int64 [seq / size]. document_ids: those
        of the whole sequences, [B, seq]; only the placed layout reads them."""
        return positions(self.layout, seq, self.size, document_ids, device)[self.rank]

    def shard(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Returns this rank's part [B, S / size, ...] of `tokens` [B, S, ...]. document_ids: as above."""
        return take_shard(tokens, self.layout, self.size, self.rank, document_ids)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_ids: Tensor | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Causal attention over the whole sequence, within each document and to the last `window` keys; see
        `ring_attention`."""
        return ring_attention(
            q,
            k,
            v,
            self.group,
            layout=self.layout,
            scale=scale,
            variant=self.variant,
            document_ids=document_ids,
            window=window,
            wire=self.wire,
        )

    def of_first(self, tokens: int, share: int) -> Context:
        """Returns the context of the beginning of a sequence that consists of the first `tokens` of each
        rank's `share`. Raises ValueError if these are not a beginning of the sequence."""
        if self.size == 1 or self.layout == "striped" or tokens == share:
            return self
        if self.layout == "zigzag" and 2 * tokens == share:  # the early chunks
            return replace(self, layout="contiguous")
        raise ValueError(
            f"The first {tokens} of every rank's {share} tokens are no beginning of a sequence that the "
            f"{self.layout} layout cuts over {self.size} ranks; use layout='striped'."
        )

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of a small x over the ranks, the same on each of them; no gradient."""
        if self.size == 1:
            return x
        return ops.all_gather_stats(x, companion(self.group, "cp").name).sum(0)
