"""Loads the checkpoints that a run is resumed from. `saving` writes them.

RUN_DIR/checkpoints/step-000300/ holds weights, optimizer state and step. It fits any number of ranks on every
axis and any stage, because every tensor in it is a DTensor: torch.distributed.checkpoint finds which block of
which file a rank reads. A folder appears under its name only once it is complete, and a manifest in it lists
its files. Of the data it stores the sequences taken, and the blocks dealt to replicas that join and leave
(`CheckpointFacts`). Learning rate and random numbers follow from step and configuration.

Loading cannot run code: run.json, the manifest and the headers of the safetensors are JSON, the rest are
numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from pyruntime.comm import CommError, rank_name
from pyruntime.comm.exchange import barrier, gather
from pyruntime.data_parallel import Sharded
from pyruntime.nn import SigmoidRouter
from pyruntime.replicas.fragment import Fragment
from pyruntime.replicas.sharded_outer import ShardedOuter
from pyruntime.train import manifest
from pyruntime.train.checkpoint_folder import CheckpointFacts, read, read_matching
from pyruntime.train.errors import ConfigError, refusing
from pyruntime.train.manifest import DamagedError
from pyruntime.train.ranks import on_every_rank
from pyruntime.train.saving.storage import Reader


def state_of(sharded: Sharded, with_residuals: bool = True) -> dict:
    """Returns the state of one replica that a checkpoint holds, on the storage of weights and optimizer
    state: saving reads it, loading writes into it. Names are the same at every stage and number of ranks,
    except for compression residuals, which belong to one rank."""
    assert sharded.optimizer is not None
    optimizer = sharded.optimizer.state_dict()
    # The run's step stands for the step of every parameter.
    optimizer = {key: value for key, value in optimizer.items() if not key.startswith("steps.")}
    biases = {
        f"{name}.bias": module.bias
        for name, module in sharded.model.named_modules()
        if isinstance(module, SigmoidRouter)
    }
    state = {"model": {**sharded.state_dict(), **biases}, "optimizer": optimizer}
    if sharded.compressor is not None and with_residuals:
        state["compression"] = sharded.compressor.state_dict()
    return state


def state_of_all(
    sharded: Sharded, outer: ShardedOuter, local: dict[str, Tensor], with_residuals: bool = True
) -> dict:
    """Returns the same for replicas that synchronize rarely, each under its own name, and their shared state.
    local: the outer optimizer's own state."""
    own = state_of(sharded) | {"first_steps": local["first_steps"]}
    lost = {f"{dist.get_rank()}.{name}": local[name] for name in local if name.startswith("lost.")}
    if lost and with_residuals:
        own["compression"] = lost
    return {outer.own_name: own, "outer": outer.states_of(local)}


def load(
    checkpoint: Path,
    facts: CheckpointFacts,
    sharded: Sharded,
    group: dist.ProcessGroup,
    outer: ShardedOuter | None = None,
) -> CheckpointFacts:
    """Loads weights and optimizer state in place, at any number of ranks of a replica, and returns the facts
    of the checkpoint, whose step the run continues after.

    `facts` describe the model. Raises, on every rank and before anything changes, ConfigError if the
    checkpoint is of another model, and DamagedError if a file is not what was saved.
    """
    found = check_files(checkpoint, group, facts)
    doing = f"Loading the checkpoint {checkpoint}"
    local = {} if outer is None else outer.state_dict()
    with_residuals = found.compression == facts.compression
    if outer is None:
        state = state_of(sharded, with_residuals=with_residuals)
    else:
        _check_fragments(checkpoint, outer, group, doing)
        state = state_of_all(sharded, outer, local, with_residuals)
    assert sharded.optimizer is not None
    _load(checkpoint, state, group, doing, sharded.optimizer.home.release)
    sharded.loaded()
    sharded.optimizer.resume(found.step - found.skipped)
    if outer is not None:
        with refusing("checkpoint.resume: "):
            outer.load_state_dict(local)
    return found


def _check_fragments(checkpoint: Path, outer: ShardedOuter, group: dist.ProcessGroup, doing: str) -> None:
    """Raises ConfigError if the checkpoint has another number of fragments."""
    with _refused(checkpoint):
        held = Reader(checkpoint, manifest.read(checkpoint)).read_metadata()
        found = (held.state_dict_metadata["outer.progress"].size[0] - 1) // Fragment.NUMBERS
    if found != outer.method.fragments:
        raise ConfigError(
            f"checkpoint.resume: {checkpoint} was saved with data_parallel.fragments={found}, but the "
            f"configuration asks for data_parallel.fragments={outer.method.fragments}."
        )


def load_weights(checkpoint: Path, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Loads only the weights, in place, at any number of ranks; those that do not train are not saved, and
    stay. Raises ConfigError if they are of another model. Does not check the files for damage
    (`check_files`)."""
    frozen = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(not each.requires_grad for each in module.parameters(recurse=False))
    )
    names = dict(model.named_parameters(remove_duplicate=False)).keys()
    again = names - dict(model.named_parameters()).keys()  # a shared weight is saved once
    weights = {
        name: value
        for name, value in model.state_dict().items()
        if name not in again and not name.startswith(frozen)
    }
    _load(checkpoint, {"model": weights}, group, f"Loading the weights of {checkpoint}")


def _load(
    checkpoint: Path,
    state: dict,
    group: dist.ProcessGroup,
    doing: str,
    release: Callable[[], None] = lambda: None,
) -> None:
    reader, planner = Reader(checkpoint, manifest.read(checkpoint), release), DefaultLoadPlanner()

    def plan() -> LoadPlan:
        with _refused(checkpoint):
            planner.set_up_planner(state, reader.read_metadata())
            return planner.finish_plan(planner.create_local_plan())

    def read_blocks() -> None:
        with _refused(checkpoint):
            reader.read_data(found, planner)

    # Each rank plans for itself: torch's own loading exchanges these equal plans as pickles.
    found = on_every_rank(group, doing, plan)
    on_every_rank(group, doing, read_blocks)


@contextlib.contextmanager
def _refused(checkpoint: Path) -> Iterator[None]:
    """Raises ConfigError for files that match their manifest but hold another program's checkpoint."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        cause = f"{type(error).__name__}: {first}".rstrip(": ")
        raise ConfigError(f"checkpoint.resume: {checkpoint} is damaged or incomplete: {cause}.") from error


def check_files(
    checkpoint: Path, group: dist.ProcessGroup, wanted: CheckpointFacts | None = None
) -> CheckpointFacts:
    """Checks a checkpoint and returns its facts. In a shared folder one rank reads each file, else all do.
    Raises the same on every rank: DamagedError for a file that is not what was saved; ConfigError if model or
    dtype is not as `wanted`, the format is older, or hosts have different checkpoints."""
    doing = f"Checking the checkpoint {checkpoint}"
    finding = ""
    try:
        found = read(checkpoint) if wanted is None else read_matching(checkpoint, wanted)
        expected = manifest.read(checkpoint)
    except ConfigError as error:
        finding = ("damaged " if isinstance(error, DamagedError) else "refused ") + str(error)
    _raise_finding(barrier(group, doing, finding))
    is_shared = _compare_folders(checkpoint, group, doing)
    try:
        sizes = {name: each.size for name, each in expected.items()}
        mine = manifest.share(sizes, group.rank(), group.size()) if is_shared else sizes
        for name in sorted(mine):
            manifest.check(checkpoint, name, expected)
    except ConfigError as error:
        finding = ("damaged " if isinstance(error, DamagedError) else "refused ") + str(error)
    _raise_finding(barrier(group, doing, finding))
    return found


def _raise_finding(finding: str) -> None:
    for kind, raised in {"damaged ": DamagedError, "refused ": ConfigError}.items():
        if finding.startswith(kind):
            raise raised(finding.removeprefix(kind))


def _compare_folders(checkpoint: Path, group: dist.ProcessGroup, doing: str) -> bool:
    """Whether the ranks see one folder, not copies of it. Raises ConfigError on every rank if one sees
    another checkpoint."""
    content = hashlib.sha256((checkpoint / manifest.MANIFEST).read_bytes()).hexdigest()
    status = (checkpoint / manifest.MANIFEST).stat()
    place = f"{status.st_ino} {status.st_mtime_ns}"
    seen = gather(group, doing, [content, place], list[str])
    for rank, (theirs, _) in enumerate(seen):
        if theirs != seen[0][0]:
            first, other = rank_name(group.group_name, 0), rank_name(group.group_name, rank)
            raise ConfigError(
                f"checkpoint.resume: {checkpoint} is another checkpoint on {other} than on {first}; give all "
                "hosts one folder, or copies of one."
            )
    return len({place for _, place in seen}) == 1
