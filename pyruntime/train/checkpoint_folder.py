"""Which checkpoints a folder holds and what they say of themselves; without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyruntime.train import manifest
from pyruntime.train.config import Checkpoint
from pyruntime.train.errors import ConfigError

FOLDER, FACTS_FILE = "checkpoints", "run.json"
FORMAT, OLD_FORMATS = 3, (1, 2)
"""Of new checkpoints, in FACTS_FILE. Old ones hold pickles; those of the first do not name their format."""
PARTIAL = ".partial"
"""How the name of a folder ends that is being written."""
STEP_NAME = re.compile(r"step-[0-9]+")
"""The name of a checkpoint's folder."""
AUTO = "auto"
"""Of `checkpoint.resume`: the newest checkpoint of the run folder, where it has one."""


@dataclasses.dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says of itself."""

    step: int
    """Steps taken."""
    dtype: str
    """Of the parameters: "bf16" or "fp32"."""
    model: dict
    """The model's shape, as in a Hugging Face config.json."""
    optimizer: str = "adamw"
    """Who updated the weights."""
    rounding: str = "nearest"
    """Of bf16 weights; "stochastic": there are no fp32 master weights."""
    skipped: int = 0
    """Of the steps, those that updated nothing."""
    in_a_row: int = 0
    """Of these, those since the last step that counted."""
    samples: int = 0
    """Sequences that steps have taken of the data, whose next one is the next."""
    norms: Sequence[float] = ()
    """Of the gradients that the next step's is compared with, where spikes are looked for."""
    method: str = "every_step"
    """When data-parallel ranks meet, and where that is not in every step, how many replicas."""
    deal: Sequence[int] = ()
    """Where replicas come and go: the lowest block of sequences that had never been dealt, then those that
    had not counted."""
    compression: str = ""
    """How gradients, or displacements of replicas, were compressed over which ranks, of which there is what
    was lost; empty: they were not."""
    layers: Sequence[int] = ()
    """Of each stage of the pipeline that goes on, where layers were moved between stages; empty: they were
    not."""
    saved_at: float = 0.0
    """When, in seconds since 1970."""


def complete(folder: Path) -> list[Path]:
    """Its checkpoints, by their steps. A folder has such a name once it is whole: one that lacks a file now
    is damaged, and not passed over."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def name_of(step: int) -> str:
    """The name of its folder."""
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint of `complete` is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def left_over(folder: Path, saved: int, keep: Checkpoint) -> list[Path]:
    """What is to be removed of `folder` once step `saved` was: checkpoints past it, which are of a branch of
    the run that was left, and of the others all but the newest `keep.keep` and those that
    `keep.keep_every_h` keeps: the oldest, and each that is so many hours younger than the last one kept.
    Past it a damaged one goes too, as it would stay the newest; before it those that do not say what they
    are stay, and are not counted."""
    past = [path for path in complete(folder) if step_of(path) > saved]
    found = [path for path in complete(folder) if (path / FACTS_FILE).is_file()]
    found = [path for path in found if path not in past]
    older = found[: max(len(found) - keep.keep, 0)]
    last = -math.inf
    for path in [*older] if keep.keep_every_h else []:
        if (at := _saved_at(path)) >= last + 3600 * keep.keep_every_h:
            last = at
            older.remove(path)
    return past + older


def _saved_at(checkpoint: Path) -> float:
    """Never, for one that does not say."""
    content = _content(checkpoint)
    found = content.get("saved_at") if isinstance(content, dict) else None
    return found if isinstance(found, float) else -math.inf


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of that run; None where it has none."""
    return next(reversed(complete(run_dir / FOLDER)), None)


def to_go_on_with(run_dir: Path, wanted: CheckpointFacts) -> tuple[list[Path], str]:
    """The checkpoints of that run, newest first, but for those that do not even say what they are; and why
    the newest one is none of them, empty where it is. Raises DamagedError where there are such alone, and
    ConfigError where one is of another model or dtype."""
    found, newest, damaged = [], "", None
    for path in reversed(complete(run_dir / FOLDER)):
        try:
            read_matching(path, wanted)
            found.append(path)
        except manifest.DamagedError as error:
            newest = newest if found or newest else str(error)
            damaged = damaged or error
    if damaged and not found:
        raise damaged
    return found, newest


def find(path: Path) -> Path:
    """The checkpoint that `checkpoint.resume` names: the folder itself, or the newest one of a run folder."""
    if (path / FACTS_FILE).is_file() or (STEP_NAME.fullmatch(path.name) and path.is_dir()):
        return path
    found = newest(path)
    if found is None:
        raise ConfigError(
            f"checkpoint.resume: {path} holds no complete checkpoint; give a run folder or one of its "
            f"{FOLDER}/step-N folders."
        )
    return found


def read_matching(checkpoint: Path, wanted: CheckpointFacts) -> CheckpointFacts:
    """What `checkpoint` says of itself. Raises DamagedError where that is damaged, ConfigError where it is
    not of the wanted model and dtype (the wanted step is not looked at)."""
    facts = read(checkpoint)
    found, asked = (
        each.model
        | {
            "train.dtype": each.dtype,
            "optimizer.name": each.optimizer,
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


def why_residuals_are_left(checkpoint: Path, wanted: CheckpointFacts) -> str:
    """In words, where what compression lost is not taken up from `checkpoint`; empty where it is, or there is
    none and none is wanted."""
    found = read(checkpoint).compression
    if found == wanted.compression:
        return ""
    return (
        f"{checkpoint} was saved with compression by {found or 'nothing'}, and this run compresses by "
        f"{wanted.compression or 'nothing'}: what was lost is not taken up"
    )


def to_json(facts: CheckpointFacts) -> str:
    """The content of FACTS_FILE."""
    return json.dumps(dataclasses.asdict(facts) | {"format": FORMAT}, indent=2) + "\n"


def _content(checkpoint: Path) -> Any:
    """Of FACTS_FILE; None where it cannot be read."""
    try:
        return json.loads((checkpoint / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read(checkpoint: Path) -> CheckpointFacts:
    """What `checkpoint` says of itself. Raises DamagedError where that is damaged, ConfigError for one of an
    older format."""
    if (checkpoint / manifest.MANIFEST).exists():
        manifest.check(checkpoint, FACTS_FILE, manifest.read(checkpoint))
    content = _content(checkpoint)
    if isinstance(content, dict) and content.get("format", 1) in OLD_FORMATS:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} was saved by an older version, in pickles, which are not "
            "loaded; go on with that version, or begin a run with --model.init_from and the model folder of "
            "this one."
        )
    manifest.read(checkpoint)
    try:
        facts = CheckpointFacts(**{name: value for name, value in content.items() if name != "format"})
        whole = content["format"] == FORMAT
        whole = whole and type(facts.step) is int and facts.step >= 0 and isinstance(facts.model, dict)
        whole = whole and type(facts.skipped) is int and 0 <= facts.skipped <= facts.step
        whole = whole and type(facts.in_a_row) is int and 0 <= facts.in_a_row <= facts.skipped
        whole = whole and type(facts.samples) is int and 0 <= facts.samples < 2**63
        whole = whole and all(type(block) is int and block >= 0 for block in facts.deal)
        whole = whole and all(type(count) is int and count >= 1 for count in facts.layers)
        whole = whole and all(isinstance(norm, float) and math.isfinite(norm) for norm in facts.norms)
        whole = whole and isinstance(facts.dtype, str) and isinstance(facts.compression, str)
        whole = whole and isinstance(facts.saved_at, float)
    except (ValueError, TypeError, AttributeError, KeyError):
        whole = False
    if not whole:
        raise manifest.refusal(checkpoint, FACTS_FILE, "it does not say what was saved")
    if STEP_NAME.fullmatch(checkpoint.name) and step_of(checkpoint) != facts.step:
        finding = f"it is of step {facts.step}, and the folder has another name"
        raise manifest.refusal(checkpoint, FACTS_FILE, finding)
    return facts
