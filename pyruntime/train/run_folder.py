"""Chooses and prepares the folder of a run, and finds the checkpoint that it resumes from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from pathlib import Path

import torch.distributed as dist

from pyruntime import comm
from pyruntime.llama import origin
from pyruntime.overlap.files import forget
from pyruntime.train import checkpoint_folder, config_file, metrics
from pyruntime.train.config import RunConfig
from pyruntime.train.data.chat_template import TEMPLATE_FILE
from pyruntime.train.disk import in_use
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import ResolvedRun

LIFE = "run"
"""The key under which a job keeps its `Life` for the job that its launcher starts in its place."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A job that ended and that the launcher replaced by this one."""

    run_dir: str
    began: float
    """When the first of these jobs made the folder, in seconds since 1970."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The state that a run starts from."""

    before: Life | None
    """The job that this one replaces, if any."""
    saved: list[Path]
    """Checkpoints; the run takes the first complete one. Those that this job saved earlier, else the
    requested ones. Empty: the run starts anew."""
    left_out: str
    """Why the newest checkpoint is not among them; empty if it is."""
    not_with_it: str
    """Missing files, if the first checkpoint was copied out of its run's folder; else empty."""

    @property
    def start_at(self) -> Path | None:
        return self.saved[0] if self.saved else None


def beginning_of(run: ResolvedRun) -> Beginning:
    """Returns what the run resumes from. Raises ConfigError if that has another model or dtype."""
    before = life_before()
    saved, left_out = _checkpoints(run, before)
    return Beginning(before, saved, left_out, origin.why_without(saved[0]) if saved else "")


def _checkpoints(run: ResolvedRun, before: Life | None) -> tuple[list[Path], str]:
    """Returns the checkpoints that the run may resume from, and why the newest is not among them."""
    resume = run.config.checkpoint.resume
    if before is not None:
        found, left_out = checkpoint_folder.to_go_on_with(Path(before.run_dir), run.facts)
        # Older ones belong to a run that this job may have resumed at an earlier step.
        if own := [path for path in found if checkpoint_folder.read(path).saved_at >= before.began]:
            return own, left_out
    if resume == checkpoint_folder.AUTO:
        return checkpoint_folder.to_go_on_with(Path(run.config.output.run_dir), run.facts)
    if not resume:
        return [], ""
    folder = checkpoint_folder.find(Path(resume))
    checkpoint_folder.read_matching(folder, run.facts)
    return [folder], ""


def life_before() -> Life | None:
    kept = comm.kept(LIFE)
    return Life(**json.loads(kept)) if kept else None


def make(
    config: RunConfig,
    name: str,
    start_at: Path | None,
    held: contextlib.ExitStack,
    before: Life | None = None,
) -> Path:
    """Makes the run folder on rank 0, writes the files that a run begins with, and returns it. Locks it
    against other runs until `held` is closed. Raises ConfigError if the folder cannot be made or used."""
    try:
        run_dir = _chosen(config, name, start_at, before)
        _check_holds_files(run_dir)
        in_use(run_dir, held, "output.run_dir")
        if (run_dir / metrics.FILE_NAME).exists():
            metrics.read(run_dir / metrics.FILE_NAME)  # raises here, on all ranks, if it is damaged
        if config.train.ledger:
            forget(run_dir)
        (run_dir / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
        came = run_dir / origin.FOLDER  # another run's files must not end up beside this run's model
        if (config.model.init_from or not start_at) and came.exists():
            shutil.rmtree(came)
        if config.model.init_from:
            origin.keep(Path(config.model.init_from), run_dir / origin.FOLDER)
        elif start_at and not came.exists() and origin.of_checkpoint(start_at).is_dir():
            origin.keep(origin.of_checkpoint(start_at), came)
        template, kept = config.data.chat_template, run_dir / TEMPLATE_FILE
        if template and Path(template).resolve() != kept.resolve():
            shutil.copyfile(template, kept)
        if not before:
            comm.keep(LIFE, json.dumps(dataclasses.asdict(Life(str(run_dir), time.time()))))
    except OSError as error:
        raise ConfigError(f"output.run_dir: {error.filename} cannot be written: {error.strerror}.") from error
    return run_dir


def _check_holds_files(run_dir: Path) -> None:
    """Raises ConfigError if the folder holds a pipe or the like, which would block for ever."""
    for path in run_dir.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                f"output.run_dir: {path} is neither a file nor a folder; remove it, or name another folder."
            )


def _chosen(config: RunConfig, name: str, start_at: Path | None, before: Life | None) -> Path:
    """Makes and returns the folder: that of the job this one replaces, the requested one, that of the
    checkpoint, or the first free runs/<name>-<n>."""
    if not (before or config.output.run_dir):
        return start_at.parent.parent if start_at else first_free(Path("runs"), name)
    run_dir = Path(before.run_dir if before else config.output.run_dir)
    if not before:
        same = start_at is not None and start_at.resolve().is_relative_to(run_dir.resolve())
        again = config.checkpoint.resume == checkpoint_folder.AUTO
        # A replica that is started again before it has saved anything takes its state from the others.
        of_a_run = not config.data_parallel.members and (run_dir / metrics.FILE_NAME).exists()
        newest = checkpoint_folder.newest(run_dir)
        saved = newest is not None and (newest / checkpoint_folder.FACTS_FILE).is_file()
        if (of_a_run or saved) and not same and not again:
            how = checkpoint_folder.AUTO if config.data_parallel.members else run_dir
            raise ConfigError(
                f"output.run_dir: {run_dir} holds a run already; name another folder, or go on with it by "
                f"--checkpoint.resume {how}."
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def first_free(parent: Path, name: str) -> Path:
    """Makes the folder `name`-n with the lowest free n."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run_dir = parent / f"{name}-{number}"
        try:
            run_dir.mkdir()
            return run_dir
        except FileExistsError:
            number += 1


def check_seen(run_dir: Path, ranks: dist.ProcessGroup) -> None:
    """Raises ConfigError on a rank that does not see the folder that rank 0 made."""
    if not run_dir.is_dir():
        own, maker = comm.rank_name(ranks, ranks.rank()), comm.rank_name(ranks, 0)
        raise ConfigError(
            f"output.run_dir: {own} does not see {run_dir}, which {maker} has made; all hosts need one run "
            "folder: name one on shared storage."
        )
