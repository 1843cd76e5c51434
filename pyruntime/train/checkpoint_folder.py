"""Which checkpoints a folder holds and what they say of themselves; without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyruntime.train import manifest
from pyruntime.train.config import RunConfig, meets_every_step, replicas
from pyruntime.train.errors import ConfigError

if TYPE_CHECKING:
    from pyruntime.llama.config import LlamaConfig

FOLDER, FACTS_FILE = "checkpoints", "run.json"
FORMAT = 2
"""Of new checkpoints, in FACTS_FILE. Those of the first had no checksums and did not name their format."""
PARTIAL = ".partial"
"""How the name of a folder ends that is being written."""
STEP_NAME = re.compile(r"step-[0-9]+")
"""The name of a checkpoint's folder."""
AUTO = "auto"
"""Of `checkpoint.resume`: the newest checkpoint of the run folder, where it has one."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself."""

    step: int
    """Steps taken."""
    dtype: str
    """Of the parameters: "bf16" or "fp32"."""
    model: dict
    """The model's shape, as in a Hugging Face config.json."""
    rounding: str = "nearest"
    """Of bf16 weights; "stochastic": there are no fp32 master weights."""
    skipped: int = 0
    """Of the steps, those that updated nothing."""
    in_a_row: int = 0
    """Of these, those since the last step that counted."""
    norms: Sequence[float] = ()
    """Of the gradients that the next step's is compared with, where spikes are looked for."""
    method: str = "every_step"
    """When data-parallel ranks meet, and where that is not in every step, how many replicas."""
    deal: Sequence[int] = ()
    """Where replicas come and go: the lowest block of sequences that had never been dealt, then those that
    had not counted."""
    compression: str = ""
    """How gradients were compressed over which ranks, of which there is what was lost; empty: they were
    not."""

    @classmethod
    def of(cls, config: RunConfig, shape: LlamaConfig) -> Facts:
        """Of a run that trains a model of that shape, before its first step."""
        of_replicas = "" if meets_every_step(config) else f" of {replicas(config)} replicas"
        if config.data_parallel.members:
            of_replicas = " of replicas that come and go"
        method = config.data_parallel.method + of_replicas
        dtype, rounding = config.train.dtype, config.optimizer.rounding
        return cls(0, dtype, dataclasses.asdict(shape), rounding, method=method)


def complete(folder: Path) -> list[Path]:
    """Its checkpoints, by their steps."""
    found = [path.parent for path in folder.glob(f"step-*/{FACTS_FILE}")]
    return sorted((path for path in found if STEP_NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint of `complete` is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def left_over(folder: Path, saved: int, keep: int) -> list[Path]:
    """What is to be removed of `folder` once step `saved` was: checkpoints past it, which are of a branch of
    the run that was left, and all but the newest `keep` of the others."""
    found = complete(folder)
    past = [path for path in found if step_of(path) > saved]
    return past + found[: max(len(found) - len(past) - keep, 0)]


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of that run; None where it has none."""
    return next(reversed(complete(run_dir / FOLDER)), None)


def find(path: Path) -> Path:
    """The checkpoint that `checkpoint.resume` names: the folder itself, or the newest one of a run folder."""
    if (path / FACTS_FILE).is_file():
        return path
    found = newest(path)
    if found is None:
        raise ConfigError(
            f"checkpoint.resume: {path} holds no complete checkpoint; give a run folder or one of its "
            f"{FOLDER}/step-N folders."
        )
    return found


def read_matching(checkpoint: Path, wanted: Facts) -> Facts:
    """What `checkpoint` says of itself. Raises ConfigError where that is damaged or not of the wanted model
    and dtype (the wanted step is not looked at)."""
    facts = _read(checkpoint)
    found, asked = (
        each.model
        | {
            "train.dtype": each.dtype,
            "optimizer.rounding": each.rounding,
            "data_parallel.method": each.method,
        }
        for each in (facts, wanted)
    )
    for name, value in asked.items():
        if found.get(name) != value:
            raise ConfigError(
                f"checkpoint.resume: {checkpoint} was saved with {name}={found.get(name)}, but the "
                f"configuration asks for {name}={value}."
            )
    return facts


def why_residuals_are_left(checkpoint: Path, wanted: Facts) -> str:
    """In words, where what compression lost is not taken up from `checkpoint`; empty where it is, or there is
    none and none is wanted."""
    found = _read(checkpoint).compression
    if found == wanted.compression:
        return ""
    return (
        f"{checkpoint} was saved with gradients compressed by {found or 'nothing'}, and this run compresses "
        f"them by {wanted.compression or 'nothing'}: what was lost is not taken up"
    )


def to_json(facts: Facts) -> str:
    """The content of FACTS_FILE."""
    return json.dumps(dataclasses.asdict(facts) | {"format": FORMAT}, indent=2) + "\n"


def is_unchecked(checkpoint: Path) -> bool:
    """Whether it was saved before there were checksums: it has no manifest, and does not say that it had."""
    if (checkpoint / manifest.MANIFEST).exists():
        return False
    try:
        content = json.loads((checkpoint / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "format" not in content


def _read(checkpoint: Path) -> Facts:
    if not is_unchecked(checkpoint):
        manifest.check(checkpoint, FACTS_FILE, manifest.read(checkpoint))
    try:
        content = json.loads((checkpoint / FACTS_FILE).read_text(encoding="utf-8"))
        facts = Facts(**{name: value for name, value in content.items() if name != "format"})
        whole = type(facts.step) is int and facts.step >= 1 and isinstance(facts.model, dict)
        whole = whole and type(facts.skipped) is int and 0 <= facts.skipped <= facts.step
        whole = whole and type(facts.in_a_row) is int and 0 <= facts.in_a_row <= facts.skipped
        whole = whole and all(type(block) is int and block >= 0 for block in facts.deal)
        whole = whole and all(isinstance(norm, float) and math.isfinite(norm) for norm in facts.norms)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise manifest.refusal(checkpoint, FACTS_FILE, "it does not say what was saved")
    return facts
