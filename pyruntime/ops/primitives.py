"""The fused primitives: GEMMs that overlap with the communication of their rows.

Rows of an operand are cut over the P ranks of a group as torch.tensor_split cuts them, for any number of rows
and any P: rank r has M_r = M // P + (r < M % P) of M rows. `dim` is the dimension that is cut; all others are
whole. Weights are [N, K], as in nn.Linear. GEMMs accumulate in fp32; sums over ranks run in rank order in
fp32 with one rounding, so results are bitwise the same in every run.

All of them raise ValueError for shapes that do not fit (also if the ranks' calls do not match), TypeError for
dtypes, CommTimeout and PeerLost if a peer is late or gone. They are differentiable once (NotImplementedError
with create_graph=True).

tier    "unfused"   the collective, then the library's GEMM
        "chunked"   the GEMM chunk by chunk, as chunks arrive
        "fused"     one kernel that waits for rows, or sends them, while it multiplies
        "auto"      the tuned tier (docs/how-to/plan-and-tune.md); else chunked if rows travel in chunks, else
                    unfused; the same in every run and on every rank

All tiers send the same data, so each rank may choose its own. A backward takes the tier of its forward. A
number, as in "chunked:4" or "unfused:4", is the number of chunks of each rank's rows over a network; all
ranks must give the same one. A name, as in "fused:large", selects the kernel's tiles, and each rank may
choose its own: "small", "large", and with kernels for Hopper "sm90-small" and "sm90-large", which pass a GEMM
that they cannot run to the portable kernel. The ValueError for an unknown tier lists the valid ones.

"fused" runs all_gather_matmul, matmul_reduce_scatter and their backwards in bf16 and fp16 on GPUs of one
host. Rows must lie in one block (dim 0, or batches of one) and, where they travel, be a multiple of 8 wide.
Otherwise it raises ValueError, and "auto" takes another tier. If other fused kernels, or CUDA graphs with
them, occupy the device, "fused" waits for them. "auto" then takes the chunked tier if fused was tuned;
tier_of says so (docs/how-to/gpus.md).

sums    a second group whose ranks have the same rows but other features (of a column linear's input, or of a
        row linear's output). A column linear's results and a row linear's dX are partial over it; they are
        summed while the next rows are multiplied (docs/explanation/primitives.md). Not with "fused"

wire    format of gathered rows while they travel: "same", "bf16" or "fp8" (docs/how-to/slow-network.md). The
        owner rounds its rows once, and all ranks, itself included, compute with the rounded rows. Sums are
        not rounded. For float32, bfloat16 and float16 on several ranks; all must give the same format. Not
        with "fused", which multiplies rows as they travel
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

    The GEMM starts on this rank's rows and takes the others as they arrive; CPU ranks of one host read them
    in the peers' memory.

        backward   dX_shard [M_r, K] = reduce_scatter(sum_i dY_i @ W_i)      matmul_reduce_scatter
                   dW_i [N_i, K]     = dY_i^T @ gather(X_shard)              runs while the parts of dX travel
                   db_i [N_i]        = sum of dY_i over rows

    On one host X is not kept but gathered again for dW; between hosts it is kept.

    Args:
        x_shard: this rank's rows, [.., M_r, .., K] with M_r at `dim`; fp32, bf16, fp16 or fp64.
        weights: one weight, or a list of weights that share the gather (QKV; gate and up).
        rows: M. None: the ranks exchange their numbers of rows, which costs one more wait on every peer
            (under torch.compile all ranks are then assumed to have the same number).
        bias: one per weight, or None.
        return_gathered: also return gather(X_shard), as the last element of a list.
        keep_gathered: keep gather(X_shard) for the backward: less communication, P times the memory. None:
            if the group's chunks travel between hosts.
        sums: also sum Y_i over its ranks.
        wire: format of the rows of X, for Y and dW alike; the returned or kept gather(X_shard) is rounded.

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

    A chunk leaves as soon as its part of the GEMM is written. So the other ranks' rows are computed first,
    this rank's last.

        backward   dX [M, K] = gather(dY_shard) @ W      all_gather_matmul
                   dW [N, K] = gather(dY_shard)^T @ X
                   db [N]    = sum of gather(dY_shard) over rows, the same on every rank

    Args:
        x: all rows of this rank's columns, [.., M, .., K] with M at `dim`.
        bias: replicated over the ranks.
        sums: a group whose ranks have the same X; dX is also summed over them.
        wire: format of the rows of dY, for dX, dW and db alike.
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

    Each rank reduces its share of the rows; all read the results back chunk by chunk. The backward needs no
    communication: dY is the same on every rank, dX = dY @ W and dW = dY^T @ X.

    sums: a group whose ranks have the same X; dX is summed over them while dW runs.
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
    """Y_i [.., N_i] = X [.., K] @ W_i [N_i, K]^T (+ b_i), for an X that every rank has whole: a column linear
    without sequence parallelism. The forward pass sends nothing.

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
    """Returns the tier that `op` takes now for a GEMM [rows, n] = [rows, k] @ [k, n], and why not a faster.

    op: a primitive's name, or the name with "_backward". rows: rows of the whole operand, over all ranks.
    n, k: sizes of this rank's weights (n of all weights together).
    """
    return _C.explain_tier((op, rows, n, k, dtype, device), group_name(group), tier)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, x W^T + bias, without communication. If the weight has a sink
    (csrc/ops/weight_gradient.h), its backward hands (dY, X) to it."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or x.dim() < 2:
        return F.linear(x, weight, bias)
    return torch.ops.pyruntime.linear(x, weight, bias)
