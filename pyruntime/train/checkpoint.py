"""Checkpoints that a run is taken up from: weights, optimizer and step, in torch.distributed.checkpoint's
format.

RUN_DIR/checkpoints/step-000300/ holds them for any number of ranks on either axis and any stage, because
every tensor in it is a DTensor. A folder appears under its name only once it is complete, and a manifest in
it says what its files are.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from pyruntime.data_parallel import Sharded, ShardedAdamW
from pyruntime.train import checksums
from pyruntime.train.checkpoint_folder import FACTS_FILE, FOLDER, Facts, complete, read_matching
from pyruntime.train.checksums import Checksum
from pyruntime.train.errors import ConfigError, TrainingError
from pyruntime.train.first_rank import on_first_rank
from pyruntime.train.optimizer import AdamW

Found = TypeVar("Found")


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
    """Writes the checkpoint of `facts.step` and removes all but the newest `keep`. Every rank of `group`
    calls this."""
    final = run_dir / FOLDER / f"step-{facts.step:06d}"
    partial = final.with_name(final.name + ".partial")

    def start() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / FACTS_FILE).write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")

    def finish() -> None:
        checksums.write(partial, sums)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        others = [folder for folder in complete(run_dir / FOLDER) if folder != final]
        for old in others[: len(others) - keep + 1]:
            shutil.rmtree(old)

    on_first_rank(group, start)
    try:
        dcp.save(checkpointed.state(), checkpoint_id=str(partial), process_group=group)
        sums = _checksums(partial, group)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        raise TrainingError(f"The checkpoint {final} cannot be written: {_first_cause(error)}.") from error
    on_first_rank(group, finish)
    return final


def load(checkpoint: Path, facts: Facts, checkpointed: Checkpointed, group: dist.ProcessGroup) -> int:
    """Loads weights and optimizer state in place, at any number of ranks, and returns the step to go on
    after.

    `facts` describe the model. Raises ConfigError where the checkpoint is another model's or is damaged,
    which is found before anything is changed.
    """
    step = read_matching(checkpoint, facts).step
    _check_files(checkpoint, group)
    try:
        dcp.load(checkpointed.state(), checkpoint_id=str(checkpoint), process_group=group)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        cause = _first_cause(error)
        raise ConfigError(f"checkpoint.resume: {checkpoint} is damaged or incomplete: {cause}.") from error
    checkpointed.loaded(step)
    return step


def load_weights(checkpoint: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Loads the weights alone, in place, at any number of ranks."""
    dcp.load({"model": _weights(model)}, checkpoint_id=str(checkpoint), process_group=group)


def _checksums(folder: Path, group: dist.ProcessGroup) -> dict[str, Checksum]:
    """Of all files in `folder`, each read by one rank."""
    sizes = on_first_rank(group, lambda: checksums.file_sizes(folder))
    mine = checksums.share(sizes, group.rank(), group.size())
    return _gather({name: checksums.checksum(folder / name) for name in mine}, group)


def _check_files(checkpoint: Path, group: dist.ProcessGroup) -> None:
    """Raises the same ConfigError on every rank where a file is not what was saved; each is read by one."""
    expected = on_first_rank(group, lambda: checksums.read(checkpoint))
    sizes = {name: each.size for name, each in expected.items()}
    mine = checksums.share(sizes, group.rank(), group.size())
    findings = _gather({name: checksums.finding_of(checkpoint, name, expected) for name in mine}, group)
    for name in sorted(findings):
        if findings[name]:
            raise checksums.refusal(checkpoint, name, findings[name])


def _gather(mine: dict[str, Found], group: dist.ProcessGroup) -> dict[str, Found]:
    """What all ranks of `group` have found."""
    if group.size() == 1:
        return mine
    found: list[dict[str, Found]] = [{}] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return {name: value for each in found for name, value in each.items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, in which a weight that two modules share stands once, under its first name."""
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    again = names - dict(model.named_parameters()).keys()
    return {name: value for name, value in model.state_dict().items() if name not in again}


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (exception, traceback)}
    if failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
