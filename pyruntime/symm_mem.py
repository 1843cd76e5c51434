"""Runs torch's symmetric-memory operators (`torch.ops.symm_mem`) with the primitives of this package.

    import pyruntime.symm_mem

The import makes `torch.ops.symm_mem` accept CPU tensors, for which torch has no implementation:

    fused_all_gather_matmul(A_shard, [B, ..], gather_dim, group_name, return_A=True)
        A = gather(A_shard) along gather_dim; returns A [.., K] or None, and [A @ B, ..], B [K, N]
    fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
        this rank's part, along scatter_dim, of the sum ("sum") or mean ("avg") over ranks of A @ B
    _low_contention_all_gather(tensor, group_name)
    _low_contention_reduce_scatter(tensor, reduce_op, group_name)
        along dimension 0; both are complete when they return
    get_remote_tensors(tensor, group_name)
        the tensor of that shape on every rank, in its symmetric memory

Shapes, strides and defaults are torch's. Dtypes are fp32, bf16, fp16 and fp64; the low-contention all-gather
takes any. All except get_remote_tensors have gradients.

Raises ValueError for shapes, dimensions and reduce_ops that do not fit or that differ between ranks;
TypeError for dtypes; CommTimeout and PeerLost when a peer is late or gone
(`pyruntime.comm.set_deadline(group_name, seconds)`); NotImplementedError for the variants with scales.

inductor's micro-pipeline pass (`torch._inductor.config._micro_pipeline_tp`) puts the fused operators into a
compiled DTensor model, as it does on GPUs. torch runs it only if it was built with NCCL, and only for groups
named to torch.distributed._symmetric_memory.enable_symm_mem_for_group. For CPU tensors it runs here without
NCCL, and for every group if none was named.

Source: torch/distributed/_symmetric_memory/__init__.py and torch/_inductor/fx_passes/micro_pipeline_tp.py of
torch 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.compiler
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem  # defines the operators
from torch._inductor.fx_passes import micro_pipeline_tp

from pyruntime.comm.core import _C

__all__ = ["use_on"]

_patching = threading.RLock()


def use_on(device: str) -> None:
    """Replaces torch's operators by ours for tensors on `device` ("cuda") too.

    The variants with scales and get_remote_tensors stay torch's there. It cannot be undone in a process.
    Raises RuntimeError if torch does not know the device.
    """
    _C.use_symm_mem_operators(device)


@contextmanager
def _as_if_on_gpus() -> Iterator[None]:
    """Tells the pass that NCCL is there and the group was named; it uses no more of either."""
    with _patching:
        has_nccl, was_named = dist.is_nccl_available, torch_symm_mem.is_symm_mem_enabled_for_group
        dist.is_nccl_available = lambda: True
        if not torch_symm_mem._is_test_mode:  # torch 2.15 checks for an accelerator, not for names
            named = torch_symm_mem._group_name_to_store
            torch_symm_mem.is_symm_mem_enabled_for_group = lambda name: not named or name in named
        try:
            yield
        finally:
            dist.is_nccl_available, torch_symm_mem.is_symm_mem_enabled_for_group = has_nccl, was_named


def _on_the_cpu_too(
    fuse: Callable[[Any], None], operand: Callable[[Any], Any], products: Callable[[Any], list[Any]]
) -> Callable[[Any], None]:
    """Returns `fuse`, a step of the pass, for matches of CPU tensors too, except products with scales, which
    have no CPU implementation."""

    def step(match: Any) -> None:
        if operand(match).meta["val"].device.type != "cpu":
            fuse(match)
        elif not any(isinstance(each, micro_pipeline_tp._ScaledMatmul) for each in products(match)):
            with _as_if_on_gpus():
                fuse(match)

    return step


def _let_inductor_fuse() -> None:
    consumers, producer = micro_pipeline_tp._find_consumer_matmuls, micro_pipeline_tp._find_producer_matmul
    micro_pipeline_tp.fuse_all_gather_matmul = _on_the_cpu_too(
        micro_pipeline_tp.fuse_all_gather_matmul,
        lambda match: match.shard_node,
        lambda match: consumers(match.res_node),
    )
    micro_pipeline_tp.fuse_matmul_reduce_scatter = _on_the_cpu_too(
        micro_pipeline_tp.fuse_matmul_reduce_scatter,
        lambda match: match.input_node,
        lambda match: [producer(match.input_node)],
    )
    # Code that was compiled and cached without these patches must not be reused.
    torch.compiler.config.cache_key_tag += "pyruntime.symm_mem"


use_on("cpu")
_let_inductor_fuse()
