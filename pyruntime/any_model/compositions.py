"""Refuses a composition of parallel layers whose placements do not fit, before anything is computed or sent.

`check_composition` runs a model's forward pass on the meta device. A layer there only checks its input and
gives a result of the right shape, both by the signature that explain() prints. Between layers the placement
of every tensor follows from the functions of torch that made it, as an operator's does in OneFlow (Yuan et
al. 2021, arXiv 2110.15032, section 3):

    element by element   all operands alike; B beside S(d) where it has one element along d
    a sum over d         P of S(d); terms of a sum may be added, scaled by B, and viewed
    a maximum over d     P(max) of S(d); terms of a maximum may be viewed, and their maximum taken
    a softmax, norm, ..  over d needs all of d, and refuses S(d)
    a matrix product     P of S and S along what is contracted; S of S and B along anything else"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyruntime.any_model.comparing import forwards
from pyruntime.any_model.explain import Layer
from pyruntime.any_model.follow_placements import Followed, Placed, at_dim
from pyruntime.nn.cut import memory_of
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from pyruntime.nn.module import LayerHook, Step
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.parameters import TensorGroup
from pyruntime.nn.signatures import Operand, signature_of
from pyruntime.ops.placements import PlacementError


def check_composition(
    model: nn.Module, args: Sequence[Tensor], placements: Sequence[str] = ()
) -> tuple[str, ...]:
    """Raises PlacementError where a module or a function is given a tensor whose placement does not fit: the
    message names the module, what it needs, what it gets, and what to do. Communicates nothing; one rank may
    call it alone.

    model: made of pyruntime.nn's layers, all over one group, and any other modules. args: tensors of one
    call, of this rank; only their shapes and dtypes are read. placements: one for each of them, as
    pyruntime.ops.conversions writes them; (): all B.

    Returns the functions that it cannot follow, as "MODULE: FUNCTION"; behind them nothing is checked. Raises
    ValueError for a model that it cannot follow at all. Code that reads values fails, as always on meta."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Layer)}
    group = _group_of(layers)
    if placements and len(placements) != len(args):
        raise ValueError(
            f"{len(args)} arguments were given with {len(placements)} placements; name one for each, or none."
        )
    if group is None or group.size == 1:
        return ()
    followed = Followed(group)
    names = {layer: name or type(layer).__name__ for name, layer in layers.items()}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: memory_of(each).detach().to("meta") for name, each in tensors.items()}
    for name, each in state.items():
        layout = getattr(tensors[name], "tp_layout", None)
        if layout is not None and layout.dim is not None:
            whole = sum(part.shape[layout.dim] for part in layout.parts)
            followed.mark(each, Placed(f"S({layout.dim})", whole))
    given = [each.detach().to("meta") for each in args]
    for tensor, placement in zip(given, placements or ["B"] * len(given), strict=True):
        followed.mark(tensor, Placed.of(placement, tensor, group.size))
    hooks = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda *_, name=name: followed.enter(name)),
            module.register_forward_hook(lambda *_: followed.leave()),
        )
    ]
    noted = [(layer.__dict__, vars(layer).copy()) for layer in names]
    try:
        with (
            torch.no_grad(),
            torch.device("meta"),
            forwards(list(names), lambda layer: _checked(layer, names[layer], followed)),
            followed,
        ):
            functional_call(model, state, tuple(given))
    finally:
        for hook in hooks:
            hook.remove()
        for now, before in noted:
            now.update(before)
    return tuple(dict.fromkeys(followed.unknown))


def _group_of(layers: dict[str, Layer]) -> TensorGroup | None:
    """Returns the group of all layers; None without any."""
    groups = {layer.group.name: layer.group for layer in layers.values()}
    for name, layer in layers.items():
        if type(layer.hook) is not LayerHook:
            raise ValueError(
                f"{name} was made by parallelize(), whose first call compares it with the whole model; pass "
                "a model that is composed of pyruntime.nn's layers."
            )
        if layer.group.y is not None or len(groups) > 1:
            raise ValueError(
                f"{name} is over {layer.group}, and placements are followed over one axis; pass a model "
                "whose layers are all over one group of one dimension."
            )
    return next(iter(groups.values()), None)


def _checked(layer: Layer, name: str, followed: Followed) -> Callable[..., Tensor]:
    """Makes a forward of the layer that checks its inputs and gives an empty result."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if isinstance(args[0], Step):  # a loss that computes with the layer's weight
            return args[0].take()
        operands = signature_of(layer, layer.op_uses()[0])
        given = {"routes": args[1:3]} if isinstance(layer, ParallelExperts) else {}
        for operand in operands[: [each.name for each in operands].index("W")]:
            for x in given.get(operand.name, args[:1]):
                _check(layer, name, operand.name, _needed(layer, operand.placement, x), x, followed)
        with torch._C.DisableTorchFunction():
            rows = args[1] if isinstance(layer, ParallelLinear) and len(args) > 1 else kwargs.get("rows")
            return _result(layer, operands, args[0], rows, followed)

    return forward


def _needed(layer: Layer, placement: str, x: Tensor) -> str:
    if isinstance(layer, RowParallelLinear) and layer.split_input:
        return "B"
    return at_dim(placement, x.dim(), getattr(layer, "dim", 0))


def _check(layer: Layer, name: str, operand: str, needed: str, x: Tensor, followed: Followed) -> None:
    found = followed.of(x)
    if found is None or found.placement == needed:
        return
    advice = f"convert(x, {found.placement!r}, {needed!r}, group) of pyruntime.ops.conversions makes it so"
    features = f"S({x.dim() - 1})"
    if isinstance(layer, RowParallelLinear) and found.placement == "B":
        advice = "leave out gather_output of the layer before it, or set split_input=True"
    elif found.placement == features:
        advice = "put a row-parallel linear between, or set gather_output=True at the layer before it"
    elif {found.placement[0], needed[0]} == {"S", "B"}:
        advice = f"set sequence_parallel={needed == 'B'} at it, or {advice}"
    raise PlacementError(
        f"{name} ({type(layer).__name__}) needs {operand} {needed}, but gets {found.placement}, "
        f"{list(x.shape)} on this rank; {advice}."
    )


def _result(
    layer: Layer, operands: Sequence[Operand], x: Tensor, rows: int | None, followed: Followed
) -> Tensor:
    """Makes an empty result for x. rows: of all ranks, where the caller gives it."""
    group, found = layer.group, followed.of(x)
    placement, shape = operands[-1].converted or operands[-1].placement, list(x.shape)
    if isinstance(layer, VocabParallelEmbedding):
        shape.append(layer.embedding_dim)
    elif isinstance(layer, ParallelLinear):
        shape[-1] = layer.matrix.shape[0]
    whole = sum(layer.sizes) if isinstance(layer, ColumnParallelLinear) else shape[-1]
    if isinstance(layer, ColumnParallelLinear) and layer.gather_output:
        placement, shape[-1] = "B", whole
    dim = getattr(layer, "dim", 0) % len(shape)
    if operands[0].converted == "B":
        known = found.whole if found is not None else 0
        shape[dim] = rows or known or shape[dim] * group.size
    placement = at_dim(placement, len(shape), dim)
    if placement == f"S({dim})":
        whole = shape[dim]
        shape[dim] = whole // group.size + (group.rank < whole % group.size)
    y = torch.empty(shape, dtype=layer.weight.dtype, device="meta")
    followed.mark(y, Placed(placement, whole if placement[0] == "S" else 0))
    return y
