"""Refuses wrappers that take a rank's shard for the full tensor, such as DistributedDataParallel and FSDP.

Data parallelism over a tensor-parallel model is `pyruntime.shard`."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pyruntime.nn.cut import INSTEAD
from pyruntime.nn.parameters import TensorGroup

DATA_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def refuse_wrapper(wrapper: nn.Module, _name: str, module: nn.Module) -> None:
    """Raises ValueError where DistributedDataParallel or DataParallel wraps a tensor-parallel model. torch
    calls this hook when a module becomes a child of another, before rank 0's parameters are broadcast."""
    if not isinstance(wrapper, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return
    for name, parameter in module.named_parameters():
        layout = getattr(parameter, "tp_layout", None)
        if layout is not None and layout.group.ranks > 1:
            raise ValueError(
                f"{type(wrapper).__name__} was asked to wrap a tensor-parallel model ({name} is cut over "
                f"group {layout.group}). It would make all shards of that group equal. Use the model as it "
                "is, with the same batch on every rank of that group; "
                f"{INSTEAD}. Hugging Face's Trainer wraps every model: write the loop yourself "
                "(docs/tutorials/hugging-face.md)."
            )


def check_unwrapped(model: nn.Module) -> None:
    """Raises ValueError where another tool has wrapped the model for data parallelism, or cut its parameters:
    the tool's records of them would become wrong."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in DATA_PARALLEL]
        if kinds:
            where = f" ({name})" if name else ""
            raise ValueError(
                f"The model is wrapped in {kinds[0]}{where}, which would keep the uncut parameters; give "
                f"parallelize() the model inside, and {INSTEAD}."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor: another tool has cut this model already (from_pretrained with "
                "tp_plan, fully_shard, parallelize_module); load the whole model, with from_pretrained "
                f"without tp_plan, give it to parallelize(), and {INSTEAD}."
            )


def refuse_replacement(what: str, group: TensorGroup, value: object) -> None:
    """Raises ValueError where `value`, assigned to a parameter of a parallel module, has no layout. FSDP's
    fully_shard assigns such values when it cuts the parameter again."""
    if getattr(value, "tp_layout", None) is None:
        kind = type(value).__name__ + (f" {list(value.shape)}" if isinstance(value, Tensor) else "")
        raise ValueError(
            f"{what} belongs to tensor-parallel group {group}, but a {kind} that does not was assigned to "
            "it. Load values with load_state_dict(). FSDP and fully_shard cannot cut a tensor-parallel "
            f"model: {INSTEAD}, with stage=3 where weights are to be cut too."
        )


def refuse_removal(what: str, group: TensorGroup) -> NoReturn:
    """Raises ValueError where a parameter is removed from a parallel module. FSDP does so, and torch's
    parametrizations, which recompute it in every call."""
    raise ValueError(
        f"{what} belongs to tensor-parallel group {group} and cannot be removed. A parametrization "
        "(weight_norm, spectral_norm) would compute it from this rank's shard only: leave the layer out of "
        f"the plan. FSDP and fully_shard cannot cut a tensor-parallel model: {INSTEAD}."
    )
