"""Checkpoints that a run is resumed from: weights, optimizer and step, in torch.distributed.checkpoint's
format.

RUN_DIR/checkpoints/step-000300/ holds them for any number of ranks on either axis and any stage, because
every tensor in it is a DTensor. A folder appears under its name only once it is complete, and a manifest in
it says what its files are.

Ranks may read and write for as long as they live. torch.distributed.checkpoint ends its reading and its
writing with a collective, which the deadline bounds. So the ranks meet before it: a rank whose disk is slow
is waited for, and one that is stopped is not.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from pyruntime.comm import CommError, named_failures
from pyruntime.comm.exchange import barrier
from pyruntime.data_parallel import Sharded
from pyruntime.outer.fragment import Fragment
from pyruntime.outer.sharded import ShardedOuter
from pyruntime.overlap import Kind
from pyruntime.overlap.record import entered
from pyruntime.train import manifest
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
from pyruntime.train.disk import cannot_write, publish_folder
from pyruntime.train.errors import ConfigError, TrainingError, refusing
from pyruntime.train.manifest import Checksum
from pyruntime.train.ranks import gather, on_every_rank, on_rank_0


def state_of(sharded: Sharded, with_residuals: bool = True) -> dict:
    """What a checkpoint holds of one replica, over the storage of weights and optimizer state: saving reads
    it, loading writes into it. The names are the same at every stage and number of ranks, but for what
    compression has lost, which is each rank's own."""
    assert sharded.optimizer is not None
    optimizer = sharded.optimizer.state_dict()
    # A run's own step says it for all parameters.
    optimizer = {key: value for key, value in optimizer.items() if not key.startswith("steps.")}
    state = {"model": sharded.state_dict(), "optimizer": optimizer}
    if sharded.compressor is not None and with_residuals:
        state["compression"] = sharded.compressor.state_dict()
    return state


def _state_of_all(sharded: Sharded, outer: ShardedOuter, local: dict[str, Tensor]) -> dict:
    """The same of replicas that do not meet in every step, each under its own name; and what they share.
    local: the outer optimizer's own state."""
    own = state_of(sharded) | {"first_steps": local["first_steps"]}
    return {outer.own_name: own, "outer": outer.states_of(local)}


def save(
    run_dir: Path,
    facts: Facts,
    sharded: Sharded,
    group: dist.ProcessGroup,
    keep: int,
    outer: ShardedOuter | None = None,
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
        manifest.write(partial, sums)
        publish_folder(partial, final)
        for old in left_over(run_dir / FOLDER, facts.step, keep):
            shutil.rmtree(old)

    try:
        with _plain_failures():
            on_rank_0(group, doing, start)
            with named_failures(group, doing):
                writer = PatientWriter(partial, group, doing)
                if outer is None:
                    state = state_of(sharded)
                else:
                    state = _state_of_all(sharded, outer, outer.state_dict())
                    state["model"] = outer.weights()
                dcp.save(state, storage_writer=writer, process_group=group)
            sums = _checksums(partial, group, doing)
            on_rank_0(group, doing, finish)
    except CommError:
        raise
    except Exception as error:
        # What was being written is no checkpoint, so it takes no space where writing it failed.
        shutil.rmtree(partial, ignore_errors=True)
        kept = newest(run_dir)
        saved = f"go on with --checkpoint.resume {run_dir}, which holds {kept.name}" if kept else ""
        so = saved or "nothing is saved"
        raise TrainingError("The checkpoint " + cannot_write(final, error, so)) from error
    return final


def load(
    checkpoint: Path,
    facts: Facts,
    sharded: Sharded,
    group: dist.ProcessGroup,
    outer: ShardedOuter | None = None,
) -> Facts:
    """Loads weights and optimizer state in place, at any number of ranks of a replica, and returns what the
    checkpoint says of itself: the step to go on after.

    `facts` describe the model. Raises ConfigError where the checkpoint is another model's or is damaged,
    which is found before anything is changed.
    """
    found = read_matching(checkpoint, facts)
    _check_files(checkpoint, group)
    if outer is not None:
        _check_fragments(checkpoint, outer)
    doing = f"Loading the checkpoint {checkpoint}"
    try:
        with _plain_failures():
            local = {} if outer is None else outer.state_dict()
            if outer is None:
                state = state_of(sharded, with_residuals=found.compression == facts.compression)
            else:
                state = _state_of_all(sharded, outer, local)
            _load(checkpoint, state, group, doing)
    except CommError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        cause = f"{type(error).__name__}: {first}".rstrip(": ")
        raise ConfigError(f"checkpoint.resume: {checkpoint} is damaged or incomplete: {cause}.") from error
    sharded.loaded()
    assert sharded.optimizer is not None
    sharded.optimizer.resume(found.step - found.skipped)
    if outer is not None:
        with refusing("checkpoint.resume: "):
            outer.load_state_dict(local)
    return found


def _check_fragments(checkpoint: Path, outer: ShardedOuter) -> None:
    """Raises ConfigError where the model was cut into another number of parts that meet in turn."""
    try:
        progress = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata["outer.progress"]
        found = (progress.size[0] - 1) // Fragment.NUMBERS
    except Exception as error:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} is damaged or incomplete: it does not say how far its rounds "
            "are."
        ) from error
    if found != outer.method.fragments:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} was saved with data_parallel.fragments={found}, but the "
            f"configuration asks for data_parallel.fragments={outer.method.fragments}."
        )


def load_weights(checkpoint: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Loads the weights alone, in place, at any number of ranks."""
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    again = names - dict(model.named_parameters()).keys()  # a weight that two modules share stands once
    weights = {name: value for name, value in model.state_dict().items() if name not in again}
    _load(checkpoint, {"model": weights}, group, f"Loading the weights of {checkpoint}")


def _load(checkpoint: Path, state: dict, group: dist.ProcessGroup, doing: str) -> None:
    with named_failures(group, doing):
        reader = PatientReader(checkpoint, group, doing)
        dcp.load(state, storage_reader=reader, process_group=group)


@contextlib.contextmanager
def _plain_failures() -> Iterator[None]:
    """A rank's own exception in place of torch's, which is no Exception and holds those of all ranks."""
    try:
        yield
    except CheckpointException as error:  # .failures: {rank: (exception, traceback)}
        raise next(iter(error.failures.values()))[0] from error


def _checksums(folder: Path, group: dist.ProcessGroup, doing: str) -> dict[str, Checksum]:
    """Of all files in `folder`, each read by one rank."""
    sizes = on_rank_0(group, doing, lambda: manifest.file_sizes(folder))
    mine = manifest.share(sizes, group.rank(), group.size())
    found = on_every_rank(group, doing, lambda: {name: manifest.checksum(folder / name) for name in mine})
    return {name: value for each in gather(group, doing, found) for name, value in each.items()}


def _check_files(checkpoint: Path, group: dist.ProcessGroup) -> None:
    """Raises the same ConfigError on every rank where a file is not what was saved; each is read by one."""
    doing = f"Checking the checkpoint {checkpoint}"
    expected = on_rank_0(group, doing, lambda: {} if is_unchecked(checkpoint) else manifest.read(checkpoint))
    sizes = {name: each.size for name, each in expected.items()}
    mine = manifest.share(sizes, group.rank(), group.size())

    def check() -> None:
        for name in sorted(mine):
            manifest.check(checkpoint, name, expected)

    on_every_rank(group, doing, check)


def _moved(kind: Kind, name: str, begin: float, size: int) -> None:
    """Enters `size` bytes that went to the disk, or came from it, and that this thread did it."""
    entered(kind, "checkpoint", name, begin, size)
    entered(Kind.COPY, "checkpoint", name, begin)


class PatientWriter(FileSystemWriter):
    """Writes to `folder`; `doing` begins the sentence of an error."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, doing: str):
        super().__init__(str(folder))
        self._ranks, self._doing = group, doing

    def write_data(self, plan, planner):
        begin = time.monotonic()
        try:
            written = super().write_data(plan, planner)
            written.wait()
            _moved(Kind.SENT, "save", begin, sum(each.size_in_bytes for each in written.value()))
            return written
        finally:  # a rank that fails is no slower
            barrier(self._ranks, self._doing)


class PatientReader(FileSystemReader):
    """Reads from `folder`; `doing` begins the sentence of an error."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, doing: str):
        super().__init__(str(folder))
        self._ranks, self._doing = group, doing

    def read_data(self, plan, planner):
        begin = time.monotonic()
        try:
            read = super().read_data(plan, planner)
            read.wait()
            stored = (self.storage_data[item.storage_index] for item in plan.items)
            _moved(Kind.READ, "load", begin, sum(each.length for each in stored))
            return read
        finally:
            barrier(self._ranks, self._doing)
