"""shard(): data parallelism for any module, at stages 0 to 3.

| stage | over the dp ranks are cut (Rajbhandari et al. 2020, section 5) |
|---|---|
| 0 | nothing: gradients are summed on every rank |
| 1, 2 | optimizer states and reduced gradients; new weights are gathered under the next forward pass |
| 3 | the weights too, but for small ones |
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyruntime.comm import Group
from pyruntime.data_parallel.axes import axes_of
from pyruntime.data_parallel.gradients import GradientReducer
from pyruntime.data_parallel.optimizer import NonFinite, Rounding, ShardedAdamW
from pyruntime.data_parallel.shared import Shared
from pyruntime.data_parallel.states import weights_state
from pyruntime.data_parallel.units import Unit, cut_into_units
from pyruntime.data_parallel.weights import GatherAhead, GatherPerUse, UnitWeights
from pyruntime.nn.handed_over import hand_over, handing_weights, take_back

_LARGE_BUCKET = (4 << 20) - (64 << 10)  # 4 MiB with its marks and padding: places are powers of two
BUCKET_BYTES = {0: _LARGE_BUCKET, 1: _LARGE_BUCKET, 2: _LARGE_BUCKET, 3: 256 << 10}
"""By stage. Every unit costs its handshake and half a millisecond of Python (docs/performance.md, data
parallelism); at stage 3 what shares its unit is not cut."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    stage: int = 2,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    keep_gathered: int = 0,
) -> Sharded:
    """Makes `model`, which is the same on every rank of `mesh`, train on different data on each of them.

        handle = pyruntime.shard(model, mesh["dp"], stage=2)
        optimizer = handle.adamw(lr=1e-3)
        for batch in micro_batches[:-1]:
            with handle.accumulate():
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()
        optimizer.step()

    Gradients are averaged over the ranks: each computes the mean loss of its own data. They never appear in
    `.grad`.

    Args:
        model: anything made of nn.Modules, parallel linears among them. Its parameters with requires_grad
            train.
        mesh: one dimension, or two, (replicate, shard), for hybrid sharding.
        stage: 0 to 3; see the module's docstring.
        reduce_dtype: what gradients travel as; by default the parameters' dtype. Sums are fp32 in any case.
        bucket_bytes: smaller parameters travel together, up to so much; at stage 3 those that do stay whole.
            By default nearly 4 MiB, at stage 3 256 KiB.
        keep_gathered: at stage 3, so many weights, the first that the forward pass reads, stay whole until
            its backward pass has read them.

    Raises ValueError for another stage, a mesh that does not fit it, a mesh with several ranks of a group
    that the model is cut over already, or a model without trainable parameters.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is none of 0, 1, 2 and 3.")
    if getattr(model, "_pyruntime_sharded", False):
        raise ValueError("This model is sharded already; call close() of its handle first.")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
    _check_ranks(named, mesh)
    if bucket_bytes is None:
        bucket_bytes = BUCKET_BYTES[stage]
    return Sharded(model, mesh, stage, reduce_dtype, bucket_bytes, keep_gathered)


def _check_ranks(named: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """ValueError where ranks that hold different shards of a parameter would be given the same."""
    ours = set(mesh.mesh.flatten().tolist())
    for name, parameter in named:
        layout = getattr(parameter, "tp_layout", None)
        if layout is None or layout.group.size == 1:
            continue
        shared = ours.intersection(dist.get_process_group_ranks(layout.group.process_group))
        if len(shared) > 1:
            raise ValueError(
                f"shard() was asked to make ranks {sorted(shared)} train one model on different data, "
                f"but {name} is cut over them (tensor-parallel group {layout.group}), so that they hold "
                "different shards. Pass the mesh of ranks that hold the same shards: runtime.dp of "
                "Runtime.start(dp=2), say."
            )


class Sharded:
    """A model whose gradients, optimizer states and weights are spread over data-parallel ranks. From
    `shard`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        stage: int,
        reduce_dtype: torch.dtype | None,
        bucket_bytes: int,
        keep_gathered: int,
    ):
        self.model, self.stage = model, stage
        self.axes = axes_of(mesh, stage)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.units = cut_into_units(named, self.axes.shard.size, bucket_bytes)
        self._weights = [UnitWeights(unit, self.axes.shard, apart=stage == 3) for unit in self.units]
        self._gatherer: GatherPerUse | GatherAhead
        if stage == 3:
            self._gatherer = GatherPerUse(model, self._weights, keep_gathered)
        else:
            self._gatherer = GatherAhead(model, self._weights)
        self._reducer = GradientReducer(
            self.units,
            self.axes,
            handing_weights(model),
            self._gatherer.begin_rest,
            self._on_reduced,
            reduce_dtype,
        )
        self._optimizer: ShardedAdamW | None = None
        self._patched = hand_over(model)
        model._pyruntime_sharded = True

    def adamw(
        self,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float | dict[str, float] = 0.1,
        max_norm: float = 0.0,
        nonfinite: NonFinite = "raise",
        rounding: Rounding = "nearest",
        parts: Group | None = None,
        shared: Shared | None = None,
    ) -> ShardedAdamW:
        """The optimizer of this model; there is one.

        weight_decay: of matrices (vectors do not decay), or by name in the state dict, 0 where it is not
            named.
        max_norm: largest norm of the whole model's gradient, clipped as torch.nn.utils.clip_grad_norm_ clips;
            0: no clipping.
        nonfinite: of a step whose gradient holds NaN or infinity: "raise" NonFiniteGradient, "skip" it, or
            "ignore" that, in which case, without clipping, units are updated during the backward pass.
        rounding: of bf16 weights: "nearest", from fp32 master weights; or "stochastic", without these (4
            bytes a parameter less), on the CPU: up or down at random so that the mean is exact, the same way
            at every stage and number of data-parallel ranks.
        parts: the ranks, this one among them, whose models are the parts of one (the stages of a pipeline):
            the norm is that of all of them.
        shared: parameters that another part has too (tied embeddings): their gradients are summed over
            their holders, and the norm counts them once.

        Raises ValueError for another `nonfinite` or `rounding`, for shared parameters where units are updated
        during the backward pass, and where the model has an optimizer already.
        """
        if self._optimizer is not None:
            raise ValueError("This model has an optimizer already.")
        self._optimizer = ShardedAdamW(
            self._weights,
            self.axes,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_norm=max_norm,
            nonfinite=nonfinite,
            rounding=rounding,
            finish_gradients=self._reducer.finish,
            gatherer=self._gatherer,
            parts=parts,
            shared=shared or {},
        )
        return self._optimizer

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes within add to the gradients, in fp32, and send nothing."""
        return self._reducer.accumulate()

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Around a step whose gradients come in several backward passes, each the last one of some
        parameters, as those of a pipeline's stages do. Passes that are followed by others of the same
        parameters run within `accumulate()` also here."""
        return self._reducer.passes()

    def add_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor, *, last: bool) -> None:
        """Adds dY^T X to the gradient of a linear weight, within `passes()`. last: it is complete, and leaves
        when it is its turn."""
        self._reducer.add_product(weight, dy, x, last)

    def complete(self) -> None:
        """All parameters of the model are whole and current when it returns. Every rank calls it."""
        self._gatherer.complete()

    def state_dict(self) -> dict[str, Tensor]:
        """The weights as DTensors over this rank's shards. What is loaded into them reaches the model with
        `loaded()`."""
        return weights_state(self._weights, self.axes)

    def loaded(self) -> None:
        """Something was written into the tensors of `state_dict()`: the parameters follow."""
        self._gatherer.loaded()

    def close(self) -> None:
        """The model is as it was, with its current weights; it can be sharded again. Every rank calls it."""
        self._gatherer.close()
        self._reducer.close()
        take_back(self._patched)
        self.model._pyruntime_sharded = False

    def _on_reduced(self, unit: Unit, gradient: Tensor) -> None:
        if self._optimizer is None:
            raise RuntimeError("Gradients came before the model had an optimizer; call handle.adamw() first.")
        self._optimizer.take(unit, gradient)
