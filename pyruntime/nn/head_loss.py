"""The cross-entropy of a language-model head whose vocabulary is cut, noted at the head: explain() has a line
for what it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from pyruntime.nn.chunked_head import linear_cross_entropy
from pyruntime.nn.cross_entropy import vocab_parallel_cross_entropy
from pyruntime.nn.linear import ColumnParallelLinear
from pyruntime.nn.module import Step


def losses_of_logits(head: ColumnParallelLinear, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Returns `vocab_parallel_cross_entropy` of the head's own logits [..., V_r]. options: its own."""
    if not is_compiling():
        head.note_loss("whole")
    return vocab_parallel_cross_entropy(
        logits, labels, head.group, vocab_start=head.vocab_start, vocab_size=head.out_features, **options
    )


def loss_of_input(
    head: ColumnParallelLinear,
    x: Tensor,
    labels: Tensor,
    *,
    compute: Callable[..., Tensor] = linear_cross_entropy,
    **options: Any,
) -> Tensor:
    """Returns `linear_cross_entropy` of the head's input x [M_r, K], this rank's rows, in a call of the head
    that gives no logits. compute: another function of the same arguments. options: its own."""

    def take() -> Tensor:
        head.note(len(labels), cut_rows=True)
        head.note_loss("by chunks")
        return compute(
            x,
            head.weight,
            labels,
            head.group,
            vocab_start=head.vocab_start,
            vocab_size=head.out_features,
            tier=head.tier,
            wire=head.wire,
            **options,
        )

    return head(Step(take))
