"""Fake kernels, which return the shapes of the operators' results, for torch.compile and opcheck."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyruntime.comm.groups import group_rank, group_size
from pyruntime.ops.primitives import ROWS_UNKNOWN

for _writes_in_place in (
    "adamw_",
    "adamw_ahead_",
    "add_",
    "attention_block_",
    "attention_block_backward_",
    "cross_entropy_backward_",
    "device_adamw_",
    "rotate_qkv_",
    "weighted_gating_backward_",
):
    torch.library.register_fake(f"pyruntime::{_writes_in_place}", lambda *_, **__: None)


def _share(rows, group: str):
    size, rank = group_size(group), group_rank(group)
    if isinstance(rows, int):
        return rows // size + (1 if rank < rows % size else 0)
    return (rows + size - 1 - rank) // size


def _like(x: Tensor, dim: int, rows, width) -> Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    shape[-1] = width
    return x.new_empty(shape)


def _gathered_rows(x_shard: Tensor, group: str, dim: int, rows):
    even = isinstance(rows, int) and rows == ROWS_UNKNOWN
    return x_shard.shape[dim] * group_size(group) if even else rows


@torch.library.register_fake("pyruntime::all_gather_matmul")
def _(x_shard, weights, biases, group, dim, rows, return_gathered, *_):
    rows = _gathered_rows(x_shard, group, dim, rows)
    outputs = [_like(x_shard, dim, rows, weight.shape[0]) for weight in weights]
    if return_gathered:
        outputs.append(_like(x_shard, dim, rows, x_shard.shape[-1]))
    return outputs


@torch.library.register_fake("pyruntime::all_gather_matmul_backward")
def _(grads, x, gathered, weights, group, dim, need_dx, need_dw, *_):
    outputs = []
    if need_dx:
        outputs.append(_like(grads[0], dim, _share(grads[0].shape[dim], group), weights[0].shape[1]))
    if need_dw:
        outputs += [weight.new_empty(weight.shape) for weight in weights]
    return outputs


@torch.library.register_fake("pyruntime::matmul_reduce_scatter")
def _(x, weight, bias, group, dim, *_):
    return _like(x, dim, _share(x.shape[dim], group), weight.shape[0])


@torch.library.register_fake("pyruntime::matmul_reduce_scatter_backward")
def _(grad_shard, x, weight, group, dim, need_dx, need_dw, need_db, tier, need_others=False, *_):
    outputs = []
    if need_dx:
        outputs.append(x.new_empty(x.shape))
    if need_dw:
        outputs.append(weight.new_empty(weight.shape))
    if need_db:
        outputs.append(weight.new_empty([weight.shape[0]]))
    if need_others:
        blocks, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 : -1])
        others = x.shape[dim] - grad_shard.shape[dim]
        outputs.append(x.new_empty([blocks, others * inner, weight.shape[0]]))
    return outputs


@torch.library.register_fake("pyruntime::matmul_all_reduce")
def _(x, weight, *_):
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


@torch.library.register_fake("pyruntime::replicated_matmul")
def _(x, weights, *_):
    return [x.new_empty([*x.shape[:-1], weight.shape[0]]) for weight in weights]


@torch.library.register_fake("pyruntime::replicated_matmul_backward")
def _(grads, x, weights, group, need_dx, need_dw, *_):
    outputs = [x.new_empty(x.shape)] if need_dx else []
    return outputs + ([weight.new_empty(weight.shape) for weight in weights] if need_dw else [])


@torch.library.register_fake("pyruntime::linear_cross_entropy")
def _(x, weight, labels, scale, group, start, size, ignored, z_loss, chunk_rows, need_dx, need_dw, *_):
    outputs = [scale.new_empty(scale.shape)]
    outputs += [x.new_empty(x.shape)] if need_dx else []
    return outputs + ([weight.new_empty(weight.shape, dtype=scale.dtype)] if need_dw else [])


@torch.library.register_fake("pyruntime::all_gather")
def _(x_shard, group, dim, rows):
    return _like(x_shard, dim, _gathered_rows(x_shard, group, dim, rows), x_shard.shape[-1])


@torch.library.register_fake("pyruntime::reduce_scatter")
def _(x, group, dim):
    return _like(x, dim, _share(x.shape[dim], group), x.shape[-1])


@torch.library.register_fake("pyruntime::all_reduce")
def _(x, group):
    return x.new_empty(x.shape)


@torch.library.register_fake("pyruntime::all_gather_stats")
def _(x, group):
    return x.new_empty([group_size(group), *x.shape])


@torch.library.register_fake("pyruntime::experts")
def _(x, ids, weights, gate_up, down, gate_up_bias, down_bias, group, experts, cut, rows, *form):
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = _gathered_rows(x, group, 0, rows) if cut else x.shape[0]
    routed = torch.library.get_ctx().new_dynamic_size()
    transposed, keeps_inputs = form[1], form[7] if len(form) > 7 else True
    kept = [torch.library.get_ctx().new_dynamic_size(), x.shape[1]] if keeps_inputs else [0]
    return [
        x.new_empty(x.shape),
        x.new_empty([rows, 2 * ids.shape[1]], dtype=precise),
        x.new_empty([routed, gate_up.shape[2 if transposed else 1]]),
        x.new_empty(kept),
    ]


@torch.library.register_fake("pyruntime::experts_backward")
def _(grad, x, table, hidden, kept, gate_up, down, down_bias, *others):
    weights = table.new_empty([x.shape[0], table.shape[1] // 2])
    found = [gate_up.new_empty(gate_up.shape), down.new_empty(down.shape)]
    if down_bias is not None:
        found += [
            gate_up.new_empty([gate_up.shape[0], hidden.shape[1]]),
            down_bias.new_empty(down_bias.shape),
        ]
    needed = [each for number, each in enumerate(found) if others[-2:][number % 2]]
    return [x.new_empty(x.shape), weights, *needed]
