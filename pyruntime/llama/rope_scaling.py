"""Scaling of rotary frequencies as data, and its translation to and from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pyruntime.llama.sizes import check_number, check_size
from pyruntime.text import short_repr

_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale_all_dim",
    ),
}
"""The fields that each type of scaling reads."""
ROPE_TYPES = ("default", *_KEYS)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than the pre-training context.

    `rope_type` is Hugging Face's name. `"linear"` divides every frequency by `factor`. `"llama3"` divides
    those whose wavelength in tokens is above `original_max_position_embeddings / low_freq_factor`, keeps
    those below `original_max_position_embeddings / high_freq_factor`, and blends in between. `"yarn"` divides
    those of channels that turn less than `beta_slow` times in the original context, keeps those that turn
    more than `beta_fast` times, blends in between, and multiplies rotated queries and keys by
    `attention_factor` (None: `0.1 log(factor) + 1`; arXiv 2309.00071). mscale_all_dim: scores of latent
    attention are multiplied by the square of `0.1 mscale_all_dim log(factor) + 1`. truncate: whether the ends
    of that range are whole channels. `"dynamic"` changes nothing up to `max_position_embeddings`, beyond
    which no sequence of this model reaches.
    """

    rope_type: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in _KEYS:
            raise ValueError(
                f"There is no rope_type={short_repr(self.rope_type)}; use one of {list(_KEYS)}, or "
                "rope_scaling=None."
            )
        check_number("rope factor", self.factor)
        if not 1.0 <= self.factor <= 1e6:
            raise ValueError(
                f"rope factor={self.factor} must be at least 1.0, because it lengthens the context, and at "
                "most 1e6."
            )
        if self.rope_type in ("llama3", "yarn"):
            check_size("rope original_max_position_embeddings", self.original_max_position_embeddings)
            low, high = (
                ("low_freq_factor", "high_freq_factor")
                if self.rope_type == "llama3"
                else ("beta_slow", "beta_fast")
            )
            self._check_ends(low, high)
        if self.rope_type == "yarn":
            self._check_yarn()

    def _check_ends(self, low: str, high: str) -> None:
        for name in (low, high):
            check_number(f"rope {name}", getattr(self, name))
        if not 1e-6 <= getattr(self, low) < getattr(self, high) <= 1e6:
            raise ValueError(
                f"rope {low}={getattr(self, low)} and {high}={getattr(self, high)} must be positive, the low "
                "one smaller than the high one, and between 1e-6 and 1e6."
            )

    def _check_yarn(self) -> None:
        if type(self.truncate) is not bool:
            raise ValueError(f"rope truncate={short_repr(self.truncate)} must be true or false.")
        if self.attention_factor is not None:
            check_number("rope attention_factor", self.attention_factor)
            if not 1e-6 <= self.attention_factor <= 1e6:
                raise ValueError(
                    f"rope attention_factor={self.attention_factor} must be between 1e-6 and 1e6: it "
                    "multiplies queries and keys."
                )
        if self.mscale_all_dim is not None:
            check_number("rope mscale_all_dim", self.mscale_all_dim)
            if not -1e3 <= self.mscale_all_dim <= 1e3:
                raise ValueError(f"rope mscale_all_dim={self.mscale_all_dim} must be from -1000 to 1000.")

    @property
    def magnitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.rope_type != "yarn":
            return 1.0
        return yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    @property
    def score_factor(self) -> float:
        """The factor of latent attention's scores."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_magnitude(self.factor, self.mscale_all_dim) ** 2


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor of rotated queries and keys (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings of a config.json, of transformers 4 or 5. Raises ValueError for settings
    that are no object, or that turn only a part of the channels."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if hf.get(name) is not None:
            if not isinstance(hf[name], dict):
                raise ValueError(f"{name} of config.json must be an object, found {short_repr(hf[name])}.")
            found = found or dict(hf[name])
    part = found.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if part is not None and part != 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={short_repr(part)}, which this model does not have: it "
            "turns all channels of a head."
        )
    if hf.get("original_max_position_embeddings") is not None and found:
        found["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    return found


def rope_from_hf(rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
    """Returns the scaling in `rope`, from `rope_of`, without its theta. Raises ValueError for a type that
    this model does not have."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type={short_repr(rope_type)} is not supported; Llama checkpoints use one of "
            f"{list(ROPE_TYPES)}."
        )
    if rope_type == "default":
        return None
    names = _KEYS[rope_type]
    if "original_max_position_embeddings" in names:
        rope.setdefault("original_max_position_embeddings", max_positions)
    if rope_type == "yarn":
        # As transformers does, which takes its own values for null.
        rope = {name: value for name, value in rope.items() if value is not None}
        _resolve_mscale(rope)
    optional = {f.name: f.default for f in dataclasses.fields(RopeScaling)} if rope_type == "yarn" else {}
    missing = [name for name in names if name not in rope and (name == "factor" or name not in optional)]
    if missing:
        raise ValueError(f"rope_type={rope_type!r} in config.json lacks {', '.join(missing)}.")
    return RopeScaling(rope_type=rope_type, **{name: rope[name] for name in names if name in rope})


def rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns the `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    values = {name: getattr(scaling, name) for name in _KEYS[scaling.rope_type]}
    return {"rope_type": scaling.rope_type} | {k: v for k, v in values.items() if v is not None}


def _resolve_mscale(rope: dict[str, Any]) -> None:
    """Sets the attention_factor that `mscale` and `mscale_all_dim` of YaRN stand for."""
    given = all(rope.get(name) for name in ("mscale", "mscale_all_dim", "factor"))
    if "attention_factor" in rope or not given:
        return
    for name in ("mscale", "mscale_all_dim", "factor"):
        check_number(f"rope {name}", rope[name])
    above, below = (yarn_magnitude(rope["factor"], rope[name]) for name in ("mscale", "mscale_all_dim"))
    if below == 0:
        raise ValueError(f"rope mscale_all_dim={rope['mscale_all_dim']} leaves nothing of queries and keys.")
    rope["attention_factor"] = above / below
