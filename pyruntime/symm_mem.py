"""torch's operators of symmetric memory, computed by the primitives of this package.

    import pyruntime.symm_mem

From then on `torch.ops.symm_mem` takes tensors on the CPU, for which torch has no implementation:

    fused_all_gather_matmul(A_shard, [B, ..], gather_dim, group_name, return_A=True)
        A = gather(A_shard) along gather_dim; gives A [.., K] or None, and [A @ B, ..], B [K, N]
    fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
        this rank's part, along scatter_dim, of the sum ("sum") or mean ("avg") over ranks of A @ B
    _low_contention_all_gather(tensor, group_name)
    _low_contention_reduce_scatter(tensor, reduce_op, group_name)
        along dimension 0; complete when they return
    get_remote_tensors(tensor, group_name)
        every rank's tensor of that form, where it lies in symmetric memory

Shapes, strides and defaults are torch's. Dtypes are the primitives', fp32, bf16, fp16 and fp64, and of the
low-contention all-gather any. All but get_remote_tensors differentiate.

Raises ValueError for shapes, dimensions and reduce_ops that do not fit, also where the ranks disagree;
TypeError for dtypes; CommTimeout and PeerLost when a peer is late or gone
(`pyruntime.comm.set_deadline(group_name, seconds)`); NotImplementedError for the variants with scales.

inductor's micro-pipeline pass (`torch._inductor.config._micro_pipeline_tp`) puts the fused operators into
what torch.compile makes of a DTensor model, as it does on GPUs. torch runs it only where it was built with
NCCL, and only for groups that torch.distributed._symmetric_memory.enable_symm_mem_for_group named. For
tensors on the CPU it runs here without NCCL, and for every group where none was named.

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
    """From now on the operators run here for tensors on such devices ("cuda") too, in place of torch's own.

    The variants with scales and get_remote_tensors stay torch's there. Cannot be taken back in a process.
    Raises RuntimeError for what torch knows as no device.
    """
    _C.use_symm_mem_operators(device)


@contextmanager
def _as_if_on_gpus() -> Iterator[None]:
    """The pass asks nothing of NCCL but that it is there, and nothing of a group but that it was named."""
    with _patching:
        has_nccl, was_named = dist.is_nccl_available, torch_symm_mem.is_symm_mem_enabled_for_group
        dist.is_nccl_available = lambda: True
        if not torch_symm_mem._is_test_mode:  # torch 2.15 asks for an accelerator, not for names
            named = torch_symm_mem._group_name_to_store
            torch_symm_mem.is_symm_mem_enabled_for_group = lambda name: not named or name in named
        try:
            yield
        finally:
            dist.is_nccl_available, torch_symm_mem.is_symm_mem_enabled_for_group = has_nccl, was_named


def _on_the_cpu_too(
    fuse: Callable[[Any], None], operand: Callable[[Any], Any], products: Callable[[Any], list[Any]]
) -> Callable[[Any], None]:
    """`fuse`, a step of the pass, for matches of tensors on the CPU too, but for products with scales, which
    are not computed there."""

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
    # What was compiled and kept without all of this is other code.
    torch.compiler.config.cache_key_tag += "pyruntime.symm_mem"


use_on("cpu")
_let_inductor_fuse()
