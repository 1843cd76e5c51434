"""What must not be wrapped around a tensor-parallel model, because it takes a rank's shard for the whole.

`pyruntime.shard` is the data parallelism that knows of shards."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pyruntime.nn.cut import INSTEAD
from pyruntime.nn.parameters import TensorGroup

DATA_PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def refuse_wrapper(wrapper: nn.Module, _name: str, module: nn.Module) -> None:
    """Hook of torch for every module that becomes part of another: called in the constructor of
    DistributedDataParallel, before it broadcasts rank 0's parameters. Raises ValueError."""
    if not isinstance(wrapper, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return
    for name, parameter in module.named_parameters():
        layout = getattr(parameter, "tp_layout", None)
        if layout is not None and layout.group.ranks > 1:
            raise ValueError(
                f"{type(wrapper).__name__} was asked to wrap a tensor-parallel model ({name} is cut over "
                f"group {layout.group}), which it would take for whole: over those ranks it makes all shards "
                "equal. Use the model as it is, with the same batch on every rank of that group; "
                f"{INSTEAD}. Hugging Face's Trainer wraps every model: write the loop yourself "
                "(docs/tutorials/hugging-face.md)."
            )


def check_unwrapped(model: nn.Module) -> None:
    """ValueError where another tool has wrapped the model for data parallelism, or cut its parameters: what
    such a tool noted of them would no longer be so."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in DATA_PARALLEL]
        if kinds:
            where = f" ({name})" if name else ""
            raise ValueError(
                f"The model is wrapped in {kinds[0]}{where}, which keeps the parameters that would be cut; "
                f"give parallelize() what is inside, and {INSTEAD}."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor: another tool has cut this model already (from_pretrained with "
                "tp_plan, fully_shard, parallelize_module); give parallelize() the whole model, as "
                f"from_pretrained without tp_plan loads it, and {INSTEAD}."
            )


def refuse_replacement(what: str, group: TensorGroup, value: object) -> None:
    """ValueError where `value`, assigned to a parameter of a parallel module, is not such a parameter itself,
    as where FSDP's fully_shard cuts it once more."""
    if getattr(value, "tp_layout", None) is None:
        kind = type(value).__name__ + (f" {list(value.shape)}" if isinstance(value, Tensor) else "")
        raise ValueError(
            f"{what} belongs to tensor-parallel group {group}, and a {kind} that does not was assigned to "
            "it. Values are loaded with load_state_dict(); FSDP and fully_shard cannot cut a tensor-parallel "
            f"model: {INSTEAD}, with stage=3 where weights are to be cut too."
        )


def refuse_removal(what: str, group: TensorGroup) -> NoReturn:
    """ValueError where a parameter is taken away from a parallel module, as FSDP does, and torch's
    parametrizations, which compute it anew in every call."""
    raise ValueError(
        f"{what} belongs to tensor-parallel group {group} and stays in its layer. A parametrization "
        "(weight_norm, spectral_norm) would compute it from this rank's shard alone: leave the layer out of "
        f"the plan. FSDP and fully_shard cannot cut a tensor-parallel model: {INSTEAD}."
    )
