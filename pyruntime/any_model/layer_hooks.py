"""The hooks that parallelize() gives to layers. A hook turns what the model's code passes into the layer's
input, and the layer's result into what that code expects."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pyruntime import ops
from pyruntime.any_model.activations.causal_loss import leave_input, leave_own
from pyruntime.any_model.activations.later_logits import HeadInput, rows_of_chunk
from pyruntime.any_model.activations.row_form import RowForm
from pyruntime.any_model.activations.row_shard import (
    RowGroup,
    RowShard,
    cut_rows,
    from_rows,
    to_rows,
    to_whole,
)
from pyruntime.any_model.activations.shared_input import SharedInput, products
from pyruntime.any_model.activations.when_read import GatheredWhenRead
from pyruntime.any_model.random_streams import RandomStreams
from pyruntime.any_model.regions import Region, mark_whole
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.gather import gather_features
from pyruntime.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyruntime.nn.module import LayerHook
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.parameters import TensorGroup


class CutModel:
    """The state that all hooks of one model share.

    experts: the group over which experts are spread, perhaps another one.
    form: decides whether row linears give rows (activations/row_form.py); None: always whole activations.
    gives_way: whether the first call may make linears give or take whole activations."""

    def __init__(self, group: TensorGroup, experts: TensorGroup, gives_way: bool) -> None:
        self.group, self.experts = group, experts
        self.gives_way = gives_way
        self.form = RowForm(group) if gives_way and group.y is None else None
        self.streams = RandomStreams(group)

    def hook(self, name: str, style: str) -> LayerHook | None:
        """Makes the hook of a layer; None on a single rank, which has the whole model."""
        if self.group.ranks == 1:
            return None
        if style == "embedding":
            return EmbeddingHook(self)
        if style == "experts":
            return ExpertsHook(self)
        kind = RowHook if style.startswith("row") else ColumnHook
        return kind(self, name, whole=style in ("column_gather", "row_split"))


class ModelHook(LayerHook):
    def __init__(self, model: CutModel) -> None:
        self.model = model


class LinearHook(ModelHook):
    """The base of the hooks of linears.

    region: the cut activations that the linear begins (column) or ends (row).
    whole: whether the linear gives (column) or takes (row) whole activations instead; gave_way: why the first
    call made it so, "" where it did not.
    checked: the modes, training (True) or evaluation (False), whose first call was compared (first_call.py);
    in_check: whether a call is being compared now."""

    def __init__(self, model: CutModel, label: str, *, whole: bool = False) -> None:
        super().__init__(model)
        self.region = Region(label, model.group, model.streams)
        self.whole = whole
        self.gave_way = ""
        self.checked: set[bool] = set()
        self.in_check = False


class ColumnHook(LinearHook):
    """The hook of a column linear.

    shared: the linears that read the same input, which the first call finds.
    leaves_own: whether the gathered output also carries this rank's features, for the loss.
    has_labels: whether this call of the model has labels, so that the loss may take the input of the head.
    passes: the backward passes of such losses so far."""

    shared: SharedInput | None = None
    leaves_own = has_labels = False
    passes = 0

    def call(self, linear: ColumnParallelLinear, x: Tensor, rows: int | None = None) -> Tensor:
        linear.check_width(x, linear.in_features)
        mark_whole(x)
        if self.has_labels and not self.in_check and rows_of_chunk(linear, x):
            linear.note(x.shape[:-1].numel(), cut_rows=True)
            held = HeadInput(linear, x)
            mark_whole(y := held.logits())
            leave_input(y, held)
            return y
        y, features = None, 0
        if self.shared is not None and (y := self.shared.output(linear, x)) is not None:
            features = self.shared.features
        if y is None:
            (y,) = products([linear], x)
        linear.note(y.numel() // y.size(-1), isinstance(x, RowShard), features)
        return self._gathered(linear, y) if self.whole else self.region.begin(y)

    def _gathered(self, linear: ColumnParallelLinear, own: Tensor) -> Tensor:
        leaves_own = self.leaves_own and not is_compiling()
        # In training the loss reads only each rank's own features.
        as_read = GatheredWhenRead if leaves_own and torch.is_grad_enabled() else None
        y = gather_features(own, linear.group, *linear.sizes, as_read=as_read)
        mark_whole(y)
        if leaves_own and y is not own:
            leave_own(y, linear, own)
        return y


class RowHook(LinearHook):
    def call(self, linear: RowParallelLinear, x: Tensor) -> Tensor:
        if self.whole:
            mark_whole(x)
            x = linear.own_features(x)
        else:
            linear.check_width(x)
            x = self.region.end(x)
        form = self.model.form
        form = form if form is not None and form.gives_rows and x.dim() > 1 else None
        if form is None:
            y = linear.multiply(x)
        else:
            rows = linear.multiply(x.flatten(0, -2), cut_rows=True)
            y = form.shard(rows, (*x.shape[:-1], linear.out_features))
        if linear.group.y is not None:
            y = gather_features(y, linear.group.y, linear.out_features)
        if self.whole:
            mark_whole(y)
            return y
        return self.region.whole(y)


class EmbeddingHook(ModelHook):
    def call(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        group, form = layer.group, self.model.form
        form = form if form is not None and form.begins and ids.dim() > 0 and group.size > 1 else None
        if form is None:
            y = layer.compute(ids)
        else:
            own = layer.own_share(ids, cut_rows=True)
            y = form.shard(ops.reduce_scatter(own.flatten(0, -2), group.name), own.shape)
        if group.y is not None:
            y = gather_features(y, group.y, layer.embedding_dim)
        mark_whole(y)
        return y


class ExpertsHook(ModelHook):
    def call(self, layer: ParallelExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mark_whole(x)
        form = self.model.form
        if form is not None and isinstance(x, RowShard):
            form.reads += 1
            y = form.shard(self._of_own_rows(layer, x, ids, weights, form), x.shape)
        elif layer.has_own_rows:
            y = self._whole(layer, x, ids, weights)
        else:
            y = layer.compute(x, ids, weights)
        mark_whole(y)
        return y

    @torch.compiler.disable(reason="ranks exchange how many rows each sends to the experts")
    def _whole(self, layer: ParallelExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sends this rank's share of the rows of an x that every rank has whole, and gathers the results."""
        over = RowGroup(self.model.group)
        rows = self._of_own_rows(layer, cut_rows(x, over), ids, weights, over)
        return to_whole(from_rows(rows, x.shape, over))

    def _of_own_rows(
        self, layer: ParallelExperts, x: RowShard, ids: Tensor, weights: Tensor, over: RowGroup
    ) -> Tensor:
        """The model's router has read all rows; each rank takes its own."""
        own = to_rows(x), ids.tensor_split(over.group.size)[over.group.rank], to_rows(cut_rows(weights, over))
        if layer.has_own_rows:
            return layer.compute(*own)
        return layer.multiply(*own, cut=True, rows=x.row_count)
