"""Finds the checkpoints in a folder and reads their facts; without torch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyruntime.llama.config import LlamaConfig
from pyruntime.train import manifest
from pyruntime.train.config import Checkpoint
from pyruntime.train.errors import ConfigError

FOLDER, FACTS_FILE = "checkpoints", "run.json"
FORMAT, OLD_FORMATS = 3, (1, 2)
"""Format of new checkpoints, in FACTS_FILE. Old ones hold pickles; those of format 1 do not name it."""
PARTIAL = ".partial"
"""Suffix of a folder that is being written."""
STEP_NAME = re.compile(r"step-[0-9]+")
"""The name of a checkpoint's folder."""
AUTO = "auto"
"""The value of `checkpoint.resume` for the newest checkpoint of the run folder, if it has one."""


@dataclasses.dataclass(frozen=True)
class CheckpointFacts:
    """The facts that a checkpoint records about its run."""

    step: int
    """Steps taken."""
    dtype: str
    """Type of the parameters: "bf16" or "fp32"."""
    model: dict
    """The model's shape, as in a Hugging Face config.json."""
    optimizer: str = "adamw"
    """Name of the optimizer."""
    rounding: str = "nearest"
    """Rounding of bf16 weights; with "stochastic" there are no fp32 master weights."""
    skipped: int = 0
    """Steps that updated nothing."""
    in_a_row: int = 0
    """Skipped steps since the last step that counted."""
    samples: int = 0
    """Sequences of the data taken so far; the next step continues there."""
    norms: Sequence[float] = ()
    """Gradient norms that the next step is compared with, if the run looks for spikes."""
    method: str = "every_step"
    """The method by which replicas synchronize and, if not in every step, their number."""
    deal: Sequence[int] = ()
    """If replicas join and leave: the lowest block of sequences never dealt, then the dealt blocks that had
    not counted."""
    compression: str = ""
    """The compression of gradients or displacements, and the ranks it was over, each of which saved its
    residuals; empty: none."""
    adapters: str = ""
    """If only low-rank adapters were trained and saved: their settings, and the weights they belong to.
    Empty: all weights were."""
    layers: Sequence[int] = ()
    """Layers of each stage of the resumed pipeline, if layers have moved; else empty."""
    micro_batches: Sequence[int] = ()
    """Micro-batches of each data-parallel rank of the resumed run, if they have moved; else empty."""
    tp_parts: Sequence[int] = ()
    """Part of each tensor-parallel rank of the resumed run, in thousandths of an equal one, if they have
    moved; else empty."""
    saved_at: float = 0.0
    """Time of saving, in seconds since 1970."""
    val_loss: float | None = None
    """Validation loss after this step, in nats per target; None if it was not measured or is not finite."""
    lowest_loss: float | None = None
    """The lowest validation loss so far; None if there is none."""
    since_lowest: int = 0
    """Validations since then."""


def complete(folder: Path) -> list[Path]:
    """Returns the checkpoints of `folder`, by step. A folder gets such a name only when it is complete, so
    one that lacks a file is damaged; it is not left out."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def name_of(step: int) -> str:
    """Returns the folder name of step `step`."""
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's folder name."""
    return int(checkpoint.name.removeprefix("step-"))


def left_over(folder: Path, saved: int, keep: Checkpoint) -> list[Path]:
    """Returns the checkpoints to delete once step `saved` is saved. Those of later steps go, even damaged
    ones: they belong to an abandoned branch of the run, and would stay the newest. Of the others the newest
    `keep.keep` stay, and those that `keep.keep_every_h` keeps: the oldest, and each that is so many hours
    younger than the last one kept. With `keep.keep_best` so does the best. A checkpoint without FACTS_FILE
    stays and does not count."""
    past = [path for path in complete(folder) if step_of(path) > saved]
    found = [path for path in complete(folder) if (path / FACTS_FILE).is_file()]
    found = [path for path in found if path not in past]
    older = found[: max(len(found) - keep.keep, 0)]
    last = -math.inf
    for path in [*older] if keep.keep_every_h else []:
        if (at := _number(path, "saved_at", -math.inf)) >= last + 3600 * keep.keep_every_h:
            last = at
            older.remove(path)
    if keep.keep_best and found:
        best = _by_loss(found, _number(found[-1], "lowest_loss", -math.inf))[:1]
        older = [path for path in older if path not in dict(best)]
    return past + older


def by_loss(run_dir: Path, lowest: float) -> list[tuple[Path, float]]:
    """Returns the complete checkpoints of that run with a validation loss, and that: the lowest first, and of
    equal ones the earliest. lowest: the lowest loss of the run so far; a checkpoint with a lower one belongs
    to a branch that was abandoned by a resume from before it, and is left out."""
    return _by_loss(complete(run_dir / FOLDER), lowest)


def _by_loss(checkpoints: Sequence[Path], lowest: float) -> list[tuple[Path, float]]:
    losses = [(path, _number(path, "val_loss", math.inf)) for path in checkpoints]
    return sorted([each for each in losses if lowest <= each[1] < math.inf], key=lambda each: each[1])


def _number(checkpoint: Path, name: str, default: float) -> float:
    """Returns that number of FACTS_FILE; `default` if it is not recorded there."""
    content = _content(checkpoint)
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, float) else default


def newest(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint of that run; None if it has none."""
    return next(reversed(complete(run_dir / FOLDER)), None)


def to_go_on_with(run_dir: Path, wanted: CheckpointFacts) -> tuple[list[Path], str]:
    """Returns the run's checkpoints with readable facts, newest first, and why the newest is not among them
    (empty if it is). Raises DamagedError if all are unreadable, ConfigError if one has another model or
    dtype."""
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
    """Returns the checkpoint that `checkpoint.resume` names: that folder, or the newest in a run folder."""
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
    """Returns the facts of `checkpoint`. Raises DamagedError if they are damaged, ConfigError if model or
    dtype is not as `wanted`; the wanted step is ignored."""
    facts = read(checkpoint)
    found, asked = (
        _spelled_out(each.model)
        | {
            "train.dtype": each.dtype,
            "optimizer.name": each.optimizer,
            "optimizer.rounding": each.rounding,
            "data_parallel.method": each.method,
            "adapters": each.adapters or "none",
        }
        for each in (facts, wanted)
    )
    for name, value in asked.items():
        if found.get(name) != value:
            raise ConfigError(
                f"checkpoint.resume: {checkpoint} was saved with {name}={found.get(name)}, but the "
                f"configuration asks for {name}={value}; resume with what was saved, or start a new run."
            )
    return facts


def _spelled_out(model: dict) -> dict:
    """Returns the facts of a model with defaults for fields that are newer than the checkpoint."""
    try:
        return dataclasses.asdict(LlamaConfig.from_dict(model))
    except (TypeError, ValueError):  # not the wanted model, whatever it is
        return model


def why_residuals_are_left(checkpoint: Path, wanted: CheckpointFacts) -> str:
    """Says why compression residuals are not loaded from `checkpoint`; empty if they are, or if neither run
    compresses."""
    found = read(checkpoint).compression
    if found == wanted.compression:
        return ""
    return (
        f"{checkpoint} was saved with compression by {found or 'nothing'}, and this run compresses by "
        f"{wanted.compression or 'nothing'}: the saved compression errors are not loaded"
    )


def to_json(facts: CheckpointFacts) -> str:
    """Returns the content of FACTS_FILE."""
    return json.dumps(dataclasses.asdict(facts) | {"format": FORMAT}, indent=2) + "\n"


def _content(checkpoint: Path) -> Any:
    """Returns the content of FACTS_FILE; None if it cannot be read."""
    try:
        return json.loads((checkpoint / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read(checkpoint: Path) -> CheckpointFacts:
    """Returns the facts of `checkpoint`. Raises DamagedError if they are damaged, ConfigError for an older
    format."""
    if (checkpoint / manifest.MANIFEST).exists():
        manifest.check(checkpoint, FACTS_FILE, manifest.read(checkpoint))
    content = _content(checkpoint)
    if isinstance(content, dict) and content.get("format", 1) in OLD_FORMATS:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} was saved by an older version, in pickles, which are not "
            "loaded; go on with that version, or start a new run with --model.init_from and the old run's "
            "model folder."
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
        work = [*facts.layers, *facts.micro_batches, *facts.tp_parts]
        whole = whole and all(type(count) is int and count >= 1 for count in work)
        whole = whole and all(isinstance(norm, float) and math.isfinite(norm) for norm in facts.norms)
        whole = whole and isinstance(facts.dtype, str) and isinstance(facts.compression, str)
        whole = whole and isinstance(facts.adapters, str)
        whole = whole and isinstance(facts.saved_at, float)
        whole = whole and all(
            loss is None or (isinstance(loss, float) and math.isfinite(loss))
            for loss in (facts.val_loss, facts.lowest_loss)
        )
        whole = whole and type(facts.since_lowest) is int and facts.since_lowest >= 0
    except (ValueError, TypeError, AttributeError, KeyError):
        whole = False
    if not whole:
        raise manifest.refusal(checkpoint, FACTS_FILE, "it does not say what was saved")
    if STEP_NAME.fullmatch(checkpoint.name) and step_of(checkpoint) != facts.step:
        finding = f"it is of step {facts.step}, and the folder has another name"
        raise manifest.refusal(checkpoint, FACTS_FILE, finding)
    return facts
