"""Runs forward passes only to compare their outputs, without side effects, and compares outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyruntime import ops
from pyruntime.comm.core import _C
from pyruntime.comm.devices import accelerator
from pyruntime.nn.cut import as_plain
from pyruntime.nn.parameters import TensorGroup

Layer = TypeVar("Layer", bound=nn.Module)

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""{dtype: the largest allowed difference, as a share of a tensor's norm}."""

_ARGUMENTS = 16  # how many arguments of a call ranks compare


def tensors_of(output: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (" name", tensor) of an output: a tensor, or a tuple, mapping or dataclass of tensors."""
    if isinstance(output, Tensor):
        yield "", output
        return
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, tuple | list):
        items = list(enumerate(output))
    elif dataclasses.is_dataclass(output):
        items = [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    else:
        return
    yield from ((f" {name}", value) for name, value in items if isinstance(value, Tensor))


def differs(mine: Tensor, whole: Tensor) -> bool:
    """Whether two tensors of one shape differ by more than rounding."""
    if not whole.is_floating_point():
        return not torch.equal(mine, whole)
    a, b = (torch.nan_to_num(each.double(), 0.0, 0.0, 0.0) for each in (mine, whole))
    return (a - b).norm().item() > TOLERANCES.get(whole.dtype, 1e-3) * b.norm().item()


def asked(model: nn.Module, getter: str) -> Any:
    """Calls a method of the model, such as "get_input_embeddings"; None where the model has none."""
    given = getattr(model, getter, None)
    try:
        return given() if callable(given) else None
    except NotImplementedError:  # transformers raises it for a model without one
        return None


def first_difference(expected: Any, found: Any) -> tuple[str, Tensor, Tensor | None] | None:
    """Returns (" name", tensor, its counterpart in `found`) of the first tensor of an output that differs."""
    ours = dict(tensors_of(found))
    for name, whole in tensors_of(expected):
        mine = ours.get(name)
        if mine is None or mine.shape != whole.shape or differs(mine.detach(), whole):
            return name, whole, mine
    return None


def check_same_arguments(
    group: TensorGroup, device: torch.device, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Raises ValueError, the same on every rank, where a tensor argument of a call differs between ranks of
    the group: in name, shape or dtype, or in its numbers by more than rounding. Ranks with different batches
    would compute a result that is right for none of them.

    Ranks exchange three numbers for each of the first 16 tensors, on `device`."""
    given = [*tensors_of(args), *sorted(tensors_of(dict(kwargs)))]
    kinds = (Tensor, nn.Parameter)  # reading a subclass may communicate
    dense = [
        (name, t)
        for name, t in given
        if type(t) in kinds and t.layout is torch.strided and not t.is_complex()
    ]
    mine = torch.zeros(1, _ARGUMENTS, 3, dtype=torch.float64, device="cpu")
    allowed, names = torch.zeros(_ARGUMENTS, dtype=torch.float64, device="cpu"), [""] * _ARGUMENTS
    for i, (name, tensor) in enumerate(dense[:_ARGUMENTS]):
        names[i] = f"argument{name}" if name.strip().isdigit() else name.strip()
        mine[0, i] = torch.tensor(_fingerprint(name, tensor), dtype=torch.float64)
        allowed[i] = TOLERANCES.get(tensor.dtype, 1e-9)
    everyone = mine.to(device)
    for axis in reversed(group.axes):
        everyone = ops.all_gather_stats(everyone, axis.name).flatten(0, 1)
    form, norm, projected = everyone.cpu().unbind(-1)
    other = form != form[0]
    if not other.any():  # all ranks have the same dtypes, so `allowed` is the same
        other = ((norm - norm[0]).abs() > allowed * norm[0]) | ((projected - projected[0]).abs() > allowed)
    if other.any():
        rank, i = other.nonzero()[0].tolist()
        jobs = torch.full((1,), float(dist.get_rank()), dtype=torch.float64, device=device)
        for axis in reversed(group.axes):
            jobs = ops.all_gather_stats(jobs, axis.name).flatten(0, 1)
        one, first = (_C.name_of_rank(int(jobs[at])) for at in (rank, 0))
        raise ValueError(
            f"The ranks are given different batches: {names[i] or 'an argument'} of {one} is not that of "
            f"{first}. Ranks of a tensor-parallel group compute one batch together: give all of them the "
            "same batch, with the same seed and without a DistributedSampler over them."
        )


def _fingerprint(name: str, tensor: Tensor) -> tuple[float, float, float]:
    """Returns (a number for name, shape and dtype; the norm; the projection on a random direction)."""
    form = zlib.crc32(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
    values = torch.nan_to_num(tensor.detach().double().flatten(), 0.0, 0.0, 0.0)
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(len(values), generator=draw, dtype=torch.float64, device="cpu").to(values.device)
    norm = values.norm().item()
    return float(form), norm, (values @ direction).item() / max(norm, 1e-300)


def copied(arguments: Any) -> Any:
    """Copies arguments, because a call may write into them (caches)."""
    return copy.deepcopy(torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach(), arguments))


@contextlib.contextmanager
def forwards(layers: Sequence[Layer], of: Callable[[Layer], Callable]) -> Iterator[None]:
    """Replaces each layer's forward by `of(layer)` inside the context."""
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = of(layer)
    try:
        yield
    finally:
        for layer, own in before:
            del layer.__dict__["forward"]
            if own is not None:  # another tool's wrapper
                layer.__dict__["forward"] = own


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[NoDropout]:
    """A context without gradients and dropout, with cut weights as plain shards. Buffers and random states
    are restored at its end."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    kind = accelerator() or "cuda"
    devices = {b.device for b in (*module.parameters(), *module.buffers()) if b.device.type == kind}
    drawn = torch.random.fork_rng(list(devices), device_type=kind)
    state = random.getstate()
    with torch.no_grad(), as_plain(), drawn, NoDropout() as mode:
        torch.manual_seed(0)
        random.seed(0)
        try:
            yield mode
        finally:
            random.setstate(state)
            for buffer, value in buffers:
                buffer.copy_(value)


class NoDropout(TorchDispatchMode):
    """Turns dropout off, because masks of a rank's heads are no part of the whole model's masks. has_drawn:
    whether an operator drew random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        aten = torch.ops.aten
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.has_drawn = True
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is aten.bernoulli_.float:  # dropout divides by the same number afterwards
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
