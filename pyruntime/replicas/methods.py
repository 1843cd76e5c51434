"""Methods by which replicas average, as data: pure, without torch.

Mathematics: the docstring of `OuterOptimizer`. Comparison: docs/explanation/rare-synchronization.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

Penalty: TypeAlias = Callable[[float, float], float]
"""penalty(gap, reach), at least 1: divides a displacement that is a round old. Both arguments are 2-norms
over all parameters of a fragment, in units of the parameters. For replicas on devices it takes and returns
float64 tensors without dimensions."""
Tau: TypeAlias = int | Literal["auto"]


def gap_penalty(gap: float, reach: float) -> float:
    """Returns 1 + gap / reach. Derived in docs/explanation/rare-synchronization.md, because the paper's
    formula is not public.

    gap: distance from this round's start to where the average of the round before leads.
    reach: the largest displacement that the round before could have made: tau times its first step.

    Also takes tensors, which nobody reads here.
    """
    if isinstance(gap, float | int) and gap > 0 and reach == 0:
        return math.inf
    return 1.0 + gap / (reach + (gap == 0))


@dataclasses.dataclass(frozen=True)
class Method:
    """When replicas average and which outer step they take.

    Raises ValueError for settings that do not fit together.
    """

    name: str
    tau: Tau
    """Steps of the inner optimizer in a round; "auto": as few as hide the exchange, measured in the first
    round."""
    delay: int | None = 0
    """Steps between sending a displacement and using its average, which hide the exchange; 0: replicas wait;
    None: a whole round."""
    lr: float = 1.0
    """Outer learning rate (alpha)."""
    momentum: float = 0.0
    """Outer momentum (beta)."""
    nesterov: bool = False
    """Whether the outer step looks ahead along its momentum, as torch.optim.SGD(nesterov=True)."""
    pull: float = 1.0
    """How far a replica moves to the outer iterate, above 0 to 1; 1: it begins its round there."""
    penalty: Penalty | None = None
    """Penalty on displacements that are a round old; None: none."""
    clip: float = math.inf
    """Largest absolute value of an element of the outer momentum (phi), in units of the parameters."""
    fragments: int = 1
    """Parts of the model, each of whole layers, that are averaged in turn."""

    def __post_init__(self) -> None:
        tau, delay = self.tau, self.delay
        _require(
            tau == "auto" or (type(tau) is int and tau >= 1), f'tau={tau} must be at least 1, or "auto".'
        )
        _require(self.lr > 0 and math.isfinite(self.lr), f"lr={self.lr} must be a positive finite number.")
        _require(0 <= self.momentum < 1, f"momentum={self.momentum} must be at least 0 and below 1.")
        _require(0 < self.pull <= 1, f"pull={self.pull} must be above 0 and at most 1.")
        _require(self.clip > 0, f"clip={self.clip} must be above 0; leave it out for none.")
        _require(self.fragments >= 1, f"fragments={self.fragments} must be at least 1.")
        _require(
            delay is None or (delay >= 0 and (tau == "auto" or delay < tau)),
            f"delay={delay} must be at least 0 and below tau={tau}.",
        )
        _require(
            tau == "auto" or self.fragments <= tau,
            f"fragments={self.fragments} meet in turn within tau={tau} steps; use no more than tau.",
        )
        _require(
            tau != "auto" or (delay is None and self.fragments == 1),
            'tau="auto" finds the shortest round that hides one exchange of the whole model; a method that '
            "waits or has fragments needs a number for tau.",
        )
        _require(
            self.penalty is None or (delay is None and self.pull == 1 and not self.nesterov),
            "A penalty needs displacements that are a round old and rounds that begin at the outer iterate "
            "(delay=None, pull=1, nesterov=False, as in co2); leave penalty out.",
        )

    @property
    def restarts(self) -> bool:
        """Whether rounds begin at the outer iterate while the previous round's displacement is still being
        sent."""
        return self.delay is None and self.pull == 1

    @property
    def waits(self) -> bool:
        """Whether replicas wait for the average and all begin the next round with the same parameters."""
        return self.delay == 0 and self.pull == 1 and self.fragments == 1

    @property
    def meets_at_ends(self) -> bool:
        """Whether averages of the whole model are used, and only at the ends of rounds."""
        return self.fragments == 1 and (self.delay is None or self.waits)

    @property
    def rounds_late(self) -> int:
        """Returns the whole rounds between sending a displacement and using its average: 0 or 1."""
        return int(self.delay is None)

    def length(self, tau: int, fragment: int) -> int:
        """Returns the steps of a fragment's first round, so that fragments take turns evenly."""
        return tau - fragment * tau // self.fragments


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def refuse_for_members(method: Method) -> None:
    """Raises ValueError for a method that replicas cannot join or leave between two rounds."""
    _require(
        method.meets_at_ends,
        f"Replicas that come and go average at the end of a round, but {method.name} uses averages within "
        f"it; use one of {', '.join(name for name, make in METHODS.items() if make(2).meets_at_ends)}.",
    )
    _require(
        method.tau != "auto",
        'tau="auto" is measured in a first round, but replicas that come later share its blocks of tau '
        "steps; give a number, such as the one that a run of fixed replicas has logged.",
    )


def local_sgd(tau: Tau) -> Method:
    """Averages parameters after every tau steps (Stich 2019, arXiv 1805.09767)."""
    return Method("local_sgd", tau)


def slowmo(tau: Tau, lr: float = 1.0, momentum: float = 0.5) -> Method:
    """Local SGD with outer momentum (Wang et al. 2020, arXiv 1910.00643, algorithm 1). The paper divides the
    displacement by the inner learning rate and multiplies the step by it; while that rate is constant, both
    are the same."""
    return Method("slowmo", tau, lr=lr, momentum=momentum)


def diloco(tau: Tau, lr: float = 0.7, momentum: float = 0.9) -> Method:
    """Nesterov momentum in the outer step, usually AdamW inside (Douillard et al. 2023, arXiv 2311.08105,
    algorithm 1)."""
    return Method("diloco", tau, lr=lr, momentum=momentum, nesterov=True)


def overlapped_local_sgd(tau: Tau, pull: float = 0.6, momentum: float = 0.0) -> Method:
    """Pulls replicas to an anchor, their average of a round ago (Wang, Liang and Joshi 2020, arXiv
    2002.09539)."""
    return Method("overlapped_local_sgd", tau, delay=None, pull=pull, momentum=momentum)


def co2(
    tau: Tau = "auto",
    lr: float = 0.7,
    momentum: float = 0.2,
    penalty: Penalty | None = gap_penalty,
    clip: float = math.inf,
) -> Method:
    """An outer step with momentum, one round late, which hides the exchange behind a whole round (Sun et al.
    2024, arXiv 2401.16265). The paper's outer learning rate is 1; ours is lower, so that a late average does
    not make z swing (docs/explanation/rare-synchronization.md)."""
    return Method("co2", tau, delay=None, lr=lr, momentum=momentum, penalty=penalty, clip=clip)


def streaming_diloco(
    tau: Tau, fragments: int = 2, delay: int = 1, pull: float = 0.5, lr: float = 0.7, momentum: float = 0.9
) -> Method:
    """DiLoCo on fragments of layers in turn, each exchange hidden behind `delay` steps (Douillard et al.
    2025, arXiv 2501.18512). Displacements are measured from the outer iterate, which replicas share."""
    return Method(
        "streaming_diloco", tau, delay=delay, lr=lr, momentum=momentum, nesterov=True, pull=pull,
        fragments=fragments,
    )  # fmt: skip


METHODS: dict[str, Callable[..., Method]] = {
    each.__name__: each for each in (co2, local_sgd, slowmo, diloco, overlapped_local_sgd, streaming_diloco)
}


def fragments_of(names: Sequence[str], fragments: int) -> list[int]:
    """Returns the fragment of each parameter, by names in the order of the model. Layers, found by the first
    number in a name, are dealt out in turn (Douillard et al. 2025, the strided pattern). Parameters before
    the first layer go with it, those after the last layer with the last."""
    layer, found = 0, []
    for name in names:
        numbers = [part for part in name.split(".") if part.isdecimal()]
        layer = int(numbers[0]) if numbers else layer
        found.append(layer % fragments)
    return found
