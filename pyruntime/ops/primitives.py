"""The fused primitives.

Rows of an operand are cut over the P ranks of a group as torch.tensor_split cuts them, any number of rows
and any P: rank r holds M_r = M // P + (r < M % P) of M rows. `dim` names the dimension that is cut; every
other dimension is whole. Weights are [N, K], as in nn.Linear. GEMMs accumulate in fp32; sums over
ranks run in rank order in fp32 with one rounding, so results are bitwise the same from run to run.

All of them raise ValueError for shapes that do not fit (also when the ranks disagree on what travels),
TypeError for dtypes, CommTimeout and PeerLost when a peer is late or gone. They differentiate; their
gradients are not differentiable again (NotImplementedError with create_graph=True).

tier    "unfused"   the collective, then the library's GEMM
        "chunked"   the GEMM chunk by chunk, as chunks arrive
        "fused"     one kernel that waits for rows, or sends them, while it multiplies
        "auto"      the tier that was tuned (docs/how-to/plan-and-tune.md), else chunked where rows travel in
                    chunks, else unfused: the same in every run and on every rank

What travels does not depend on the tier, so each rank may take its own. A number, as in "chunked:4" or
"unfused:4", is that of the chunks that each rank's rows travel in over a network; all ranks must give the
same one. A name, as in "fused:large", is that of the kernel's tiles, which each rank chooses for itself:
"small", "large", and where there are kernels for Hopper "sm90-small" and "sm90-large", which leave a GEMM
that they do not take to the portable kernel. A backward takes the tier of its forward. The ValueError for an
unknown tier says which there are.

"fused" is for bf16 and fp16 on the devices of one host: all_gather_matmul, matmul_reduce_scatter and their
backwards, where rows lie in one block (dim 0, or batches of one) and what travels is a multiple of 8 wide.
Elsewhere it raises ValueError, and "auto" leaves it out. Where other fused kernels, or CUDA graphs with some,
hold the device, "fused" waits for them and "auto", where fused was tuned, takes the chunked tier, which
tier_of tells (docs/how-to/gpus.md).

sums    a second group, whose ranks have the same rows of other features (of what a column linear reads, of
        what a row linear writes): what is a part of a sum over it, a column linear's results and a row
        linear's dX, is summed over it while the next rows are multiplied (docs/explanation/primitives.md);
        not "fused"

wire    what rows that are gathered travel as: "same", "bf16" or "fp8" (docs/how-to/slow-network.md). Their
        owner rounds them once, and all ranks compute with the rounded ones, it too; sums travel as they are.
        float32, bfloat16 and float16, several ranks on the CPU, which all give the same
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pyruntime.choices import WireFormat
from pyruntime.comm.core import _C
from pyruntime.comm.groups import Group, group_name

ROWS_UNKNOWN = -1


def _as_lists(weights: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None):
    if isinstance(weights, Tensor):
        return True, [weights], [] if bias is None else [bias]
    return False, list(weights), [] if bias is None else list(bias)


def _name(sums: Group | None) -> str:
    return "" if sums is None else group_name(sums)


def all_gather_matmul(
    x_shard: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group,
    *,
    dim: int = 0,
    rows: int | None = None,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    return_gathered: bool = False,
    keep_gathered: bool | None = None,
    tier: str = "auto",
    sums: Group | None = None,
    wire: WireFormat = "same",
) -> Tensor | list[Tensor]:
    """Y_i [M, N_i] = gather(X_shard [M_r, K]) @ W_i [N_i, K]^T (+ b_i [N_i]), on every rank with its own W_i.

    The GEMM starts on the own rows and takes the others as they arrive; on CPU it reads them in the peers'
    memory.

        backward   dX_shard [M_r, K] = reduce_scatter(sum_i dY_i @ W_i)      matmul_reduce_scatter
                   dW_i [N_i, K]     = dY_i^T @ gather(X_shard)              runs while the parts of dX travel
                   db_i [N_i]        = sum of dY_i over rows

    On one host X is gathered a second time for dW instead of being kept; between hosts it is kept.

    Args:
        x_shard: this rank's rows, [.., M_r, .., K] with M_r at `dim`; fp32, bf16, fp16 or fp64.
        weights: one weight or a list of them, all sharing the gather (QKV; gate and up).
        rows: M. None: the ranks exchange what they hold, which costs one more wait on every peer (under
            torch.compile the rows are then taken to be even).
        bias: one per weight, or None.
        return_gathered: also return gather(X_shard), as the last element of a list.
        keep_gathered: keep gather(X_shard) for the backward: less communication, P times the memory. None:
            where the group's chunks travel between hosts.
        sums: also sum Y_i over its ranks.
        wire: of the rows of X, for Y and dW alike; what is returned or kept of gather(X_shard) is rounded.

    Returns:
        Y, or [Y_1, ..] for a list of weights (and always a list with return_gathered).
    """
    single, weight_list, biases = _as_lists(weights, bias)
    outputs = torch.ops.pyruntime.all_gather_matmul(
        x_shard,
        weight_list,
        biases,
        group_name(group),
        dim,
        ROWS_UNKNOWN if rows is None else rows,
        return_gathered,
        keep_gathered,
        tier,
        _name(sums),
        wire,
    )
    return outputs[0] if single and not return_gathered else outputs


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: Group,
    *,
    dim: int = 0,
    bias: Tensor | None = None,
    tier: str = "auto",
    sums: Group | None = None,
    wire: WireFormat = "same",
) -> Tensor:
    """Y_shard [M_r, N] = this rank's rows of sum over ranks of X [M, K] @ W [N, K]^T (+ b [N], added once).

    A chunk leaves as soon as its part of the GEMM is written: the others' rows are computed first, the
    own ones last.

        backward   dX [M, K] = gather(dY_shard) @ W      all_gather_matmul
                   dW [N, K] = gather(dY_shard)^T @ X
                   db [N]    = sum of gather(dY_shard) over rows, the same on every rank

    Args:
        x: all rows of this rank's columns, [.., M, .., K] with M at `dim`.
        bias: replicated over the ranks.
        sums: X is the same on its ranks: dX is also summed over them.
        wire: of the rows of dY, for dX, dW and db alike.
    """
    return torch.ops.pyruntime.matmul_reduce_scatter(
        x, weight, bias, group_name(group), dim, tier, _name(sums), wire
    )


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    tier: str = "auto",
    sums: Group | None = None,
) -> Tensor:
    """Y [.., N] = sum over ranks of X [.., K] @ W [N, K]^T (+ b [N], added once), on every rank.

    Rows are reduced by an owner each and read back chunk by chunk. The backward needs no communication: dY
    is the same on every rank, dX = dY @ W and dW = dY^T @ X.

    sums: X is the same on its ranks: dX is summed over them, while dW runs.
    """
    return torch.ops.pyruntime.matmul_all_reduce(x, weight, bias, group_name(group), tier, _name(sums))


def replicated_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    tier: str = "auto",
    sums: Group | None = None,
) -> Tensor | list[Tensor]:
    """Y_i [.., N_i] = X [.., K] @ W_i [N_i, K]^T (+ b_i), for an X that every rank holds whole: a column
    linear without sequence parallelism. Nothing travels forward.

        backward   dX   = sum over ranks and i of dY_i @ W_i      matmul_all_reduce
                   dW_i = dY_i^T @ X                              runs while the parts of dX travel

    sums: also sum Y_i over its ranks.
    """
    single, weight_list, biases = _as_lists(weights, bias)
    outputs = torch.ops.pyruntime.replicated_matmul(
        x, weight_list, biases, group_name(group), tier, _name(sums)
    )
    return outputs[0] if single else outputs


def tier_of(
    op: str,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    group: Group,
    tier: str = "auto",
    device: str = "cpu",
) -> tuple[str, str]:
    """The tier that `op` takes now for a GEMM [rows, n] = [rows, k] @ [k, n], and why not a faster one.

    rows: of the whole operand, over all ranks. n, k: of this rank's weights (n of all of them together).
    op: a primitive's name, or that with "_backward".
    """
    return _C.explain_tier((op, rows, n, k, dtype, device), group_name(group), tier)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias without communication, as torch.nn.functional.linear, whose backward hands (dY, X) over to
    whoever asked for the weight's (csrc/ops/weight_gradient.h)."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or x.dim() < 2:
        return F.linear(x, weight, bias)
    return torch.ops.pyruntime.linear(x, weight, bias)
