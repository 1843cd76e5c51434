"""AdamW on shards, with Muon for some matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pyruntime.choices import Rounding, check_value, values
from pyruntime.data_parallel.bucket_weights import BucketWeights
from pyruntime.data_parallel.buckets import BucketPart
from pyruntime.data_parallel.muon import Matrix, Muon
from pyruntime.data_parallel.offload import Offload, offloaded
from pyruntime.data_parallel.optimizer import ShardedOptimizer, Shards, Shared
from pyruntime.data_parallel.update import Decay, PartState, Resident, Update


class ShardedAdamW(ShardedOptimizer):
    """AdamW over the shards of a model, made by `Sharded.adamw`. Moments are fp32. Parameters of lower
    precision have fp32 master weights, or none and stochastic rounding.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2        (Loshchilov and Hutter 2019)
        w = w (1 - lr * decay) - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    If the step before was not clipped, a step is taken ahead of its norm, bucket by bucket during the
    backward pass; if that was wrong, it is taken again. The results are those of a step after the norm, bit
    by bit.

    The defaults are those of language models, not torch's: betas (0.9, 0.95), decay 0.1 of matrices only.
    Options beside those of `ShardedOptimizer`:

        weight_decay: decay of matrices (vectors do not decay); or a dict by name in the state dict, with 0
            for names that it does not have.
        rounding: how bf16 weights are rounded. "nearest": from fp32 master weights. "stochastic": without
            masters (4 bytes a parameter less): up or down at random so that the mean is exact, the same way
            at every stage and number of data-parallel ranks.
        muon: the matrices that Muon updates in place of AdamW, with the same lr, weight_decay and max_norm;
            the norm is then always computed.
        offload: keeps moments and masters outside the memory of the rows' device; not with muon. None: there.

    Raises ValueError for what ShardedOptimizer refuses, another `rounding`, names in weight_decay that no
    parameter has, and matrices that Muon cannot update; OffloadError if there is no room for `offload`.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: Decay = 0.1,
        rounding: Rounding = "nearest",
        muon: Muon | None = None,
        offload: Offload | None = None,
        shared: Shared | None = None,
        **options: Any,
    ):
        check_value("rounding", rounding, values(Rounding))
        if muon is not None and offload is not None:
            raise ValueError("Muon reads whole momenta, which stay resident; leave out offload, or muon.")
        for each in shards.weights if rounding == "stochastic" else ():
            if each.bucket.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(
                    f"{each.bucket.name} is {each.bucket.dtype}, but stochastic rounding needs bfloat16 "
                    'weights; use rounding="nearest".'
                )
        decay = _named_decay(weight_decay, shards.weights) if isinstance(weight_decay, dict) else weight_decay
        home = Resident() if offload is None else offloaded(offload, shards.weights[0].bucket.device)
        super().__init__(
            shards,
            Update(betas, eps, rounding, 1.0 / shards.axes.size, home),
            _states(shards, decay, rounding, muon, shared or {}, home),
            group={"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            momentum=0.0 if muon is None else muon.momentum,
            shared=shared,
            **options,
        )


def _states(
    shards: Shards, decay: Decay, rounding: Rounding, muon: Muon | None, shared: Shared, home: Resident
) -> dict[int, list[PartState]]:
    """Returns the states of every bucket's parts, by id of the bucket."""
    weights = shards.weights
    stacks = {} if muon is None else {id(parameter): parts for parameter, parts in muon.stacks.items()}
    matrices = {id(parameter) for parameter in ([] if muon is None else muon.matrices)} | stacks.keys()
    known = {id(parameter) for each in weights for parameter in each.bucket.parameters}
    if not matrices <= known:
        raise ValueError(
            f"{len(matrices - known)} of the matrices for Muon are no trainable parameters of the model."
        )
    made: dict[int, list[PartState]] = {}
    for each in weights:
        made[id(each.bucket)] = states = []
        for part, rows in zip(each.bucket.parts, each.rows, strict=True):
            parameter = each.bucket.parameters[part.owner]
            is_muons = id(parameter) in matrices
            if is_muons:
                _check_matrix(parameter, part, rounding, shared, 3 if id(parameter) in stacks else 2)
            moments = ("momentum",) if is_muons else ("exp_avg", "exp_avg_sq")
            state = PartState(each.bucket, part, rows, decay, rounding == "nearest", moments, home)
            home.add(state)
            if id(parameter) in stacks:
                state.matrices = Matrix.of_stack(state, stacks[id(parameter)])
            elif is_muons:
                state.matrices = (Matrix.of(state, state.axes.shard.size),)
            states.append(state)
    return made


def _check_matrix(
    parameter: nn.Parameter, part: BucketPart, rounding: Rounding, shared: Shared, dims: int
) -> None:
    found = f"{part.key} is {list(parameter.shape)} {parameter.dtype} on {parameter.device}"
    if parameter.dim() != dims:
        what = "matrices" if dims == 2 else "stacks of matrices [E, m, n] as experts'"
        raise ValueError(f"{found}, and Muon updates only {what}; leave it to AdamW.")
    if rounding != "nearest":
        raise ValueError(f'rounding="{rounding}" needs AdamW, and Muon updates {part.key}; use "nearest".')
    layout = getattr(parameter, "tp_layout", None)
    if layout is not None and layout.group.size > 1 and any(each.is_in_blocks for each in layout.parts):
        raise ValueError(
            f"{part.key} is cut over {layout.group} unequally, or as several matrices, and Muon takes one "
            "matrix in equal parts; leave it to AdamW."
        )
    if parameter in shared:
        raise ValueError(f"{part.key} is shared with another part of the model; leave it to AdamW.")


def _named_decay(decay: dict[str, float], weights: Sequence[BucketWeights]) -> dict[str, float]:
    """Returns the decay by parameter name; the prefix of torch.compile's wrapper does not count."""
    named = {name.replace("_orig_mod.", ""): value for name, value in decay.items()}
    keys = {part.key.replace("_orig_mod.", ""): part.key for each in weights for part in each.bucket.parts}
    if unknown := [name for name in named if name not in keys]:
        raise ValueError(
            f"weight_decay names {', '.join(unknown[:5])}, and no trainable parameter of the model has that "
            f"name; its first ones are {', '.join(list(keys)[:5])}."
        )
    return {keys[name]: value for name, value in named.items()}
