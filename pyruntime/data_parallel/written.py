"""Finds writes into a sharded model by other code, and carries them over or refuses them.

Rows, master weights and the values that ranks send each other do not see a write into a parameter. So ranks
begin with rank 0's model, and `load_state_dict()` and `Sharded.writes()` carry writes over. Every other
write, and every change of what trains, is found when the next step begins, and refused."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pyruntime import comm
from pyruntime.comm.exchange import different, named_failures
from pyruntime.data_parallel.away import AwayWeight
from pyruntime.data_parallel.axes import Axes, AxesOf
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.nn.cut import memory_of


@torch.no_grad()
def begin_alike(model: nn.Module, axes_of: AxesOf, sent: Collection[str] = ()) -> None:
    """Gives all ranks the parameters and buffers of the first rank of their axes, except those in `sent`.
    Only tensors that differ travel.

    Raises ValueError, on every rank, if ranks have different names, shapes or dtypes."""
    named = [(name, tensor) for name, tensor in _tensors_of(model) if name not in sent]
    for axes in axes_of.every:
        _begin_alike(axes, {name: memory_of(each) for name, each in named if axes_of.of(each) == axes})


def _begin_alike(axes: Axes, tensors: dict[str, Tensor]) -> None:
    for mesh in dict.fromkeys((axes.shard.mesh, axes.replicate.mesh)):
        if mesh is None or comm.group_size(mesh) == 1:
            continue
        group = comm.process_group(mesh)
        for name, _ in different(tensors, group):
            whole = tensors[name].contiguous()
            with named_failures(group, "Giving the replicas one model"):
                dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
            tensors[name].copy_(whole)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


class Written:
    """Notices writes into the parameters of `buckets`, and changes of what trains in `model`. alone: there is
    one rank, whose rows are the parameters, so writes in place into those without a master are right."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], alone: bool):
        self._model, self._alone = model, alone
        self._trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._seen: list[tuple[str, nn.Parameter, tuple]] = []
        self._parameters = [(self._trainable[id(p)], p) for bucket in buckets for p in bucket.parameters]
        self._memory = [memory_of(parameter) for _, parameter in self._parameters]
        self._modules = list(model.modules())
        self._held = self._what_modules_hold()
        self.accept()

    def _what_modules_hold(self) -> list[nn.Parameter | nn.Module | None]:
        return [
            each
            for module in self._modules
            for held in (module._parameters, module._modules)
            for each in held.values()
        ]

    def accept(self) -> None:
        """Accepts the present values of the parameters as the optimizer's."""
        self._seen = [(name, p, _mark_of(p)) for name, p in self._parameters]

    @torch.no_grad()
    def restore(self) -> None:
        """Gives parameters that got other memory their own again, with the written values."""
        for (_, parameter), own in zip(self._parameters, self._memory, strict=True):
            given = memory_of(parameter)
            if given.dtype == own.dtype and given.untyped_storage()._cdata != own.untyped_storage()._cdata:
                own.copy_(given)
                parameter.data = own

    def check(self, counts: bool = False) -> None:
        """Raises RuntimeError if other code has written, or if something else would have to train. counts:
        writes in place are right here."""
        for name, parameter, mark in self._seen:
            if isinstance(parameter, AwayWeight):
                continue  # writes into it are refused
            found = _mark_of(parameter)
            in_place = counts or (self._alone and parameter.dtype.itemsize >= 4)
            if found == mark or (in_place and found[1:] == mark[1:]):
                continue
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was trainable when the model was sharded and is frozen now; {_ANEW}"
                )
            if parameter.dtype != mark[-1]:
                raise RuntimeError(
                    f"{name} was {mark[-1]} when the model was sharded and is {parameter.dtype} now; {_ANEW}"
                )
            raise RuntimeError(
                f"{name} was written since the last step by code other than the optimizer, so its rows and "
                "master weights lack the write; write within `with handle.writes():`, on every rank, or "
                "before shard(). load_state_dict() of the whole model does so by itself."
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the model was sharded and is trainable now; {_ANEW}"
                )
        held = self._what_modules_hold()
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            self._check_names()
            self._modules = list(self._model.modules())
            self._held = self._what_modules_hold()

    def _check_names(self) -> None:
        now = {id(p): name for name, p in self._model.named_parameters() if p.requires_grad}
        for key, name in now.items():
            if key not in self._trainable:
                raise RuntimeError(
                    f"{name} is new since the model was sharded, so nothing would train it; {_ANEW}"
                )
        for key, name in self._trainable.items():
            if key not in now:
                raise RuntimeError(
                    f"{name}, which shard() found, is no parameter of the model any more; {_ANEW}"
                )


class Handed:
    """A state dict that was given out, and whether other code, such as torch.distributed.checkpoint, has
    loaded into its tensors since."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._versions: list[int] = []

    def out(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives out `tensors`, in place of earlier ones."""
        self.tensors, self._versions = dict(tensors), [_local(each)._version for each in tensors.values()]
        return tensors

    def was_written(self) -> bool:
        versions = zip(self.tensors.values(), self._versions, strict=True)
        return any(_local(tensor)._version != version for tensor, version in versions)

    def forget(self) -> None:
        self.tensors, self._versions = {}, []


@torch.no_grad()
def load_into(own: Mapping[str, Tensor], state: Mapping[str, Tensor], who: str) -> None:
    """Copies what `state` holds into the tensors of `own`. Raises ValueError for other names or shapes."""
    if state.keys() != own.keys():
        missing, more = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise ValueError(
            f"{who} has {len(own)} tensors; what is loaded lacks {len(missing)} of them {missing[:3]} and "
            f"has {len(more)} others {more[:3]}."
        )
    for key, tensor in own.items():
        if tensor.shape != state[key].shape:
            raise ValueError(f"{key} is {list(tensor.shape)}, but is loaded as {list(state[key].shape)}.")
    for key, tensor in own.items():
        if _local(tensor).data_ptr() != _local(state[key]).data_ptr() or not tensor.numel():
            tensor.copy_(state[key])


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


_ANEW = "close() the handle and shard() the model as it is now, on every rank."


def _mark_of(parameter: nn.Parameter) -> tuple:
    """Returns a mark that changes when it is written, frozen, or given other memory or another dtype."""
    storage = parameter.untyped_storage()._cdata
    return parameter._version, storage, parameter.requires_grad, parameter.dtype
