"""The experts of a mixture, which ranks share: the operator of `pyruntime.nn.ParallelExperts`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyruntime.comm.groups import Group, group_name
from pyruntime.ops.primitives import ROWS_UNKNOWN


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: Group,
    *,
    experts: int,
    cut: bool = True,
    rows: int | None = None,
    tier: str = "auto",
) -> Tensor:
    """Y_r [M_r, D] = sum over slots j of p_j E_{i_j}(X_r), with E_i(x) = down_i (silu(gate) * up) and [gate |
    up] = gate_up_i x, each row of X computed where its experts are.

    Rows are cut over the group as torch.tensor_split cuts them, experts as torch.chunk does: rank r holds
    E_r = ceil(E / P) of them, the last ranks fewer. Rows are gathered in chunks; the experts take theirs from
    a chunk while the next one comes, and what they make of it leaves when it is summed over a rank's experts.
    On CPUs chunks with few rows for each expert are joined; on one host all are, as nothing need be hidden.
    Sums run in fp32, over a rank's experts in order, then over ranks in order; each part that travels is
    rounded once. No row is dropped, and every rank may get any number of them.

        backward   dX_r       as the forward, with the matrices transposed
                   dp_j       the dot product of an expert's rows before the weight, with down_i^T dY
                   dgate_up_i, ddown_i   over all rows of the expert, by rank; run while dX travels;
                                         zero for an expert without rows

    With cut=False every rank has all rows, and gets all rows of Y: nothing is gathered, and the sums go to
    every rank.

    Args:
        x: this rank's rows [M_r, D], or with cut=False all; fp32, bf16, fp16 or fp64.
        ids: the experts of each row [M_r, k], integers in [0, E), no expert twice in a row; -1 adds nothing.
        weights: the weight p of each, [M_r, k], fp32 (fp64 for fp64 rows).
        gate_up: gate and up of this rank's experts, [E_r, 2 F, D].
        down: this rank's experts' second matrices, [E_r, D, F].
        experts: E, of all ranks.
        cut: whether rows are cut over the group.
        rows: M, of cut rows. None: the ranks exchange their numbers of rows.
        tier: "auto", "chunked" or "unfused", as of the primitives.

    For the backward, gate_up's results [rows of this rank's experts, 2 F] are kept, and between hosts those
    rows. Raises ValueError for shapes that do not fit and ids that are no experts', TypeError for dtypes,
    CommTimeout and PeerLost if a peer is late or gone. On a device the host waits for the ids, once in each
    direction.
    """
    found = torch.ops.pyruntime.experts(
        x,
        ids,
        weights,
        gate_up,
        down,
        group_name(group),
        experts,
        cut,
        ROWS_UNKNOWN if rows is None else rows,
        tier,
    )
    return found[0]
