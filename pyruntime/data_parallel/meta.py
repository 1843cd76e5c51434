"""Shards a model that begins on meta, so that no rank ever holds all of it.

    with pyruntime.on_meta():
        model = AutoModelForCausalLM.from_config(config)
    handle = pyruntime.shard(model, mesh, stage=3)
    handle.load_pretrained(folder)                          # each rank reads its rows

Or the first rank has the model and sends it to the others, one parameter at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook

from pyruntime import comm
from pyruntime.comm.exchange import gather, named_failures
from pyruntime.data_parallel.axes import AxesOf
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.nn.cut import memory_of
from pyruntime.nn.rows import blocks_of, shape_of_rows
from pyruntime.nn.weight_files import find_tensors, listed, open_tensors

_Names: Any = tuple[list[str], list[str]]


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Builds modules with parameters on meta, without memory. Buffers, which constructors compute, are
    real."""

    def move(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # leaves it as it is
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def of_first_rank(model: nn.Module, stage: int, axes_of: AxesOf) -> list[str]:
    """Names the parameters that the first rank sends: on meta on some ranks, real on the first. Every rank
    calls it.

    Raises ValueError, on every rank, if a model on meta cannot be sharded this way, or if another rank has
    values that the first lacks."""
    axes = axes_of.main
    mesh = axes.shard.mesh if axes.shard.size > 1 else axes.replicate.mesh
    named = list(model.named_parameters())
    mine = [name for name, p in named if p.is_meta], [name for name, b in model.named_buffers() if b.is_meta]
    everyone = [mine]
    if mesh is not None:
        everyone = gather(comm.process_group(mesh), "Comparing what is on meta", mine, _Names)
    parameters = [set(names) for names, _ in everyone]
    if not any(parameters):
        return []
    if stage != 3 or axes.replicate.size > 1 or axes.shard.size == 1:
        raise ValueError(
            f"{listed(sorted(set.union(*parameters)))} are on meta, and a model begins there only at stage=3 "
            "over one axis of several ranks; use that, or model.to_empty(device=...) and load values first."
        )
    if len(axes_of.every) > 1:
        raise ValueError(
            f"{listed(sorted(set.union(*parameters)))} are on meta, and the model's experts lie over a group "
            "of their own, whose ranks load their weights themselves; call model.to_empty(device=...) and "
            "load values first."
        )
    if buffers := [name for _, names in everyone for name in names]:
        raise ValueError(
            f"The buffers {listed(buffers)} are on meta, which loses the values that constructors compute; "
            "build the model within pyruntime.on_meta(), which leaves buffers real."
        )
    sent = []
    for name, _ in named:
        lacking = [name in names for names in parameters]
        if lacking[0] and not all(lacking):
            name_of = partial(comm.rank_name, comm.group_name(mesh))
            first, other = name_of(0), name_of(lacking.index(False))
            raise ValueError(
                f"{name} is on meta on {first} and has values on {other}, but the first rank's are used; "
                "build the model there, or on meta on every rank."
            )
        if any(lacking) and not lacking[0]:
            sent.append(name)
    return sent


def take_memory(model: nn.Module, device: torch.device, bucket_bytes: int) -> None:
    """Replaces parameters on meta by real ones of unknown values. Matrices of `bucket_bytes` or more, which
    are going to be cut, get no memory. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                real = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if parameter.dim() >= 2 and parameter.nbytes >= bucket_bytes:
                    real.untyped_storage().resize_(0)
                made[id(parameter)] = nn.Parameter(real, parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


@torch.no_grad()
def take_from_first(weights: Sequence[BucketWeights], names: Sequence[str], mesh: DeviceMesh) -> None:
    """Broadcasts the named parameters from the first rank, one after the other. Each rank keeps its rows.
    Every rank calls it."""
    group = comm.process_group(mesh)
    for each in weights:
        for owner, parameter in enumerate(each.bucket.parameters):
            keys = [part.key for part in each.bucket.parts if part.owner == owner]
            if not set(keys) & set(names):
                continue
            is_here = parameter.numel() == 0 or parameter.untyped_storage().nbytes() > 0
            shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
            whole = memory_of(parameter) if is_here else torch.empty(shape, dtype=dtype, device=device)
            with named_failures(group, f"Sending {keys[0]} to the other ranks"):
                dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
            each.take_rows_of(owner, whole)


@torch.no_grad()
def read_rows(weights: Sequence[BucketWeights], folder: str | Path) -> None:
    """Reads this rank's rows, and nothing else, from the safetensors of a Hugging Face folder.

    Raises ValueError or OSError if the folder lacks a tensor or is damaged, or if a shape differs."""
    directory = Path(folder)
    files = find_tensors(directory)
    wanted: list[tuple[str, BucketWeights, int]] = []
    for each in weights:
        for place, part in enumerate(each.bucket.parts):
            wanted.append((part.key, each, place))
    if missing := [key for key, _, _ in wanted if key not in files]:
        raise ValueError(f"{directory} lacks {listed(missing)}, which the model has.")
    for path in dict.fromkeys(files[key] for key, _, _ in wanted):
        with open_tensors(path) as file:
            for key, each, place in wanted:
                if files[key] == path:
                    _read(key, file.get_slice(key), path, each, place)


def _read(key: str, stored: object, path: Path, each: BucketWeights, place: int) -> None:
    part, rows = each.bucket.parts[place], each.rows[place]
    shape = list(stored.get_shape())  # type: ignore[attr-defined]
    if shape != list(part.shape):
        raise ValueError(f"{key} in {path} has shape {shape}, but the model needs {list(part.shape)}.")
    for block in blocks_of(shape, each.axis.rank * part.share, len(rows)):
        found: Tensor = stored[block.place or slice(None)]  # type: ignore[index]
        rows[block.first : block.first + block.rows] = found.reshape(shape_of_rows(shape, block.rows))
