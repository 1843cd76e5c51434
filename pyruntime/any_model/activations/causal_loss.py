"""Computes the loss of transformers' causal language models from each rank's own logits.

Their loss takes whole logits [.., V], and every rank would compute all exponentials. The head of a cut model
attaches this rank's logits [.., V/P] to the whole ones that it returns, and the loss reads those
(cross_entropy.py): three numbers for each token travel, and each rank works on its part of the vocabulary.
Where these are many, the head attaches its input instead, and computes no logits (later_logits.py). If the
model computes other logits from the head's (a cap, a factor), or writes to them, transformers' own loss runs
on the whole logits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from pyruntime.any_model.activations.later_logits import HeadInput
from pyruntime.any_model.comparing import asked
from pyruntime.nn.head_loss import losses_of_logits
from pyruntime.nn.linear import ColumnParallelLinear

_OWN = "tp_own_logits"


class _Left(NamedTuple):
    """A head's note on its whole output: the head, its output on this rank or its input, and the version of
    the whole."""

    head: ColumnParallelLinear
    own: Tensor | HeadInput
    version: int


def leave_own(whole: Tensor, head: ColumnParallelLinear, own: Tensor) -> None:
    """Attaches `own`, this rank's output of `head`, to `whole`, the output gathered from all ranks. Tensors
    of inference mode are left out, because they do not count writes."""
    if not whole.is_inference():
        setattr(whole, _OWN, _Left(head, own, whole._version))


def leave_input(whole: Tensor, held: HeadInput) -> None:
    """Attaches the input of a head to its logits, which nothing has computed yet."""
    setattr(whole, _OWN, _Left(held.head, held, whole._version))


def _left_on(logits: Tensor) -> _Left | None:
    """Returns what a head has attached, unless the logits have been written to since."""
    left = getattr(logits, _OWN, None)
    return None if left is None or logits._version != left.version else left


def _said(left: _Left | None, logits: Tensor, vocab_size: int) -> str:
    if left is None and logits.is_inference():
        return "of whole logits: inference mode does not count writes to them"
    if left is None:
        return "of whole logits: the model computes others from its head's, or writes to them"
    head = left.head
    if head.out_features != vocab_size:
        return f"of whole logits: it is over {vocab_size} words and {head.label} gives {head.out_features}"
    how = ", by chunks of rows" if isinstance(left.own, HeadInput) else ""
    return f"of each rank's own logits of {head.label}{how}"


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
        left = _left_on(logits)
        targets = shift_labels
        if targets is None and labels is not None:
            targets = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if not is_compiling():
            self.said = _said(left, logits, vocab_size)
        if left is None or targets is None or left.head.out_features != vocab_size:
            return self.loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        head, own = left.head, left.own
        targets = targets.reshape(-1).to(logits.device)
        count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(own, HeadInput):
            return own.loss(targets, count, ignore_index)
        losses = losses_of_logits(head, own.flatten(0, -2), targets, ignore_index=ignore_index)
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
            module.register_forward_pre_hook(functools.partial(_tell, head.hook), with_kwargs=True)


def _tell(hook: Any, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    """Tells the hook of a model's head whether the call has labels."""
    hook.has_labels = kwargs.get("labels") is not None


def logits_read(model: nn.Module) -> str:
    """Describes, for explain(), the losses in `model` that read_own_logits() replaced; "" for none."""
    values = (value for module in model.modules() for value in vars(module).values())
    return "; ".join(dict.fromkeys(v.said for v in values if isinstance(v, CausalLoss) and v.said))
