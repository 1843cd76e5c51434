"""Makes a cut model sequence parallel: norms and the residual stream run on a rank's rows.

    whole activations   row linear: sum over ranks, whole on each     column linear, backward: sum of dX
    rows                row linear: scatter of the sum                column linear: gather of x
                        and the reverse in the backward pass

As many bytes travel, a GEMM runs while rows travel, and the code between a row and a column linear is
computed once instead of on every rank. The model's code stays as it is: its token embedding and row linears
give RowShards (row_shard.py), which column linears take, and which all other code reads as whole tensors.

Rows are used only where gradients are on. Generation and evaluation without gradients, and code that
torch.compile traces, work on whole activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves, tree_map_only

from pyruntime import ops
from pyruntime.any_model.activations.row_shard import RowGroup, RowShard, cut_rows, from_rows, to_whole
from pyruntime.any_model.comparing import asked, first_difference
from pyruntime.comm import CommError
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parameters import TensorGroup


class RowForm(RowGroup):
    """Decides, in the first call, whether the layers of one parallelize() call give rows.

    said: the decision in words, for explain(); "" before."""

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self.said = ""
        self._on = False
        self._outermost: nn.Module | None = None  # the outermost running module that holds layers

    @property
    def gives_rows(self) -> bool:
        """Whether a row linear gives rows now."""
        return self._on and torch.is_grad_enabled() and not is_compiling()

    @property
    def begins(self) -> bool:
        """Whether an embedding gives rows now. Rows become whole again where the outermost module returns."""
        return self.gives_rows and self._outermost is not None

    def shard(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Wraps this rank's rows as a tensor of the whole's shape."""
        return from_rows(rows, shape, self)

    def decide(self, model: nn.Module, run: Callable[[], Any], expected: Any) -> None:
        """Turns the form on if `run()`, a forward pass with it, gives the whole model's output, and if more
        linears take rows than other code gathers them. All ranks must call this together."""
        hooks = self._watch(model)
        self._on = True
        try:
            difference = first_difference(expected, run())
            why = f"the model's output{difference[0]} would be another" if difference else ""
        except (CommError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if not why and self.gathers >= self.reads:
            why = (
                f"{self.reads} linears could take rows, but {self.gathers} times other code reads all of them"
            )
        device = next(model.parameters()).device
        flags = ops.all_gather_stats(torch.tensor([float(bool(why))], device=device), self.group.name)
        self._on = not flags.any().item()
        if self._on:
            self.said = (
                f"norms and residuals on a rank's rows in training: {self.reads} linears take rows, "
                f"{self.gathers} times other code reads all of them"
            )
            return
        self.said = f"whole everywhere: {why or 'so another rank has found'}"
        for hook in hooks:
            hook.remove()

    def _watch(self, model: nn.Module) -> list:
        layers = {m for m in model.modules() if isinstance(m, ParallelModule)}
        holders = [m for m in model.modules() if m not in layers and not layers.isdisjoint(m.modules())]
        hooks = []
        for m in holders:
            hooks.append(m.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(m.register_forward_hook(self._leave, always_call=True))
        embedding = asked(model, "get_input_embeddings")
        if isinstance(embedding, nn.Embedding):  # not cut
            hooks.append(embedding.register_forward_hook(self._cut))
        return hooks

    def _cut(self, _module: nn.Module, _args: tuple, y: Any) -> Any:
        """Takes this rank's rows of an embedding's output that is whole on every rank."""
        if not self.begins or type(y) is not Tensor or y.dim() < 2:
            return None
        return cut_rows(y, self)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes the outermost call. A call with rows as arguments is not one: it recomputes a layer."""
        if self._outermost is None and not is_compiling() and not _has_rows((args, kwargs)):
            self._outermost = module

    def _leave(self, module: nn.Module, _args: tuple, output: Any) -> Any:
        """Makes the results of the outermost call whole, even if it is a call of a single layer."""
        if is_compiling() or self._outermost is not module:
            return None
        self._outermost = None
        return tree_map_only(RowShard, to_whole, output) if _has_rows(output) else None


def _has_rows(values: Any) -> bool:
    return any(isinstance(leaf, RowShard) for leaf in tree_leaves(values))
