"""shard(): data parallelism for any module, at stages 0 to 3.

| stage | cut over the dp ranks (Rajbhandari et al. 2020, section 5) |
|---|---|
| 0 | nothing: gradients are summed on every rank |
| 1, 2 | optimizer states and reduced gradients; new weights are gathered under the next forward pass |
| 3 | the weights too, also frozen ones, except small ones |
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from pyruntime.choices import WireFormat
from pyruntime.comm import Axis
from pyruntime.comm.failed_forward import ForwardWatch
from pyruntime.data_parallel.adamw import ShardedAdamW
from pyruntime.data_parallel.any_optimizer import ShardedTorchOptimizer
from pyruntime.data_parallel.away import is_ordinary_matrix, mark_sharded, unmark
from pyruntime.data_parallel.axes import AxesOf, flight_axes
from pyruntime.data_parallel.bucket_sum import launch
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import Bucket, bytes_of, cut_into_buckets
from pyruntime.data_parallel.checks import (
    check_compression,
    check_experts,
    check_kinds,
    check_ranks,
    check_uncompiled,
    check_weight_wire,
    refuse_compiled,
)
from pyruntime.data_parallel.compression.compressor import Compressor
from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.data_parallel.local import LocalGradients
from pyruntime.data_parallel.meta import of_first_rank, read_rows, take_from_first, take_memory
from pyruntime.data_parallel.optimizer import ShardedOptimizer, Shards
from pyruntime.data_parallel.plain import UsersOptimizer
from pyruntime.data_parallel.reducer import GradientReducer
from pyruntime.data_parallel.states import weights_state
from pyruntime.data_parallel.touched import tables_of
from pyruntime.data_parallel.weight_gathers import GatherAhead, Gatherers, GatherPerUse
from pyruntime.data_parallel.written import Handed, Written, begin_alike, load_into
from pyruntime.nn.cut import set_gradient
from pyruntime.nn.module import register_with_torch
from pyruntime.nn.weight_sinks import patch_linears, unpatch_linears, weights_with_sinks

_LARGE_BUCKET = (4 << 20) - (64 << 10)  # 4 MiB with marks and padding: sizes of slots are powers of two
BUCKET_BYTES = {0: _LARGE_BUCKET, 1: _LARGE_BUCKET, 2: _LARGE_BUCKET, 3: 256 << 10}
"""Default bucket size of each stage. Every bucket costs a handshake and half a millisecond of Python
(bench/results/data-parallel.md); at stage 3 a shared bucket is not cut."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh | Axis | None,
    *,
    stage: int = 2,
    reduce_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    keep_gathered: int = 0,
    compression: Compression | None = None,
    weight_wire: WireFormat = "same",
) -> Sharded:
    """Makes `model` train on different data on each rank of `mesh`, starting from the first rank's weights.

        handle = pyruntime.shard(model, mesh["dp"], stage=2)
        optimizer = handle.adamw(lr=1e-3)
        for batch in micro_batches[:-1]:
            with handle.accumulate():
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()
        optimizer.step()

    Gradients are averaged over the ranks: each computes the mean loss of its own data.
    torch.optim.AdamW(model.parameters()) works too, and so does clip_grad_norm_ before it (plain.py). The
    handle's own optimizers are faster and keep fp32 masters of bf16 weights.

    Parameters over a group with `copies`, as experts over runtime.ep may be, are summed and cut over these
    ranks instead, and divided by the number of ranks of `mesh`.

    Later writes into the model reach the optimizer by `load_state_dict()` or within `handle.writes()`. Any
    other write is a RuntimeError in the next step, and so are parameters that were frozen, unfrozen, replaced
    or added. A forward pass under torch.compile is a RuntimeError too.

    Args:
        model: any nn.Module, with parallel linears or without. Parameters with requires_grad train. At
            stage 3 it may be on meta, on every rank or on all but the first (meta.py).
        mesh: one dimension, or two, (replicate, shard), for hybrid sharding; None: this rank only.
        stage: 0 to 3; see the module's docstring.
        reduce_dtype: dtype in which gradients travel, by default the parameters'. Sums are always fp32.
        bucket_bytes: parameters below this size share buckets of at most this size; at stage 3 these stay
            whole. By default nearly 4 MiB, at stage 3 256 KiB.
        keep_gathered: at stage 3, the number of weights, the first that the forward pass reads, that stay
            whole until its backward pass has read them.
        compression: how matrices' gradients travel in fewer bytes (docs/how-to/slow-network.md), at stages 0
            to 2 over one axis of several ranks; None: uncompressed.
        weight_wire: at stage 3, "bf16" or "fp8": matrices that train are rounded to it when they
            are gathered. All ranks compute with the rounded values, and update exact rows.

    Raises ValueError for another stage, a mesh that does not fit it, a mesh with several ranks of a group
    that the model is cut over, or where nothing can be compressed. Also for a model that is sharded already,
    is under torch.compile, or has no trainable parameters; and for embeddings with max_norm. Parameters must
    not be complex, must be contiguous and have dense gradients, with the same names, shapes and dtypes on all
    ranks. Raises TypeError for another type of model or mesh.
    """
    if isinstance(mesh, Axis):
        mesh = mesh.mesh
    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh | None):
        raise TypeError(
            "shard() takes an nn.Module and a DeviceMesh, or an axis such as runtime.dp; found: "
            f"{type(model).__name__} and {type(mesh).__name__}."
        )
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is none of 0, 1, 2 and 3.")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "sharded_as"):
            raise ValueError(
                f"{name} is sharded already, as {parameter.sharded_as} of the model that shard() was given "
                "before; shard the whole model once, blocks and all, or call close() of that handle first."
            )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
    check_kinds(model, named)
    if mesh is not None:
        check_ranks(model, named, mesh)
        if mesh.size() > 1:
            check_uncompiled(model)
    axes_of = AxesOf(model, mesh, stage)
    axes = axes_of.main
    check_experts(model, axes_of)
    if compression is not None:
        check_compression(stage, axes_of)
    if weight_wire != "same":
        check_weight_wire(weight_wire, stage, axes)
    bucket_bytes = BUCKET_BYTES[stage] if bucket_bytes is None else bucket_bytes
    sent = of_first_rank(model, stage, axes_of)
    begins_empty = any(p.is_meta for p in model.parameters())
    begin_alike(model, axes_of, sent)
    if begins_empty:
        device = torch.device(mesh.device_type if mesh is not None else "cpu")
        take_memory(model, device, bucket_bytes)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    buckets = _cut(named, axes_of, bucket_bytes)
    frozen: list[Bucket] = []
    if stage == 3:
        fixed = [
            (name, p)
            for name, p in model.named_parameters()
            if not p.requires_grad and bytes_of(p) >= bucket_bytes and is_ordinary_matrix(p)
        ]
        frozen = _cut(fixed, axes_of, bucket_bytes)
    handle = Sharded(
        model, stage, axes_of, buckets, frozen, reduce_dtype, keep_gathered, compression, weight_wire
    )
    if sent:
        handle.take_from_first(sent)
    handle.lacks_values = begins_empty and not sent
    return handle


def _cut(named: Sequence[tuple[str, nn.Parameter]], axes_of: AxesOf, bucket_bytes: int) -> list[Bucket]:
    found: list[Bucket] = []
    for axes in axes_of.every:
        own = [(name, p) for name, p in named if axes_of.of(p) == axes]
        found += cut_into_buckets(own, axes.shard.size, bucket_bytes, axes)
    return found


class _ZeroGrad:
    """zero_grad() of a sharded model, whose gradients are not in `.grad`."""

    def __init__(self, handle: Sharded):
        self._model, self._handle = handle.model, weakref.ref(handle)

    def __call__(self, set_to_none: bool = True) -> None:
        if (handle := self._handle()) is not None:
            handle.zero_grad()
        type(self._model).zero_grad(self._model, set_to_none)

    def __reduce__(self) -> tuple:
        return getattr, (self._model, "zero_grad")  # a copy of the model uses its class's method


class Sharded:
    """A model whose gradients, optimizer states and weights are spread over ranks. Made by `shard`."""

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        axes_of: AxesOf,
        buckets: list[Bucket],
        frozen: list[Bucket],
        reduce_dtype: torch.dtype | None,
        keep_gathered: int,
        compression: Compression | None = None,
        weight_wire: WireFormat = "same",
    ):
        self.model, self.stage, self.axes, self.buckets = model, stage, axes_of.main, buckets
        self._axes_of = axes_of
        self._weights = [
            BucketWeights(bucket, bucket.axes.weights, apart=stage == 3, wire=weight_wire)
            for bucket in buckets
        ]
        self._frozen = [
            BucketWeights(bucket, bucket.axes.weights, apart=True, frozen=True) for bucket in frozen
        ]
        self._gatherer = Gatherers([*self._gatherers(keep_gathered)])
        self.lacks_values = False
        """Whether it began on meta and no values have been loaded yet."""
        self.optimizer: ShardedOptimizer | None = None
        """Made by `adamw` or `of_torch`; otherwise it serves the user's own optimizer."""
        self._gradients: GradientReducer | LocalGradients
        self._patched: list[nn.Linear] = []
        tables = tables_of(model)
        self.compressor = None if compression is None else Compressor(compression, buckets, tables, self.axes)
        """Set if gradients are compressed."""
        is_alone = all(axes.size == 1 for axes in axes_of.every)
        if is_alone:
            self._gradients = LocalGradients(buckets, self._take)
        else:
            self._gradients = GradientReducer(
                buckets,
                weights_with_sinks(model),
                tables,
                self._gatherer.begin_rest,
                self._hand_to_optimizer,
                reduce_dtype,
                launch if self.compressor is None else self.compressor.launch,
            )
            self._patched = patch_linears(model)
        if weight_wire != "same":
            self._gatherer.loaded()  # the first forward pass reads rounded weights too
        self._written, self._handed = Written(model, buckets, alone=is_alone), Handed()
        model.zero_grad = _ZeroGrad(self)
        self._load_hooks = [
            model.register_load_state_dict_pre_hook(lambda *_: self._begin_writes()),
            model.register_load_state_dict_post_hook(lambda *_: self._end_writes()),
            model.register_forward_pre_hook(lambda *_: self._take_loaded()),
        ]
        if not is_alone:
            self._load_hooks += ForwardWatch(model, self._note_failed_forward).hooks
            self._load_hooks += [
                module.register_forward_pre_hook(refuse_compiled, prepend=True)
                for module in model.modules()
                if module is model or next(module.parameters(recurse=False), None) is not None
            ]
        takes = self if isinstance(self._gradients, GradientReducer) else None
        cut = {id(p) for each in (*self._weights, *self._frozen) for p in each.bucket.parameters}
        for name, parameter in model.named_parameters():
            if id(parameter) in cut:
                mark_sharded(parameter, name, takes)
        register_with_torch()

    def _gatherers(self, keep: int) -> Iterator[GatherPerUse | GatherAhead]:
        for axes in self._axes_of.every:
            own, frozen = (
                [each for each in some if each.bucket.axes == axes] for some in (self._weights, self._frozen)
            )
            if not own and not frozen:
                continue
            if self.stage == 3 and axes.shard.size > 1:
                yield GatherPerUse(self.model, own, frozen, axes.shard, keep)
            else:
                yield GatherAhead(self.model, own, axes.shard)

    def adamw(self, **options: Any) -> ShardedAdamW:
        """Makes this model's AdamW; a model has one optimizer. Options and errors are those of
        `ShardedAdamW`.

        Raises ValueError if the model has an optimizer already."""
        return self._take_optimizer(ShardedAdamW, options)

    def of_torch(self, kind: type[Optimizer], **options: Any) -> ShardedOptimizer:
        """Makes an optimizer of torch, or one written like these, over the rows that this rank keeps:

            optimizer = handle.of_torch(torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=1.0)

        It computes what `kind(model.parameters(), **options)` would with the mean gradient of all ranks.
        Parameters of lower precision are updated as fp32 masters. A norm that it takes of a weight or an
        update is that of the whole one (cut.py); what else mixes elements of a cut weight is refused.
        options: those of `kind`, and max_norm and nonfinite of `ShardedOptimizer`.

        Raises ValueError if the model has an optimizer already; TypeError if `kind` is no optimizer."""
        return self._take_optimizer(ShardedTorchOptimizer, {"kind": kind, **options})

    def _users_optimizer(self) -> UsersOptimizer:
        """Serves the user's own optimizers, if the handle has made none."""
        if self.optimizer is None:
            assert isinstance(self._gradients, GradientReducer)
            self.optimizer = UsersOptimizer(self._shards(), self._gradients.has_some)
        assert isinstance(self.optimizer, UsersOptimizer)
        return self.optimizer

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the `.grad` of a parameter; see plain.py. Raises RuntimeError if the handle's own optimizer
        has it."""
        assert isinstance(self._gradients, GradientReducer)
        if not parameter.requires_grad or (self.optimizer is None and not self._gradients.has_some()):
            return None
        if self.optimizer is None or isinstance(self.optimizer, UsersOptimizer):
            self._gradients.check_complete()
            return self._users_optimizer().gradient(parameter)
        if not self._gradients.has_some():
            return None
        raise RuntimeError(
            f"The gradient of {parameter.sharded_as} {list(parameter.shape)} was read, but it is not in "
            "`.grad`: the handle's optimizer sends it to the ranks that keep its rows. Clip by "
            "handle.adamw(max_norm=...), whose step() returns the norm."
        )

    def takes_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Takes a `.grad` that was set; returns whether this handle keeps it. If a gradient is whole, every
        rank must set one, and their mean counts.

        Raises RuntimeError if the handle has an optimizer of its own."""
        if not parameter.requires_grad:
            return False
        if self.optimizer is not None and not isinstance(self.optimizer, UsersOptimizer):
            if gradient is None:
                return False
            raise RuntimeError(
                f"`.grad` of {parameter.sharded_as} was set, but the optimizer of its handle takes gradients "
                "only from backward(). (get_optimizer_state_dict() and get_state_dict() of torch set them "
                'to make states: save {"model": handle, "optimizer": optimizer} by DCP instead.)'
            )
        assert isinstance(self._gradients, GradientReducer)
        if gradient is None and self.optimizer is None and not self._gradients.has_some():
            return False
        self._gradients.check_complete()
        self._users_optimizer().set_gradient(parameter, gradient)
        return True

    def bring(self, parameter: nn.Parameter) -> None:
        """Gathers a parameter that is about to be copied."""
        self._gatherer.bring(parameter)

    def before_step(self, optimizer: Optimizer) -> None:
        """Runs before the step of a torch optimizer that holds parameters of the model.

        Raises ValueError if the handle has an optimizer of its own."""
        if self.optimizer is not None and not isinstance(self.optimizer, UsersOptimizer):
            raise ValueError(
                f"This {type(optimizer).__name__} holds parameters of a sharded model, and their gradients "
                f"go to the optimizer of its handle, {type(self.optimizer).__name__}; take one of the two."
            )
        self._users_optimizer().before_step(optimizer)

    def after_step(self, _optimizer: Optimizer) -> None:
        """Runs after such a step."""
        if isinstance(self.optimizer, UsersOptimizer):
            self.optimizer.after_step(_optimizer)

    def _take_optimizer(self, made_by: Callable[..., Any], options: dict[str, Any]) -> Any:
        if self.optimizer is not None:
            raise ValueError(
                "This model has an optimizer already: call this before the first backward pass, and before "
                "another optimizer steps."
            )
        self.optimizer = made_by(self._shards(), **options)
        return self.optimizer

    def _shards(self) -> Shards:
        return Shards(self._weights, self.axes, self._finish_gradients, self._gatherer, self.zero_grad)

    def _note_failed_forward(self) -> None:
        for axes in self._axes_of.every:
            if self.stage == 3:  # weights are gathered in all passes
                axes.note_failed_pass(of_weights=True)
            elif torch.is_grad_enabled():  # without gradients a rank may evaluate by itself
                axes.note_failed_pass()

    def _finish_gradients(self) -> None:
        is_users = isinstance(self.optimizer, UsersOptimizer)
        is_whole = all(axes.shard.size == 1 for axes in self._axes_of.every)
        self._written.check(counts=is_users and is_whole)
        self._gradients.finish()
        if self.compressor is not None:
            self.compressor.end_step()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Makes backward passes within it add to the gradients and send nothing. With several ranks the sums
        are fp32."""
        return self._gradients.accumulate()

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Encloses a step whose gradients come in several backward passes, each the last one of some
        parameters, as those of a pipeline's stages. A pass that is followed by another of the same parameters
        still runs within `accumulate()`."""
        return self._gradients.passes()

    def add_product(
        self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool, later: bool = False
    ) -> None:
        """Adds dY^T X to the gradient of a linear weight, within `passes()`. last: the gradient is complete,
        and leaves in its turn. later: the value that the weight's sink got (pyruntime/nn/weight_sinks.py);
        if true, the product may be multiplied under waits."""
        self._gradients.add_product(weight, dy, x, last, later)

    def add_gradient(self, weight: nn.Parameter, gradient: Tensor, last: bool) -> None:
        """Adds a gradient within `passes()`, of a weight whose gradients autograd does not give. last: see
        `add_product`."""
        self._gradients.add_gradient(weight, gradient, last)

    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> Callable[[], None] | None:
        """Begins to multiply, under waits, a product that is added later in the step. The returned function
        adds it. Returns None if `add_product` has to do it."""
        return self._gradients.begin_product(weight, dy, x)

    def complete(self) -> None:
        """Gathers the model's parameters; all are whole and current when it returns. Every rank calls it."""
        self._gatherer.complete()

    @contextlib.contextmanager
    def writes(self) -> Iterator[None]:
        """Allows writes into the model's parameters and buffers. Afterwards rows and master weights have what
        the first rank has written; moments stay. Every rank enters and leaves it."""
        self._begin_writes()
        yield
        self._end_writes()

    def _begin_writes(self) -> None:
        if self.optimizer is not None:
            self.optimizer.take_back()
        self.complete()

    def _end_writes(self) -> None:
        self._written.restore()
        begin_alike(self.model, self._axes_of)
        for each in (*self._weights, *self._frozen):
            each.take_parameters()
        if self.optimizer is not None:
            self.optimizer.take_rows()
        self._gatherer.loaded()
        self._written.accept()

    def zero_grad(self) -> None:
        """Drops the gradients of this step: those of `accumulate()`, and those of a finished pass. Every rank
        calls it.

        Raises RuntimeError if the optimizer has updated with them already (max_norm=0 and
        nonfinite="ignore")."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                set_gradient(parameter, None)
        if not isinstance(self._gradients, GradientReducer):
            return
        were_reduced = self._gradients.drop()
        if self.optimizer is not None and (were_reduced or isinstance(self.optimizer, UsersOptimizer)):
            self.optimizer.drop_gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the weights as DTensors over this rank's shards. Values loaded into them reach the model
        with its next forward pass, on every rank, or with `loaded()`."""
        return self._handed.out(weights_state(self._weights))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads what `state_dict()` of a model with the same parameters returned. Every rank calls it.

        Raises ValueError for other names or shapes."""
        load_into(weights_state(self._weights), state, "This model")
        self._take_loaded(True)

    def _take_loaded(self, weights: bool = False) -> None:
        """Carries what was loaded into tensors of state dicts to rows, masters and all ranks, before a
        forward pass. weights: weights were loaded, whatever their tensors' versions say."""
        if isinstance(self.optimizer, UsersOptimizer):
            self.optimizer.send_written()
        weights = weights or self._handed.was_written()
        if self.lacks_values and not weights:
            raise RuntimeError(
                "This model began on meta, and no values have been loaded into it: call "
                "handle.load_pretrained(folder), or load into handle.state_dict() by DCP, on every rank."
            )
        if self.optimizer is not None:
            if self.optimizer.handed.was_written():
                self.optimizer.loaded(self.optimizer.handed.tensors)
            elif weights:
                self.optimizer.take_back()
                self.optimizer.take_rows()
            self.optimizer.handed.forget()
        if weights:
            self.loaded()
        self._handed.forget()

    def loaded(self) -> None:
        """Updates the parameters after a write into the tensors of `state_dict()`."""
        self._handed.forget()
        self._gatherer.loaded()
        self.lacks_values = False

    def take_from_first(self, names: Sequence[str]) -> None:
        """Takes parameters that only the first rank had when the model was sharded; see meta.py."""
        assert self.axes.shard.mesh is not None
        take_from_first([*self._weights, *self._frozen], names, self.axes.shard.mesh)
        self._values_came()

    def load_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Loads the weights of a Hugging Face folder of safetensors; each rank reads only its own rows.
        Moments of an optimizer stay, master weights follow. Every rank calls it.

        Raises ValueError or OSError if the folder lacks a weight, or holds one of another shape."""
        if self.optimizer is not None:
            self.optimizer.take_back()
        read_rows([*self._weights, *self._frozen], Path(folder))
        if self.optimizer is not None:
            self.optimizer.take_rows()
        self._values_came()

    def _values_came(self) -> None:
        self.loaded()
        self._written.accept()

    def close(self) -> None:
        """Restores the model, with its current weights; it can be sharded again. Every rank calls it."""
        for axis in flight_axes(self._axes_of.every):
            axis.complete_all()
        if isinstance(self.optimizer, UsersOptimizer):
            self.optimizer.is_closed = True
        for hook in self._load_hooks:
            hook.remove()
        del self.model.zero_grad
        self._gatherer.close()
        self._gradients.close()
        unpatch_linears(self._patched)
        for each in (*self._weights, *self._frozen):
            for parameter in each.bucket.parameters:
                unmark(parameter)

    def _hand_to_optimizer(self, bucket: Bucket, gradient: Tensor, is_whole: bool) -> None:
        marks = None if is_whole else bucket.got(gradient)
        self._take(bucket, bucket.views(gradient, bucket.axes.shard.rank), marks)

    def _take(self, bucket: Bucket, rows: Sequence[Tensor | None], marks: Tensor | None = None) -> None:
        if self.optimizer is None and not isinstance(self._gradients, GradientReducer):
            raise RuntimeError("Gradients came before the model had an optimizer; call handle.adamw() first.")
        (self.optimizer or self._users_optimizer()).take(bucket, rows, marks)
