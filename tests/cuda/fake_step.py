"""Runs a whole training step of a Llama on fake tensors "on cuda", with pretended_cuda.cpp preloaded.

Nothing is computed, but every operation checks that its operands are on the device and that it exists there.
pyruntime's ops first run as on a GPU with the kernels, then as the ATen operations that replace them without.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyruntime.data_parallel import shard
from pyruntime.llama import Llama
from pyruntime.llama.presets import preset
from pyruntime.train.device import Device
from pyruntime.train.figures import LateFigures
from pyruntime.train.watching.expert_load import ExpertLoad

DEVICE = torch.device("cuda", 0)
COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


class Watched(TorchDispatchMode):
    """Checks the device of every operation; with `apart`, runs pyruntime's ops as their ATen composites."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.ours: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device == DEVICE or tensor.dim() == 0 for tensor in tensors), function
        if function.namespace != "pyruntime":
            return function(*args, **kwargs)
        self.ours.add(function._schema.name.removeprefix("pyruntime::"))
        if not self.apart:
            assert exists_on_cuda(function), f"{function} has nothing to run on CUDA"
            return function(*args, **kwargs)
        with self:
            return function._op_dk(COMPOSITE, *args, **kwargs)


def exists_on_cuda(function: torch._ops.OpOverload) -> bool:
    keys = ("CUDA", "CompositeExplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key) for key in keys)


def on_cuda(model: nn.Module) -> None:
    """Replaces a model's meta tensors by fake ones."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                made[parameter] = nn.Parameter(fake)
                made[parameter].__dict__.update(parameter.__dict__)
            module._parameters[name] = None if parameter is None else made[parameter]


def main(dtype: torch.dtype) -> None:
    config = preset("3m", vocab_size=512, tie_word_embeddings=True)
    for apart in (False, True):
        model = Llama(config, dtype=dtype, device="meta")
        with FakeTensorMode():
            on_cuda(model)
            model._rope(64, DEVICE)  # made on the CPU, once
            held, ours = trained(model, apart)
            assert all(isinstance(each, FakeTensor) and each.device == DEVICE for each in held)
        print(" ".join(sorted(ours)))


def trained(model: Llama, apart: bool) -> tuple[list[torch.Tensor], set[str]]:
    """Runs two steps; returns their resulting tensors, and pyruntime's ops in them."""
    load = ExpertLoad((), {}, 1, DEVICE)  # none
    with Watched(apart) as seen:
        ids = torch.zeros(2, 64, dtype=torch.long, device=DEVICE)
        optimizer = shard(model, None, stage=0).adamw(max_norm=1.0)
        figures = LateFigures(Device(DEVICE), load)
        for step in (1, 2):
            loss = model(ids, ids)
            loss.backward()
            norm = figures.add(step, 1e-3, loss.detach(), optimizer.squared_norm(), signum=0)
            optimizer.step(norm)
        states = optimizer.state_dict().items()
        held = [state for name, state in states if not name.startswith("steps.")]
        return [*model.parameters(), loss, norm, *held], seen.ours


if __name__ == "__main__":
    main({"bf16": torch.bfloat16, "fp32": torch.float32}[sys.argv[1]])
