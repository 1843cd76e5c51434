"""Cross-entropy over logits whose vocabulary is cut over a tensor-parallel group."""

from __future__ import annotations

from torch import Tensor

from pyruntime import ops
from pyruntime.nn.parameters import Group, TensorGroup
from pyruntime.ops.layers import cross_entropy_loss, cross_entropy_stats

ANY_VOCABULARY = 2**62


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    labels: Tensor,
    group: Group | TensorGroup | None,
    *,
    vocab_start: int,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    overwrite_logits: bool = False,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns each token's loss, fp32, the same on every rank: logsumexp over all logits minus the label's.

    logits_shard [..., V_r] holds the vocabulary's [vocab_start, vocab_start + V_r) on this rank; labels [...]
    int64 are the same on every rank. The result has the shape of labels, and is 0 where the label is
    ignore_index. Ranks exchange three numbers for each token (maximum, sum of exponentials, the label's
    logit), never logits. The backward exchanges nothing:

        d logits_r = (exp(logits_r - logsumexp) - onehot(label) where this rank holds it) * d loss

    (Shoeybi et al. 2019, section 3.)

    z_loss: adds z_loss logsumexp^2 to the loss of every label that is not ignored (Chowdhery et al. 2022,
        arXiv 2204.02311, section 5).
    vocab_size: V over all ranks; where it is given, a label outside [0, V) raises IndexError on CPU;
        elsewhere the device asserts it.
    overwrite_logits: the backward writes the gradient over the logits, which saves memory of their size;
        nothing else may read the logits afterwards.
    """
    if logits_shard.shape[:-1] != labels.shape:
        raise ValueError(
            "Cross-entropy needs one label for every row of logits, but the logits are "
            f"{list(logits_shard.shape)} and the labels {list(labels.shape)}; pass logits [..., V/P] and "
            "labels [...]."
        )
    name = group.name if isinstance(group, TensorGroup) else group or ""  # "": only this rank
    flat_logits, flat_labels = logits_shard.reshape(-1, logits_shard.size(-1)), labels.reshape(-1)
    stats = cross_entropy_stats(flat_logits, flat_labels, vocab_start)
    stats = ops.all_gather_stats(stats, name) if name else stats.unsqueeze(0)  # [P, tokens, 3]
    size = ANY_VOCABULARY if vocab_size is None else vocab_size
    loss, lse = cross_entropy_loss(
        flat_logits,
        flat_labels,
        stats,
        vocab_start,
        size,
        ignore_index=ignore_index,
        overwrite_logits=overwrite_logits,
    )
    if z_loss:
        loss = loss + z_loss * lse.square().masked_fill(flat_labels == ignore_index, 0.0)
    return loss.view(labels.shape)
