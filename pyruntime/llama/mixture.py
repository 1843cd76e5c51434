"""The sizes of the experts that take the place of a layer's feed-forward network, as data."""

from __future__ import annotations

import dataclasses

from pyruntime.llama.sizes import check_number
from pyruntime.nn.router import why_no_groups
from pyruntime.text import short_repr

MOST_EXPERTS = 2**12
"""Limit on experts, some ten times the most of a published model."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The sizes of a model's experts. Raises ValueError for numbers that make none."""

    experts: int
    """Experts of a layer, E."""
    per_token: int
    """Experts that a token goes to, k."""
    width: int
    """Features between an expert's two linears, F."""
    renormalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    shared_width: int = 0
    """Features of an expert that all tokens go to, times the sigmoid of a linear of one output (Qwen2-MoE);
    with `sigmoid` it counts as it is (DeepSeek-V3). 0: none."""
    dense_layers: int = 0
    """The first layers, which have one feed-forward network in place of experts."""
    sigmoid: bool = False
    """Whether scores are sigmoids, chosen by with a bias that is no weight (DeepSeek-V3), else a softmax."""
    groups: int = 1
    """Groups of experts, of which a token goes only to the best ones; with `sigmoid`."""
    best_groups: int = 1
    """Groups that a token may go to."""
    factor: float = 1.0
    """Factor of the weights of a token's experts; with `sigmoid`."""

    def __post_init__(self) -> None:
        for name, least in (
            ("experts", 1),
            ("per_token", 1),
            ("width", 1),
            ("shared_width", 0),
            ("dense_layers", 0),
            ("groups", 1),
            ("best_groups", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**24:
                raise ValueError(
                    f"{name}={short_repr(value)} of the experts must be a whole number from {least} to below "
                    "2**24."
                )
        for name in ("renormalize", "sigmoid"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(
                    f"{name}={short_repr(getattr(self, name))} of the experts must be true or false."
                )
        check_number("factor of the experts' weights", self.factor)
        object.__setattr__(self, "factor", float(self.factor))
        if self.experts > MOST_EXPERTS:
            raise ValueError(f"experts={self.experts} are more than any model's; use at most {MOST_EXPERTS}.")
        if self.per_token > self.experts:
            raise ValueError(
                f"A token cannot go to {self.per_token} of {self.experts} experts; use fewer "
                "experts_per_token."
            )
        if not 1e-6 <= self.factor <= 1e6:
            raise ValueError(f"A factor {self.factor} of the experts' weights must be from 1e-6 to 1e6.")
        if not self.sigmoid and (self.groups, self.best_groups, self.factor) != (1, 1, 1.0):
            raise ValueError(
                f"{self.groups} groups of experts, {self.best_groups} for a token, and the factor "
                f"{self.factor} of weights belong to routers by sigmoid; set sigmoid, or leave them out."
            )
        if why := why_no_groups(self.experts, self.per_token, self.groups, self.best_groups):
            raise ValueError(why)

    @property
    def has_shared_gate(self) -> bool:
        """Whether the shared expert is weighed by a linear of one output."""
        return self.shared_width > 0 and not self.sigmoid

    def has(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return layer >= self.dense_layers

    def parameters(self, hidden: int, *, used: bool = False) -> int:
        """Number of weights of one layer's experts and router; used: of those that one token goes to."""
        experts = self.per_token if used else self.experts
        shared = 3 * hidden * self.shared_width + (hidden if self.has_shared_gate else 0)
        return 3 * hidden * self.width * experts + hidden * self.experts + shared
