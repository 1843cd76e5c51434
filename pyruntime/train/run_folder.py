"""The folder of a run: which one it is, what it is begun with, and which checkpoint the run goes on with."""

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
from pyruntime.train.disk import in_use
from pyruntime.train.errors import ConfigError
from pyruntime.train.resolved import ResolvedRun

LIFE = "run"
"""The key under which a job keeps its `Life` for the job that its launcher starts in its place."""


@dataclasses.dataclass(frozen=True)
class Life:
    """A job that its launcher has ended since, to start this one in its place."""

    run_dir: str
    began: float
    """When the first of them made that folder, in seconds since 1970."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a run goes on with."""

    before: Life | None
    """The job in whose place this one was started, if any."""
    saved: list[Path]
    """Checkpoints, of which the run takes the first that is whole: those that this job has saved, else those
    that were asked for. Empty: the run starts anew."""
    left_out: str
    """Why the newest checkpoint is none of them; empty where it is."""
    not_with_it: str
    """What is missing where the first checkpoint was copied out of the folder of its run; else empty."""

    @property
    def start_at(self) -> Path | None:
        return self.saved[0] if self.saved else None


def beginning_of(run: ResolvedRun) -> Beginning:
    """Raises ConfigError where the checkpoint that is asked for is of another model or dtype."""
    before = life_before()
    saved, left_out = _checkpoints(run, before)
    return Beginning(before, saved, left_out, origin.why_without(saved[0]) if saved else "")


def _checkpoints(run: ResolvedRun, before: Life | None) -> tuple[list[Path], str]:
    """The checkpoints that the run may go on with, and why the newest is none of them."""
    resume = run.config.checkpoint.resume
    if before is not None:
        found, left_out = checkpoint_folder.to_go_on_with(Path(before.run_dir), run.facts)
        # Older ones are of a run that this job may have left at an earlier step.
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
    """Rank 0 makes the run folder and writes into it what a run begins with. No other run may use the folder
    before `held` is closed. Raises ConfigError where the folder cannot be made or used."""
    try:
        run_dir = _chosen(config, name, start_at, before)
        _check_holds_files(run_dir)
        in_use(run_dir, held, "output.run_dir")
        if (run_dir / metrics.FILE_NAME).exists():
            metrics.read(run_dir / metrics.FILE_NAME)  # the run goes on with it: all ranks hear of damage
        if config.train.ledger:
            forget(run_dir)
        (run_dir / "config.toml").write_text(config_file.to_toml(config), encoding="utf-8")
        came = run_dir / origin.FOLDER  # of another run, it would be given to this one's model
        if (config.model.init_from or not start_at) and came.exists():
            shutil.rmtree(came)
        if config.model.init_from:
            origin.keep(Path(config.model.init_from), run_dir / origin.FOLDER)
        elif start_at and not came.exists() and origin.of_checkpoint(start_at).is_dir():
            origin.keep(origin.of_checkpoint(start_at), came)
        if not before:
            comm.keep(LIFE, json.dumps(dataclasses.asdict(Life(str(run_dir), time.time()))))
    except OSError as error:
        raise ConfigError(f"output.run_dir: {error.filename} cannot be written: {error.strerror}.") from error
    return run_dir


def _check_holds_files(run_dir: Path) -> None:
    """Raises ConfigError where there is a pipe or the like, whose reader or writer would wait for ever."""
    for path in run_dir.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                f"output.run_dir: {path} is neither a file nor a folder; remove it, or name another folder."
            )


def _chosen(config: RunConfig, name: str, start_at: Path | None, before: Life | None) -> Path:
    """Returns the folder of the job in whose place this one was started, the one that was asked for, that of
    the checkpoint, or the first free runs/<name>-<n>. The folder exists afterwards."""
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
                f"output.run_dir: {run_dir} holds a run already; name another folder, or go on with it "
                f"through --checkpoint.resume {how}."
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def first_free(parent: Path, name: str) -> Path:
    """Makes the folder `name`-n of the lowest n that there is none of."""
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
    """Raises ConfigError on a rank that does not see the folder that rank 0 has made."""
    if not run_dir.is_dir():
        own, maker = comm.rank_name(ranks, ranks.rank()), comm.rank_name(ranks, 0)
        raise ConfigError(
            f"output.run_dir: {own} does not see {run_dir}, which {maker} has made; all hosts need one run "
            "folder: name one on shared storage."
        )
