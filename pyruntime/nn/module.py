"""The base of every parallel module: local parameters, DTensor state dicts, a name in the profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pyruntime.comm.ranges import is_heard, marked
from pyruntime.nn.cut import as_plain, mark_cut, shard_of
from pyruntime.nn.layout import Layout
from pyruntime.nn.optimizer_states import after_step, before_step
from pyruntime.nn.parameters import Group, Part, TensorGroup
from pyruntime.nn.wrappers import refuse_removal, refuse_replacement, refuse_wrapper


class Step:
    """A part of a module's work, `take()`, that runs as a call of the module. So the module's forward hooks
    run (ZeRO gathers weights there), and profilers show the module's name."""

    def __init__(self, take: Callable[[], Any]):
        self.take = lambda *_: take()


class LayerHook:
    """Wraps every call of the layer whose constructor was given this hook. This base class adds nothing.

    `parallelize` gives layers hooks that know the model around them (any_model/layer_hooks.py)."""

    def call(self, layer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the result of a call. `layer.compute` computes the layer without its hook."""
        return layer.compute(*args, **kwargs)


class ParallelModule(nn.Module):
    """A module whose parameters are this rank's shards: plain tensors, each with a `Layout`.

    `state_dict()` returns DTensors over the parameters' own storage, so that `torch.distributed.checkpoint`
    saves and loads in place; `load_state_dict()` takes DTensors, full tensors, or plain shards. `label` is
    the name of calls in torch.profiler and NVTX; `parallelize` and the models set it to the qualified name.
    hook: wraps every call; None: calls are not wrapped."""

    def __init__(self, group: Group | TensorGroup | None, hook: LayerHook | None = None):
        register_with_torch()
        super().__init__()
        self.group = TensorGroup.of(group)
        self.hook = hook or LayerHook()
        self.label = ""
        # The last call, for explain(): its rows over all ranks (0: not called yet), and whether rows were
        # cut. Calls write into __dict__, because nn.Module makes setting an attribute expensive.
        self.last_rows, self.last_cut_rows = 0, False
        self._layouts: dict[str, Layout] = {}

    def add_parameter(
        self,
        name: str,
        dim: int | None,
        parts: Sequence[Part],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        dim_y: int | None = None,
    ) -> nn.Parameter:
        """Registers this rank's (uninitialised) shard of `parts`, cut along `dim` (None: not cut). A group
        with a second axis cuts `dim_y` over it."""
        layout = Layout(self.group, dim, tuple(parts), None if self.group.y is None else dim_y)
        parameter = nn.Parameter(torch.empty(layout.local_shape(), dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        self._layouts[name] = layout
        mark_cut(parameter, layout)
        return parameter

    @torch.no_grad()
    def load_full(self, full: Mapping[str, Tensor]) -> None:
        """Copies this rank's shards of full tensors, {state-dict key: tensor}, into the parameters."""
        for name, layout in self._layouts.items():
            self._parameters[name].copy_(layout.gather_parts(full))

    def _take(self, sources: Mapping[str, nn.Module]) -> Self:
        """Fills a module built on meta with its shards of whole modules, {prefix of keys: module}."""
        full = {
            f"{prefix}{key}": p
            for prefix, m in sources.items()
            for key, p in m.named_parameters(recurse=False)
        }
        for name, layout in self._layouts.items():
            self._set(name, layout.gather_parts(full).detach(), assign=True)
            self._parameters[name].requires_grad_(all(full[part.key].requires_grad for part in layout.parts))
        return self.train(next(iter(sources.values())).training)

    def forward(self, *args, **kwargs) -> Tensor:
        """Runs the module, or the `Step` given in place of its arguments, in a profiler range "tp LABEL"
        ("LABEL" on one rank). Where no profiler records, the range costs less than a microsecond."""
        call = args[0].take if args and isinstance(args[0], Step) else self.hook.call
        with as_plain():  # a layer computes with its shards
            if not is_compiling() and is_heard():
                name = self.label or type(self).__name__
                with marked("tp", name) if self.group.size > 1 else marked(name):
                    return call(self, *args, **kwargs)
            return call(self, *args, **kwargs)

    def compute(self, *args, **kwargs) -> Tensor:
        # Abstract: nn.Module and abc.ABC do not mix.
        raise NotImplementedError(f"{type(self).__name__} does not define compute().")

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_layouts", ()):
            refuse_replacement(f"{self.label or type(self).__name__}.{name}", self.group, value)
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self.__dict__.get("_layouts", ()):
            refuse_removal(f"{self.label or type(self).__name__}.{name}", self.group)
        super().__delattr__(name)

    # -- marks survive operations that replace a Parameter object: .to(...), to_empty, deepcopy, pickle

    def _mark_all(self) -> None:
        for name, layout in self._layouts.items():
            if self._parameters.get(name) is not None:
                mark_cut(self._parameters[name], layout)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._mark_all()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_all()

    # -- state dicts

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name, layout in self._layouts.items():
            parameter = self._parameters[name]
            shard = shard_of(parameter if keep_vars else parameter.detach())
            for key, value in layout.to_dtensors(shard).items():
                destination[prefix + key] = value

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        assign = local_metadata.get("assign_to_params_buffers", False)
        known = {part.key for layout in self._layouts.values() for part in layout.parts}
        for name, layout in self._layouts.items():
            found = {p.key: state_dict[prefix + p.key] for p in layout.parts if prefix + p.key in state_dict}
            missing_keys.extend(prefix + part.key for part in layout.parts if part.key not in found)
            if len(found) < len(layout.parts):
                continue
            try:
                self._set(name, layout.gather_parts(found), assign)
            except (ValueError, RuntimeError) as error:
                error_msgs.append(f"{prefix}{name}: {error}")
        unexpected_keys.extend(
            k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in known
        )

    @torch.no_grad()
    def _set(self, name: str, value: Tensor, assign: bool) -> None:
        parameter = self._parameters[name]
        if not assign:
            parameter.copy_(value)
            return
        # clone: a narrow of a full tensor would keep the whole of it alive.
        own = value.clone(memory_format=torch.contiguous_format)
        self._parameters[name] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        mark_cut(self._parameters[name], self._layouts[name])


@functools.cache
def register_with_torch() -> None:
    """Registers hooks with torch, once per process: its optimizers and wrappers then see parallel modules."""
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    register_module_module_registration_hook(refuse_wrapper)
