"""Conversions of a tensor from one placement over a group's ranks to another, and what each moves (Yuan et
al. 2021, arXiv 2110.15032, table 2). Placements are written as there:

    S(d)     sharded: each rank has its own part along dimension d
    B        replicated (broadcast): the same on every rank
    P        partial: each rank has a term of a sum that has not been taken yet
    P(max)   each rank has a term of a maximum that has not been taken yet, as of a softmax over the
    vocabulary

| from \\ to | S(i) | B | P, P(max) |
|---|---|---|---|
| S(i) | 0, or (p - 1) / p T to another dimension | (p - 1) T | 0 |
| B | 0 | 0 | 0 |
| P, P(max) | (p - 1) T | 2 (p - 1) T | 0, or 2 (p - 1) T to the other |

for T elements on p ranks, counted over all ranks. The ledger counts as many where ranks sum by themselves; on
several hosts sums are also taken on the way, and fewer elements travel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pyruntime.comm.all_to_all import AllToAll
from pyruntime.comm.groups import Group, group_name, group_rank, group_size
from pyruntime.ops.collectives import all_gather, all_reduce, reduce_scatter


def moved(source: str, target: str, elements: int, ranks: int) -> int:
    """Returns how many elements all ranks together receive when a tensor of `elements` is converted. Rounded
    down where ranks do not divide it. Raises ValueError for what is no placement."""
    match _kind(source), _kind(target):
        case "S", "S":
            return 0 if source == target else elements * (ranks - 1) // ranks
        case ("S", "B") | ("P" | "P(max)", "S"):
            return (ranks - 1) * elements
        case ("P" | "P(max)", "B") | ("P", "P(max)") | ("P(max)", "P"):
            return 2 * (ranks - 1) * elements
        case _:
            return 0


def convert(x: Tensor, source: str, target: str, group: Group, *, size: int | None = None) -> Tensor:
    """Converts this rank's part of a tensor, which has the placement `source` over the ranks of `group`, to
    `target`. Every rank calls it alike; it moves what `moved` says.

    size: of the whole tensor along the dimension of a source S(d), cut as torch.tensor_split cuts; None:
    equal parts. From S(i) to S(j) the ranks must divide both sizes. S to S, S to P, and what begins or
    ends with P(max) have no gradient.

    Raises ValueError for what is no placement, or does not divide."""
    if has_torch_function_unary(x):
        return handle_torch_function(convert, (x,), x, source, target, group, size=size)
    ranks, rank = group_size(group), group_rank(group)
    kinds = _kind(source), _kind(target)
    if source == target or ranks == 1:
        return x
    match kinds:
        case "S", "S":
            return _to_other_dim(x, _dim(source), _dim(target), _whole(x, source, ranks, size), group)
        case "S", "B":
            rows = _whole(x, source, ranks, size)
            return _by_rows(x, _dim(source), lambda own: all_gather(own, group, rows=rows))
        case "P", "S":
            return _by_rows(x, _dim(target), lambda term: reduce_scatter(term, group))
        case "P", "B":
            return all_reduce(x, group)
        case "P(max)", "S":
            return _by_rows(x, _dim(target), lambda term: _largest(term, group))
        case "P(max)", "B":
            own = _largest(x.reshape(-1, 1), group)
            return all_gather(own, group, rows=x.numel()).view(x.shape)
        case ("P", "P(max)") | ("P(max)", "P"):
            return convert(convert(x, source, "B", group), "B", target, group)
        case "B", "P(max)":  # the maximum of equal terms
            return x
        case "B", "S":
            return x.tensor_split(ranks, _dim(target))[rank]
        case "B", "P":
            return x if rank == 0 else torch.zeros_like(x)
        case _:  # S to P or P(max): the other ranks' parts are terms of zero, or below all others
            dim, shape = _dim(source), list(x.shape)
            shape[dim] = _whole(x, source, ranks, size)
            term = x.new_full(shape, 0.0 if target == "P" else -math.inf)
            term.tensor_split(ranks, dim)[rank].copy_(x)
            return term


def linear_ways(rows: int, features_in: int, features_out: int, ranks: int) -> dict[str, int]:
    """Returns what each way to compute Y = X Wᵀ moves, in elements over all ranks. X [rows, features_in], W
    [features_in, features_out] as it is multiplied, and Y are all S(0).

    gather W: with few weights and many rows. sum Y: each rank multiplies its rows of W by the same columns of
    X. gather X: each rank computes columns of Y."""
    x, w, y = rows * features_in, features_in * features_out, rows * features_out
    return {
        "gather W": moved("S(0)", "B", w, ranks),
        "sum Y": moved("S(0)", "S(1)", x, ranks) + moved("P", "S(0)", y, ranks),
        "gather X": moved("S(0)", "B", x, ranks)
        + moved("S(0)", "S(1)", w, ranks)
        + moved("S(1)", "S(0)", y, ranks),
    }


def _to_other_dim(x: Tensor, of: int, to: int, whole: int, group: Group) -> Tensor:
    ranks = group_size(group)
    for dim, size in ((of, whole), (to, x.shape[to])):
        if size % ranks:
            raise ValueError(
                f"S({of}) to S({to}): dimension {dim} has {size} elements, no multiple of the {ranks} ranks; "
                "go through B."
            )
    parts = torch.stack(x.chunk(ranks, to))  # [ranks, ...], each rank's part
    equal = [1] * ranks
    received = AllToAll(group, group_name(group), parts, equal, equal).wait()
    return torch.cat(list(received), of)


def _largest(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's rows, as torch.tensor_split cuts them, of the maximum of all ranks' x."""
    counts = [len(part) for part in x.tensor_split(group_size(group))]
    own = counts[group_rank(group)]
    received = AllToAll(group, group_name(group), x, counts, [own] * len(counts)).wait()
    return received.view(len(counts), own, *x.shape[1:]).amax(0)


def _by_rows(x: Tensor, dim: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs an operator on rows [size of dim, everything else], as operators cut them."""
    first = x.movedim(dim, 0)
    rows = run(first.reshape(len(first), math.prod(first.shape[1:])))
    return rows.view(len(rows), *first.shape[1:]).movedim(0, dim)


def _whole(x: Tensor, source: str, ranks: int, size: int | None) -> int:
    return x.shape[_dim(source)] * ranks if size is None else size


def _kind(placement: str) -> str:
    if placement in ("B", "P", "P(max)"):
        return placement
    if re.fullmatch(r"S\(\d\)", placement):
        return "S"
    raise ValueError(f"{placement!r} is no placement; write B, P, P(max), or S(0), S(1) and so on.")


def _dim(placement: str) -> int:
    return int(placement[2])
