"""shard(): data parallelism for any module, at stages 0 to 3.

| stage | over the dp ranks are cut (Rajbhandari et al. 2020, section 5) |
|---|---|
| 0 | nothing: gradients are summed on every rank |
| 1, 2 | optimizer states and reduced gradients; new weights are gathered under the next forward pass |
| 3 | the weights too, frozen ones among them, but for small ones |
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
from pyruntime.data_parallel.axes import Axes, axes_of
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import Bucket, cut_into_buckets
from pyruntime.data_parallel.checks import (
    check_compression,
    check_kinds,
    check_ranks,
    check_uncompiled,
    check_weight_wire,
    refuse_compiled,
)
from pyruntime.data_parallel.compression.compressor import Compressor
from pyruntime.data_parallel.compression.settings import Compression
from pyruntime.data_parallel.gradients import GradientReducer
from pyruntime.data_parallel.local import LocalGradients
from pyruntime.data_parallel.meta import of_first_rank, read_rows, take_from_first, take_memory
from pyruntime.data_parallel.optimizer import ShardedOptimizer, Shards
from pyruntime.data_parallel.plain import UsersOptimizer
from pyruntime.data_parallel.reduction import launch
from pyruntime.data_parallel.states import weights_state
from pyruntime.data_parallel.touched import tables_of
from pyruntime.data_parallel.weight_gathers import GatherAhead, GatherPerUse
from pyruntime.data_parallel.written import Handed, Written, begin_alike, load_into
from pyruntime.nn.cut import set_gradient
from pyruntime.nn.module import register_with_torch
from pyruntime.nn.weight_sinks import patch_linears, unpatch_linears, weights_with_sinks

_LARGE_BUCKET = (4 << 20) - (64 << 10)  # 4 MiB with its marks and padding: places are powers of two
BUCKET_BYTES = {0: _LARGE_BUCKET, 1: _LARGE_BUCKET, 2: _LARGE_BUCKET, 3: 256 << 10}
"""By stage. Every bucket costs its handshake and half a millisecond of Python
(bench/results/data-parallel.md); at stage 3 what shares its bucket is not cut."""


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
    """Makes `model` train on different data on each rank of `mesh`, beginning with the first rank's weights.

        handle = pyruntime.shard(model, mesh["dp"], stage=2)
        optimizer = handle.adamw(lr=1e-3)
        for batch in micro_batches[:-1]:
            with handle.accumulate():
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()
        optimizer.step()

    Gradients are averaged over the ranks: each computes the mean loss of its own data. An optimizer that is
    made as for any model, torch.optim.AdamW(model.parameters()), works too, and clip_grad_norm_ before it
    (plain.py); the handle's own ones are faster, and bf16 weights have fp32 masters there.

    What is written into the model afterwards reaches the optimizer by `load_state_dict()` or within
    `handle.writes()`; any other write, and parameters that are frozen, thawed, replaced or added, are a
    RuntimeError in the next step. So is a forward pass under torch.compile.

    Args:
        model: anything made of nn.Modules, parallel linears among them. Its parameters with requires_grad
            train. At stage 3 it may be on meta, on every rank or on all but the first (meta.py).
        mesh: one dimension, or two, (replicate, shard), for hybrid sharding; None: this rank alone.
        stage: 0 to 3; see the module's docstring.
        reduce_dtype: what gradients travel as; by default the parameters' dtype. Sums are fp32 in any case.
        bucket_bytes: smaller parameters travel together, up to so much; at stage 3 those that do stay whole.
            By default nearly 4 MiB, at stage 3 256 KiB.
        keep_gathered: at stage 3, so many weights, the first that the forward pass reads, stay whole until
            its backward pass has read them.
        compression: how gradients of matrices travel in fewer bytes, at stages 0 to 2 over one axis of
            several ranks on the CPU (docs/how-to/slow-network.md); None: as they are.
        weight_wire: at stage 3 on the CPU, what matrices that train are rounded to where they are gathered:
            "bf16" or "fp8"; all ranks compute with the rounded values, and update those that they keep.

    Raises ValueError for another stage, a mesh that does not fit it, a mesh with several ranks of a group
    that the model is cut over already, a model without trainable parameters, parameters that are complex,
    not contiguous or have sparse gradients, embeddings with max_norm, ranks whose models differ in names,
    shapes or dtypes, or where nothing can be compressed; TypeError for what is no module or no mesh.
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
    axes = axes_of(mesh, stage)
    if compression is not None:
        check_compression(stage, axes)
    if weight_wire != "same":
        check_weight_wire(weight_wire, stage, axes)
    bucket_bytes = BUCKET_BYTES[stage] if bucket_bytes is None else bucket_bytes
    sent = of_first_rank(model, stage, axes)
    begins_empty = any(p.is_meta for p in model.parameters())
    begin_alike(model, axes, sent)
    if begins_empty:
        device = torch.device(mesh.device_type if mesh is not None else "cpu")
        take_memory(model, device, bucket_bytes)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    buckets = cut_into_buckets(named, axes.shard.size, bucket_bytes)
    frozen: list[Bucket] = []
    if stage == 3:
        fixed = [
            (name, p)
            for name, p in model.named_parameters()
            if not p.requires_grad and p.nbytes >= bucket_bytes and is_ordinary_matrix(p)
        ]
        frozen = cut_into_buckets(fixed, axes.shard.size, bucket_bytes)
    handle = Sharded(
        model, stage, axes, buckets, frozen, reduce_dtype, keep_gathered, compression, weight_wire
    )
    if sent:
        handle.take_from_first(sent)
    handle.lacks_values = begins_empty and not sent
    return handle


class _ZeroGrad:
    """zero_grad() of a sharded model, whose gradients are not in `.grad`."""

    def __init__(self, handle: Sharded):
        self._model, self._handle = handle.model, weakref.ref(handle)

    def __call__(self, set_to_none: bool = True) -> None:
        if (handle := self._handle()) is not None:
            handle.zero_grad()
        type(self._model).zero_grad(self._model, set_to_none)

    def __reduce__(self) -> tuple:
        return getattr, (self._model, "zero_grad")  # a copy of the model has its class's


class Sharded:
    """A model whose gradients, optimizer states and weights are spread over data-parallel ranks. From
    `shard`."""

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        axes: Axes,
        buckets: list[Bucket],
        frozen: list[Bucket],
        reduce_dtype: torch.dtype | None,
        keep_gathered: int,
        compression: Compression | None = None,
        weight_wire: WireFormat = "same",
    ):
        self.model, self.stage, self.axes, self.buckets = model, stage, axes, buckets
        self._weights = [
            BucketWeights(bucket, axes.weights, apart=stage == 3, wire=weight_wire) for bucket in buckets
        ]
        self._frozen = [BucketWeights(bucket, axes.weights, apart=True, frozen=True) for bucket in frozen]
        self._gatherer: GatherPerUse | GatherAhead
        if stage == 3:
            self._gatherer = GatherPerUse(model, self._weights, self._frozen, axes.shard, keep_gathered)
        else:
            self._gatherer = GatherAhead(model, self._weights, axes.shard)
        self.lacks_values = False
        """It began on meta, and nothing has been loaded."""
        self.optimizer: ShardedOptimizer | None = None
        """What `adamw` or `of_torch` has made; else what carries gradients to the user's own."""
        self._gradients: GradientReducer | LocalGradients
        self._patched: list[nn.Linear] = []
        tables = tables_of(model)
        self.compressor = None if compression is None else Compressor(compression, buckets, tables, axes)
        """Where gradients are compressed."""
        if axes.size == 1:
            self._gradients = LocalGradients(buckets, self._take)
        else:
            self._gradients = GradientReducer(
                buckets,
                axes,
                weights_with_sinks(model),
                tables,
                self._gatherer.begin_rest,
                self._on_reduced,
                reduce_dtype,
                launch if self.compressor is None else self.compressor.launch,
            )
            self._patched = patch_linears(model)
        if weight_wire != "same":
            self._gatherer.loaded()  # the first forward pass reads rounded weights too
        self._written, self._handed = Written(model, buckets, alone=axes.size == 1), Handed()
        model.zero_grad = _ZeroGrad(self)
        self._load_hooks = [
            model.register_load_state_dict_pre_hook(lambda *_: self._begin_writes()),
            model.register_load_state_dict_post_hook(lambda *_: self._end_writes()),
            model.register_forward_pre_hook(lambda *_: self._take_loaded()),
        ]
        if axes.size > 1:
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

    def adamw(self, **options: Any) -> ShardedAdamW:
        """The optimizer of this model; there is one. Options and errors are those of `ShardedAdamW`.

        Raises ValueError where the model has an optimizer already.
        """
        return self._take_optimizer(ShardedAdamW, options)

    def of_torch(self, kind: type[Optimizer], **options: Any) -> ShardedOptimizer:
        """Any optimizer of torch, or one that is written as these are, over the rows that this rank keeps:

            optimizer = handle.of_torch(torch.optim.SGD, lr=0.1, momentum=0.9, max_norm=1.0)

        It computes what `kind(model.parameters(), **options)` would with the mean gradient of all ranks;
        parameters of lower precision are updated as fp32 masters. Norms that it takes of a weight or an
        update are of the whole one (cut.py), and what else mixes elements of a weight is refused where the
        weight is cut. options: of `kind`, and max_norm and nonfinite of `ShardedOptimizer`.

        Raises ValueError where the model has an optimizer already; TypeError where `kind` is no optimizer.
        """
        return self._take_optimizer(ShardedTorchOptimizer, {"kind": kind, **options})

    def _users_optimizer(self) -> UsersOptimizer:
        """Where the handle was asked for none."""
        if self.optimizer is None:
            assert isinstance(self._gradients, GradientReducer)
            self.optimizer = UsersOptimizer(self._shards(), self._gradients.has_some)
        assert isinstance(self.optimizer, UsersOptimizer)
        return self.optimizer

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Reads `.grad` of a parameter: see plain.py."""
        assert isinstance(self._gradients, GradientReducer)
        if not parameter.requires_grad or (self.optimizer is None and not self._gradients.has_some()):
            return None
        if self.optimizer is None or isinstance(self.optimizer, UsersOptimizer):
            self._gradients.check_complete()
            return self._users_optimizer().gradient(parameter)
        if not self._gradients.has_some():
            return None
        raise RuntimeError(
            f"The gradient of {parameter.sharded_as} {list(parameter.shape)} was asked for, and the "
            "optimizer of its handle takes it on its way to the ranks that keep its rows, so it is not in "
            "`.grad`; clip by handle.adamw(max_norm=...), whose step() returns the norm."
        )

    def takes_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """`.grad` of a parameter is set; whether it is the rows' now. Of a whole one, which every rank must
        set, the mean over the ranks counts.

        Raises RuntimeError where the handle has an optimizer of its own."""
        if not parameter.requires_grad:
            return False
        if self.optimizer is not None and not isinstance(self.optimizer, UsersOptimizer):
            if gradient is None:
                return False
            raise RuntimeError(
                f"`.grad` of {parameter.sharded_as} was set, and the optimizer of its handle takes gradients "
                "as they come from backward(). (get_optimizer_state_dict() and get_state_dict() of torch do "
                'so, to make states: save {"model": handle, "optimizer": optimizer} by DCP instead.)'
            )
        assert isinstance(self._gradients, GradientReducer)
        if gradient is None and self.optimizer is None and not self._gradients.has_some():
            return False
        self._gradients.check_complete()
        self._users_optimizer().set_gradient(parameter, gradient)
        return True

    def bring(self, parameter: nn.Parameter) -> None:
        """A copy of it is made."""
        self._gatherer.bring(parameter)

    def before_step(self, optimizer: Optimizer) -> None:
        """Hook of torch's optimizers that hold parameters of the model.

        Raises ValueError where the handle has one of its own."""
        if self.optimizer is not None and not isinstance(self.optimizer, UsersOptimizer):
            raise ValueError(
                f"This {type(optimizer).__name__} holds parameters of a sharded model, and their gradients "
                f"go to the optimizer of its handle, {type(self.optimizer).__name__}; take one of the two."
            )
        self._users_optimizer().before_step(optimizer)

    def after_step(self, _optimizer: Optimizer) -> None:
        """Hook of these, too."""
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
        if self.stage == 3:  # weights come in all passes
            self.axes.note_failed_pass(of_weights=True)
        elif torch.is_grad_enabled():  # else a rank may evaluate alone
            self.axes.note_failed_pass()

    def _finish_gradients(self) -> None:
        is_users = isinstance(self.optimizer, UsersOptimizer)
        self._written.check(counts=is_users and self.axes.shard.size == 1)
        self._gradients.finish()
        if self.compressor is not None:
            self.compressor.end_step()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes within add to the gradients, in fp32 where there are several ranks, and send
        nothing."""
        return self._gradients.accumulate()

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Around a step whose gradients come in several backward passes, each the last one of some
        parameters, as those of a pipeline's stages do. Passes that are followed by others of the same
        parameters run within `accumulate()` also here."""
        return self._gradients.passes()

    def add_product(
        self, weight: nn.Parameter, dy: Tensor, x: Tensor, last: bool, later: bool = False
    ) -> None:
        """Adds dY^T X to the gradient of a linear weight, within `passes()`. last: it is complete, and leaves
        when it is its turn. later: as the weight's sink was told (pyruntime/nn/weight_sinks.py); it may be
        multiplied under waits."""
        self._gradients.add_product(weight, dy, x, last, later)

    def begin_product(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> Callable[[], None] | None:
        """Of a product that is added later in the step: begins to multiply it under waits. What is returned
        adds it then. None where it has to be `add_product`."""
        return self._gradients.begin_product(weight, dy, x)

    def complete(self) -> None:
        """All parameters of the model are whole and current when it returns. Every rank calls it."""
        self._gatherer.complete()

    @contextlib.contextmanager
    def writes(self) -> Iterator[None]:
        """Within it the model's parameters and buffers may be written; afterwards rows and master weights
        have what the first rank has written. Moments stay. Every rank enters and leaves it."""
        self._begin_writes()
        yield
        self._end_writes()

    def _begin_writes(self) -> None:
        if self.optimizer is not None:
            self.optimizer.take_back()
        self.complete()

    def _end_writes(self) -> None:
        self._written.restore()
        begin_alike(self.model, self.axes)
        for each in (*self._weights, *self._frozen):
            each.take_parameters()
        if self.optimizer is not None:
            self.optimizer.take_rows()
        self._gatherer.loaded()
        self._written.accept()

    def zero_grad(self) -> None:
        """Drops the gradients of this step: those of `accumulate()`, and those of a pass that is over. Every
        rank calls it.

        Raises RuntimeError where the optimizer has updated with them already (max_norm=0 and
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
        """The weights as DTensors over this rank's shards. What is loaded into them reaches the model with
        its next forward pass, on every rank, or with `loaded()`."""
        return self._handed.out(weights_state(self._weights, self.axes))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What `state_dict()` of a model with the same parameters gave. Every rank calls it.

        Raises ValueError for other names or shapes."""
        load_into(weights_state(self._weights, self.axes), state, "This model")
        self._take_loaded(True)

    def _take_loaded(self, weights: bool = False) -> None:
        """Carries what was loaded into tensors of state dicts to rows, masters and all ranks, before a
        forward pass. weights: those have been."""
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
        """Something was written into the tensors of `state_dict()`: the parameters follow."""
        self._handed.forget()
        self._gatherer.loaded()
        self.lacks_values = False

    def take_from_first(self, names: Sequence[str]) -> None:
        """Parameters that only the first rank had when the model was sharded: see meta.py."""
        assert self.axes.shard.mesh is not None
        take_from_first([*self._weights, *self._frozen], names, self.axes.shard.mesh)
        self._values_came()

    def load_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """The weights of a Hugging Face folder of safetensors; each rank reads its own rows alone. Moments of
        an optimizer stay, master weights follow. Every rank calls it.

        Raises ValueError or OSError where the folder lacks a weight, or holds one of another shape."""
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
        """The model is as it was, with its current weights; it can be sharded again. Every rank calls it."""
        for axis in (self.axes.shard, self.axes.replicate):
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

    def _on_reduced(self, bucket: Bucket, gradient: Tensor) -> None:
        self._take(bucket, bucket.views(gradient, self.axes.shard.rank), bucket.got(gradient))

    def _take(self, bucket: Bucket, rows: Sequence[Tensor | None], marks: Tensor | None = None) -> None:
        if self.optimizer is None and not isinstance(self._gradients, GradientReducer):
            raise RuntimeError("Gradients came before the model had an optimizer; call handle.adamw() first.")
        (self.optimizer or self._users_optimizer()).take(bucket, rows, marks)
