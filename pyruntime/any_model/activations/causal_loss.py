"""Computes the loss of transformers' causal language models from each rank's own logits.

Their loss takes whole logits [.., V], and every rank would compute all exponentials. The head of a cut model
attaches this rank's logits [.., V/P] to the whole ones that it returns, and the loss reads those
(cross_entropy.py): three numbers for each token travel, and each rank works on its part of the vocabulary. If
the model computes other logits from the head's (a cap, a factor), or writes to them, transformers' own loss
runs on the whole logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from pyruntime.any_model.comparing import asked
from pyruntime.nn.cross_entropy import vocab_parallel_cross_entropy
from pyruntime.nn.linear import ColumnParallelLinear

_OWN = "tp_own_logits"  # on a head's whole output: (the head, its output on this rank, the whole's version)


def leave_own(whole: Tensor, head: ColumnParallelLinear, own: Tensor) -> None:
    """Attaches `own`, this rank's output of `head`, to `whole`, the output gathered from all ranks. Tensors
    of inference mode are left out, because they do not count writes."""
    if not whole.is_inference():
        setattr(whole, _OWN, (head, own, whole._version))


def _own_of(logits: Tensor) -> tuple[ColumnParallelLinear, Tensor] | None:
    """Returns the head and its attached output, unless the logits have been written to since."""
    head, own, version = getattr(logits, _OWN, (None, None, None))
    return None if head is None or logits._version != version else (head, own)


def _said(left: tuple[ColumnParallelLinear, Tensor] | None, logits: Tensor, vocab_size: int) -> str:
    if left is None and logits.is_inference():
        return "of whole logits: inference mode does not count writes to them"
    if left is None:
        return "of whole logits: the model computes others from its head's, or writes to them"
    head, _ = left
    if head.out_features != vocab_size:
        return f"of whole logits: it is over {vocab_size} words and {head.label} gives {head.out_features}"
    return f"of each rank's own logits of {head.label}"


class CausalLoss:
    """Replaces `loss`, transformers' ForCausalLMLoss.

    said: which logits the last eager call read, for explain(); "" before the first."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.said = ""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        left = _own_of(logits)
        targets = shift_labels
        if targets is None and labels is not None:
            targets = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if not is_compiling():
            self.said = _said(left, logits, vocab_size)
        if left is None or targets is None or left[0].out_features != vocab_size:
            return self.loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        head, own = left
        targets = targets.reshape(-1).to(own.device)
        losses = vocab_parallel_cross_entropy(
            own.flatten(0, -2),
            targets,
            head.group,
            vocab_start=head.vocab_start,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
        )
        count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum().float() / count


def read_own_logits(model: nn.Module) -> None:
    """Makes the losses of causal models in `model` read each rank's own logits, where the head is cut."""
    for module in model.modules():
        head = asked(module, "get_output_embeddings")
        is_gathered = isinstance(head, ColumnParallelLinear) and getattr(head.hook, "whole", False)
        if not (is_gathered and hasattr(type(module), "loss_function")):
            continue
        if getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss":
            head.hook.leaves_own = True
            module.loss_function = CausalLoss(module.loss_function)


def logits_read(model: nn.Module) -> str:
    """Describes, for explain(), the losses in `model` that read_own_logits() replaced; "" for none."""
    values = (value for module in model.modules() for value in vars(module).values())
    return "; ".join(dict.fromkeys(v.said for v in values if isinstance(v, CausalLoss) and v.said))
