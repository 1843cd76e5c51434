"""The loss of direct preference optimization (DPO) over the pairs of answers of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.llama import Llama
from pyruntime.train.data.batches import Batch


class PreferenceLoss:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7). With the log-probabilities c and r, in nats,
    of all tokens to learn of a pair's chosen and rejected answer, and c', r' those of the reference:

        loss = -log sigmoid(beta ((c - c') - (r - r'))),  the mean over the pairs

    beta (c - c') and beta (r - r') are the rewards of the answers, of which `take` returns sums.
    """

    def __init__(self, beta: float, device: torch.device):
        self.beta = beta
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def loss(self, model: Llama, x: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of the last norm's output x [T/P, D] of a micro-batch, fp32. With a context it is
        the loss of the whole sequences, the same on its ranks, and its gradient this rank's share times the
        ranks, as `Llama.loss` has it: both are means over ranks."""
        pairs = batch.preferences
        assert pairs is not None and pairs.reference is not None
        answers, reference = model.in_rows(pairs.answers), pairs.reference
        found: list[Tensor] = []

        def weigh(losses: Tensor) -> Tensor:
            rewards = self.beta * (_sums(model, losses, answers, 2 * len(reference)) - reference)
            margins = rewards[:, 0] - rewards[:, 1]
            found.append(F.softplus(-margins).mean())
            won = (margins > 0).double()
            of_pairs = torch.cat([rewards, torch.stack([margins, won, torch.ones_like(won)], 1)], 1)
            self._sums += of_pairs.sum(0)
            # d loss / d c = -beta sigmoid(-margin), and c is minus the sum of the tokens' losses.
            slopes = self.beta * torch.sigmoid(-margins) / len(margins) * _ranks(model)
            return torch.stack([slopes, -slopes], 1).flatten()[answers].to(losses.dtype)

        weighed = model.weighed_loss(x, batch.labels, weigh)
        return found[0].to(weighed.dtype) + (weighed - weighed.detach())

    @torch.no_grad()
    def log_probabilities(self, model: Llama, x: Tensor, batch: Batch) -> Tensor:
        """Returns c and r of each pair, [pairs, 2] fp64, in nats; with a context of whole sequences."""
        pairs = batch.preferences
        assert pairs is not None
        answers = model.in_rows(pairs.answers)
        found: list[Tensor] = []

        def weigh(losses: Tensor) -> Tensor:
            found.append(_sums(model, losses, answers, 2 * batch.targets))
            return torch.zeros_like(losses)

        model.weighed_loss(x, batch.labels, weigh)
        return found[0]

    def take(self) -> Tensor:
        """Returns the sums of this rank's pairs since the last call, fp64 [5]: rewards of the chosen and the
        rejected answers, margins between them, pairs whose chosen answer has the greater reward, pairs. Ranks
        that share sequences or cut the model have the same; of a pipeline's stages the last one has them."""
        taken = self._sums.clone()
        self._sums.zero_()
        return taken

    @staticmethod
    def figures(ranks: Tensor) -> dict[str, Any]:
        """Returns figures of `StepMetrics` by name, means over pairs, from `take` of all ranks [ranks, 5]:
        each pair is there as often as any other."""
        chosen, rejected, margins, won, pairs = ranks.sum(0).tolist()
        names = "rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies"
        sums = chosen, rejected, margins, won
        return {name: each / pairs for name, each in zip(names, sums, strict=True)} if pairs else {}


def _ranks(model: Llama) -> int:
    return 1 if model.context is None else model.context.size


def _sums(model: Llama, losses: Tensor, answers: Tensor, count: int) -> Tensor:
    """Returns the log-probabilities [count / 2, 2] fp64 of whole answers, from the losses [T] of this rank's
    tokens and the answer of each. The order of the sums is fixed, on devices too."""
    order = answers.argsort(stable=True)
    ends = torch.searchsorted(answers[order], torch.arange(count, device=answers.device), right=True)
    offsets = F.pad(ends, (1, 0))
    found = torch.segment_reduce(-losses.double()[order], "sum", offsets=offsets, initial=0.0)
    return (found if model.context is None else model.context.sum(found)).view(-1, 2)
