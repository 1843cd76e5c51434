"""Checkpoints that a run is taken up from: weights, optimizer and step, in torch.distributed.checkpoint's
format.

RUN_DIR/checkpoints/step-000300/ holds them for any number of ranks on either axis and any stage, because
every tensor in it is a DTensor. A folder appears under its name only once it is complete, and a manifest in
it says what its files are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from pyruntime.comm import CommError, named_failures
from pyruntime.data_parallel import Sharded, ShardedAdamW
from pyruntime.train import checksums
from pyruntime.train.checkpoint_folder import (
    FACTS_FILE,
    FOLDER,
    PARTIAL,
    Facts,
    is_unchecked,
    left_over,
    newest,
    read_matching,
    to_json,
)
from pyruntime.train.checksums import Checksum
from pyruntime.train.durable import cannot_write, publish_folder
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.first_rank import on_every_rank, on_first_rank
from pyruntime.train.optimizer import AdamW
from pyruntime.train.patient_storage import PatientReader, PatientWriter


@dataclasses.dataclass(frozen=True)
class Checkpointed:
    """What a checkpoint holds, as DTensors over the storage of weights and optimizer state: saving reads
    them, loading writes into them. The names are the same whether the model is sharded or not."""

    model: nn.Module
    optimizer: AdamW | ShardedAdamW
    sharded: Sharded | None

    def state(self) -> dict:
        model = _weights(self.model) if self.sharded is None else self.sharded.state_dict()
        optimizer = self.optimizer.state_dict()
        # A run's own step says it for all parameters.
        optimizer = {key: value for key, value in optimizer.items() if not key.startswith("steps.")}
        return {"model": model, "optimizer": optimizer}

    def loaded(self, step: int) -> None:
        """The state was loaded, of a run that had taken `step` steps."""
        if self.sharded is not None:
            self.sharded.loaded()
        if isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.resume(step)


def save(
    run_dir: Path, facts: Facts, checkpointed: Checkpointed, group: dist.ProcessGroup, keep: int
) -> Path:
    """Writes the checkpoint of `facts.step`, and removes those past it, which are of a branch of the run that
    was left, and all but the newest `keep` of the others. Every rank of `group` calls this. Raises
    TrainingError where it cannot be written, CommTimeout and PeerLost where a rank is stopped or ends
    meanwhile; what was there before stays."""
    final = run_dir / FOLDER / f"step-{facts.step:06d}"
    partial = final.with_name(final.name + PARTIAL)
    doing = f"Writing the checkpoint {final}"

    def start() -> None:
        for left in final.parent.glob(f"*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / FACTS_FILE).write_text(to_json(facts), encoding="utf-8")

    def finish() -> None:
        checksums.write(partial, sums)
        publish_folder(partial, final)
        for old in left_over(run_dir / FOLDER, facts.step, keep):
            shutil.rmtree(old)

    with _refusals(final, partial, run_dir):
        on_first_rank(group, doing, start)
        with named_failures(group, doing):
            writer = PatientWriter(partial, group, doing)
            dcp.save(checkpointed.state(), storage_writer=writer, process_group=group)
        sums = _checksums(partial, group, doing)
        on_first_rank(group, doing, finish)
    return final


def load(checkpoint: Path, facts: Facts, checkpointed: Checkpointed, group: dist.ProcessGroup) -> int:
    """Loads weights and optimizer state in place, at any number of ranks, and returns the step to go on
    after.

    `facts` describe the model. Raises ConfigError where the checkpoint is another model's or is damaged,
    which is found before anything is changed.
    """
    step = read_matching(checkpoint, facts).step
    _check_files(checkpoint, group)
    doing = f"Loading the checkpoint {checkpoint}"
    try:
        with named_failures(group, doing):
            reader = PatientReader(checkpoint, group, doing)
            dcp.load(checkpointed.state(), storage_reader=reader, process_group=group)
    except CommError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        if isinstance(_cause(error), CommError):
            raise _cause(error) from error
        cause = _first_cause(error)
        raise ConfigError(f"checkpoint.resume: {checkpoint} is damaged or incomplete: {cause}.") from error
    checkpointed.loaded(step)
    return step


@contextlib.contextmanager
def _refusals(final: Path, partial: Path, run_dir: Path) -> Iterator[None]:
    """What was being written is no checkpoint, so it takes no space where writing it failed."""
    try:
        yield
    except CommError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        if isinstance(_cause(error), CommError):
            raise _cause(error) from error
        shutil.rmtree(partial, ignore_errors=True)
        kept = newest(run_dir)
        saved = f"go on with --checkpoint.resume {run_dir}, which holds {kept.name}" if kept else ""
        so = saved or "nothing is saved"
        raise TrainingError("The checkpoint " + cannot_write(final, _cause(error), so)) from error


def load_weights(checkpoint: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Loads the weights alone, in place, at any number of ranks."""
    doing = f"Loading the weights of {checkpoint}"
    with named_failures(group, doing):
        reader = PatientReader(checkpoint, group, doing)
        dcp.load({"model": _weights(model)}, storage_reader=reader, process_group=group)


def _checksums(folder: Path, group: dist.ProcessGroup, doing: str) -> dict[str, Checksum]:
    """Of all files in `folder`, each read by one rank."""
    sizes = on_first_rank(group, doing, lambda: checksums.file_sizes(folder))
    mine = checksums.share(sizes, group.rank(), group.size())
    found = on_every_rank(group, doing, lambda: {name: checksums.checksum(folder / name) for name in mine})
    return _gather(found, group, doing)


def _check_files(checkpoint: Path, group: dist.ProcessGroup) -> None:
    """Raises the same ConfigError on every rank where a file is not what was saved; each is read by one."""
    doing = f"Checking the checkpoint {checkpoint}"
    expected = on_first_rank(
        group, doing, lambda: {} if is_unchecked(checkpoint) else checksums.read(checkpoint)
    )
    sizes = {name: each.size for name, each in expected.items()}
    mine = checksums.share(sizes, group.rank(), group.size())

    def check() -> None:
        for name in sorted(mine):
            checksums.check(checkpoint, name, expected)

    on_every_rank(group, doing, check)


def _gather(mine: dict[str, Checksum], group: dist.ProcessGroup, doing: str) -> dict[str, Checksum]:
    """What all ranks of `group` have found."""
    if group.size() == 1:
        return mine
    found: list[dict[str, Checksum]] = [{}] * group.size()
    with named_failures(group, doing):
        dist.all_gather_object(found, mine, group=group)
    return {name: value for each in found for name, value in each.items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, in which a weight that two modules share stands once, under its first name."""
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    again = names - dict(model.named_parameters()).keys()
    return {name: value for name, value in model.state_dict().items() if name not in again}


def _cause(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (exception, traceback)}
    return next(iter(failures.values()))[0] if failures else error


def _first_cause(error: BaseException) -> str:
    error = _cause(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
