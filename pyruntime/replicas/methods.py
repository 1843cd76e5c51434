"""Ways in which replicas that train alone meet, as data: pure, without torch.

What the numbers do is in the docstring of `OuterOptimizer`; when to use which, in
docs/explanation/rare-synchronization.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

Penalty: TypeAlias = Callable[[float, float], float]
"""penalty(gap, reach), at least 1: what a displacement that is a round old is divided by. Both are 2-norms
over all parameters of a fragment, in units of the parameters."""
Tau: TypeAlias = int | Literal["auto"]


def gap_penalty(gap: float, reach: float) -> float:
    """1 + gap / reach. Of ours, as the paper's formula is not public;
    docs/explanation/rare-synchronization.md derives it.

    gap: how far the average that has come, of the round before, is from where this round began.
    reach: the largest displacement that the round before could have made, its first step tau times.
    """
    if gap == 0:
        return 1.0
    return 1.0 + gap / reach if reach > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Method:
    """When replicas meet and what they do there.

    Raises ValueError for settings that do not fit together.
    """

    name: str
    tau: Tau
    """Steps of the inner optimizer in a round; "auto": as few as hide the exchange, measured in the first
    round."""
    delay: int | None = 0
    """Steps from when a displacement leaves until its average is used, and that hide it; 0: it is waited for;
    None: a whole round."""
    lr: float = 1.0
    """Outer learning rate (alpha)."""
    momentum: float = 0.0
    """Outer momentum (beta)."""
    nesterov: bool = False
    """Whether the outer step looks ahead along its momentum, as torch.optim.SGD(nesterov=True)."""
    pull: float = 1.0
    """How far a replica goes to the outer iterate, above 0 to 1; 1: it begins its round there."""
    penalty: Penalty | None = None
    """Of displacements that are a round old; None: none."""
    clip: float = math.inf
    """Largest absolute value of an element of the outer momentum (phi), in units of the parameters."""
    fragments: int = 1
    """Parts of the model, of whole layers, that meet in turn."""

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
            'tau="auto" is the length of a round that hides one exchange of the whole model; of methods that '
            "wait, or of fragments, give a number.",
        )
        _require(
            self.penalty is None or (delay is None and self.pull == 1 and not self.nesterov),
            "A penalty is of displacements that are a round old and from which replicas begin anew (co2); "
            "leave it out.",
        )

    @property
    def restarts(self) -> bool:
        """Whether a round begins at the outer iterate while the displacement of the one before travels."""
        return self.delay is None and self.pull == 1

    @property
    def waits(self) -> bool:
        """Whether the average is waited for, and a round begins where all replicas are alike."""
        return self.delay == 0 and self.pull == 1 and self.fragments == 1

    @property
    def meets_at_ends(self) -> bool:
        """Whether averages are used at the ends of rounds alone, of the whole model."""
        return self.fragments == 1 and (self.delay is None or self.waits)

    @property
    def rounds_late(self) -> int:
        """Whole rounds from when a displacement leaves until its average is used: 0 or 1."""
        return int(self.delay is None)

    def length(self, tau: int, fragment: int) -> int:
        """Steps of the first round of a fragment: they take turns evenly."""
        return tau - fragment * tau // self.fragments


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def refuse_for_members(method: Method) -> None:
    """Raises ValueError for a method that replicas cannot come to, or leave, between two rounds."""
    _require(
        method.meets_at_ends,
        f"Replicas that come and go meet at the end of a round, and {method.name} uses an average in its "
        f"midst; use one of {', '.join(name for name, make in METHODS.items() if make(2).meets_at_ends)}.",
    )
    _require(
        method.tau != "auto",
        'tau="auto" is measured in a first round, and replicas that come later share blocks of tau steps '
        "with those of the first; give a number, such as the one that a run of fixed replicas has logged.",
    )


def local_sgd(tau: Tau) -> Method:
    """Parameters are averaged after every tau steps (Stich 2019, arXiv 1805.09767)."""
    return Method("local_sgd", tau)


def slowmo(tau: Tau, lr: float = 1.0, momentum: float = 0.5) -> Method:
    """Local SGD with outer momentum (Wang et al. 2020, arXiv 1910.00643, algorithm 1). There the displacement
    is divided by the inner learning rate and the step multiplied by it; the two are alike while that is
    constant."""
    return Method("slowmo", tau, lr=lr, momentum=momentum)


def diloco(tau: Tau, lr: float = 0.7, momentum: float = 0.9) -> Method:
    """Nesterov momentum outside, AdamW as a rule inside (Douillard et al. 2023, arXiv 2311.08105,
    algorithm 1)."""
    return Method("diloco", tau, lr=lr, momentum=momentum, nesterov=True)


def overlapped_local_sgd(tau: Tau, pull: float = 0.6, momentum: float = 0.0) -> Method:
    """Replicas are pulled to an anchor, their average of a round ago (Wang, Liang and Joshi 2020, arXiv
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
    2024, arXiv 2401.16265). The paper's outer learning rate is 1; ours keeps an average that is late from
    swinging (docs/explanation/rare-synchronization.md)."""
    return Method("co2", tau, delay=None, lr=lr, momentum=momentum, penalty=penalty, clip=clip)


def streaming_diloco(
    tau: Tau, fragments: int = 2, delay: int = 1, pull: float = 0.5, lr: float = 0.7, momentum: float = 0.9
) -> Method:
    """DiLoCo of fragments of layers in turn, each hidden behind `delay` steps (Douillard et al. 2025, arXiv
    2501.18512). Displacements are measured from the outer iterate, which replicas share."""
    return Method(
        "streaming_diloco", tau, delay=delay, lr=lr, momentum=momentum, nesterov=True, pull=pull,
        fragments=fragments,
    )  # fmt: skip


METHODS: dict[str, Callable[..., Method]] = {
    each.__name__: each for each in (co2, local_sgd, slowmo, diloco, overlapped_local_sgd, streaming_diloco)
}


def fragments_of(names: Sequence[str], fragments: int) -> list[int]:
    """The fragment of each parameter by its name, in the order of the model: layers are dealt out in turn by
    the first number in their names (Douillard et al. 2025, the strided pattern); what comes before the first
    layer goes with it, and what comes after the last layer with that."""
    layer, found = 0, []
    for name in names:
        numbers = [part for part in name.split(".") if part.isdecimal()]
        layer = int(numbers[0]) if numbers else layer
        found.append(layer % fragments)
    return found
