"""How a model's sequences are cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from pyruntime import ops
from pyruntime.choices import ContextLayout, ContextVariant, WireFormat, check_value, values
from pyruntime.comm import Group, companion, group_name, group_rank, group_size
from pyruntime.context.attention import ring_attention
from pyruntime.context.layouts import check_layout, positions, take_shard


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and which of its tokens each holds.

    group: of the ranks. layout, variant, wire: as `ring_attention` takes them; the layout is one that needs
    no documents.

    Raises ValueError for another layout or variant. Every rank of the group makes one alike.
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

    def positions(self, seq: int) -> Tensor:
        """Places [seq / size] in the sequence of this rank's tokens, int64."""
        return positions(self.layout, seq, self.size)[self.rank]

    def shard(self, tokens: Tensor) -> Tensor:
        """This rank's part [B, S / size, ...] of [B, S, ...]."""
        return take_shard(tokens, self.layout, self.size, self.rank)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Causal attention over the whole sequence, in each document; see `ring_attention`."""
        return ring_attention(
            q,
            k,
            v,
            self.group,
            layout=self.layout,
            variant=self.variant,
            document_ids=document_ids,
            wire=self.wire,
        )

    def of_first(self, tokens: int, share: int) -> Context:
        """How the beginning of a sequence is cut over the ranks: the first `tokens` of each one's `share`.
        Raises ValueError where these are no beginning."""
        if self.size == 1 or self.layout == "striped" or tokens == share:
            return self
        if self.layout == "zigzag" and 2 * tokens == share:  # the early chunks
            return replace(self, layout="contiguous")
        raise ValueError(
            f"The first {tokens} of every rank's {share} tokens are no beginning of a sequence that the "
            f"{self.layout} layout cuts over {self.size} ranks; use the striped one."
        )

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of a small x, the same on each of them; no gradient."""
        if self.size == 1:
            return x
        return ops.all_gather_stats(x, companion(self.group, "cp").name).sum(0)
