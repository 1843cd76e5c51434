"""The experts of a mixture, which ranks share: the operator of `pyruntime.nn.ParallelExperts`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyruntime.comm.groups import Group, group_name
from pyruntime.ops.primitives import ROWS_UNKNOWN


@dataclass(frozen=True)
class ExpertForm:
    """How experts join gate and up, and how their matrices lie:

        join(gate, up) = (up' + shift) * gate' * sigmoid(alpha * gate')

    where gate' is gate, but at most `limit`, and up' is up within [-limit, limit]. The defaults are SwiGLU;
    GPT-OSS has alpha 1.702, limit 7 and shift 1."""

    transposed: bool = False
    """Whether gate_up is [E_r, D, 2 F] and down [E_r, F, D]."""
    interleaved: bool = False
    """Whether gate_up gives gate in even columns and up in odd ones, not all of gate first."""
    scales_input: bool = False
    """Whether a row's weight multiplies an expert's input, not its output (Llama 4)."""
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def join(self, gate_up: Tensor) -> Tensor:
        """The definition: [.., 2 F] -> [.., F]."""
        halves = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, -1)
        gate, up = halves[0].clamp(max=self.limit), halves[1].clamp(-self.limit, self.limit)
        return (up + self.shift) * gate * torch.sigmoid(self.alpha * gate)


SWIGLU = ExpertForm()


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
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    form: ExpertForm = SWIGLU,
) -> Tensor:
    """Y_r [M_r, D] = sum over slots j of p_j E_{i_j}(X_r), with E_i(x) = down_i join(gate, up) [+ bias], join
    that of `form`, and [gate | up] = gate_up_i x [+ bias], each row of X computed where its experts are.

    Rows are cut over the group as torch.tensor_split cuts them, experts as torch.chunk does: rank r holds
    E_r = ceil(E / P) of them, the last ranks fewer. Rows are gathered in chunks; the experts take theirs from
    a chunk while the next one comes, and what they make of it leaves when it is summed over a rank's experts.
    On CPUs chunks with few rows for each expert are joined; on one host all are, as nothing need be hidden.

    On devices a row goes only to the ranks that have one of its experts, once to each, and one sum returns
    from each: if a rank needs less than 0.9 of all rows (in causal slices, whose rows travel under other
    work, 0.5), which where all experts are as likely are u = 1 - C(E - E_r, k) / C(E, k), and on rails of L
    ranks a host if u L < 1, so that no more rows cross between hosts. Then the host waits for the numbers
    of rows that ranks send to each other. Tier "unfused" gathers all rows, and so does fp64; all ranks must
    name it or none.

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
        tier: "auto", "chunked" or "unfused", as of the primitives; see above.
        gate_up_bias: [E_r, 2 F], or None.
        down_bias: [E_r, D], where there is gate_up_bias.
        form: see `ExpertForm`. With scales_input, Y sums E_{i_j}(p_j X_r).

    For the backward, gate_up's results [rows of this rank's experts, 2 F] are kept, and between hosts those
    rows. Raises ValueError for shapes that do not fit and ids that are no experts', TypeError for dtypes,
    CommTimeout and PeerLost if a peer is late or gone. On a device the host waits for the numbers of rows of
    this rank's experts, once in each direction, and without kernels (fp64) for all ids.
    """
    found = torch.ops.pyruntime.experts(
        x,
        ids,
        weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        group_name(group),
        experts,
        cut,
        ROWS_UNKNOWN if rows is None else rows,
        tier,
        form.transposed,
        form.interleaved,
        form.scales_input,
        form.alpha,
        form.limit,
        form.shift,
    )
    return found[0]
