"""Which tier every parallel layer ran on, and why not a faster one."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from torch import nn

from pyruntime.comm import transport_of
from pyruntime.footnotes import footnotes
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.linear import ParallelLinear
from pyruntime.nn.tiers import OpUse, strict_refusal, tier_of

_HEAD = (
    *("layer", "pass", "op", "rows", "n", "k", "dtype", "tp", "transport", "asked", "tier"),
    *("why not a faster one", "strict=True would refuse"),
)


@dataclass(frozen=True)
class LayerReport:
    """One primitive of one layer, as of the layer's last call.

    rows, n, k: the product of a rank, [rows, k] @ [n, k]^T, rows over all ranks; rows is 0 before the first
    call. transport: how chunks travel, "" before the group's first op. asked, tier, reason: the tier asked
    for, the one that runs at this shape, and why not a faster one.
    strict: what strict=True would refuse, "" where nothing."""

    name: str
    when: str
    op: str
    rows: int
    n: int
    k: int
    dtype: str
    group_size: int
    transport: str
    asked: str
    tier: str
    reason: str
    strict: str


@dataclass(frozen=True)
class Report:
    """What `explain` found; str() is a table, with reasons that several lines share below it."""

    rows: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "The model has no parallel layer; use pyruntime.nn's or call pyruntime.parallelize first."
        reasons, notes = footnotes([row.reason for row in self.rows])
        rows = (replace(row, reason=reason) for row, reason in zip(self.rows, reasons, strict=True))
        lines = [_HEAD, *(tuple(str(cell) for cell in astuple(row)) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join([*("  ".join(cells).rstrip() for cells in padded), *notes])


def explain(model: nn.Module) -> Report:
    """A line for every primitive of every parallel layer of `model`. Runs nothing and communicates nothing.

    The tier is that of the layer's last call: run a step first, or the line says that the layer has not run
    yet."""
    lines: list[LayerReport] = []
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            lines += [_linear_line(name, module, use) for use in module.op_uses()]
        elif isinstance(module, VocabParallelEmbedding):
            lines.append(_embedding_line(name, module))
    return Report(tuple(lines))


def _linear_line(name: str, layer: ParallelLinear, use: OpUse) -> LayerReport:
    tier, reason, refused = "-", "has not run yet", ""
    if layer.last_call.rows:
        tier, reason = tier_of(layer, use)
        refused = strict_refusal(layer.tier, tier)
    return LayerReport(
        name=name or layer.label,
        when=use.when,
        op=use.op,
        rows=layer.last_call.rows,
        n=use.n,
        k=use.k,
        dtype=_dtype_name(layer),
        group_size=layer.group.size,
        transport=_transport(layer),
        asked=layer.tier,
        tier=tier,
        reason=reason,
        strict=refused,
    )


def _embedding_line(name: str, layer: VocabParallelEmbedding) -> LayerReport:
    n, k = layer.weight.shape
    return LayerReport(
        name=name or layer.label,
        when="forward",
        op="reduce_scatter" if layer.sequence_parallel else "all_reduce",
        rows=layer.last_call.rows,
        n=n,
        k=k,
        dtype=_dtype_name(layer),
        group_size=layer.group.size,
        transport=_transport(layer),
        asked="collective",
        tier="collective",
        reason="a table look-up has no product to hide a collective under",
        strict="",
    )


def _transport(layer: ParallelLinear | VocabParallelEmbedding) -> str:
    """The kind alone: what was measured of the link stands in `pyruntime.comm.transport_of`."""
    return "-" if layer.group.size == 1 else transport_of(layer.group.name).split(",")[0]


def _dtype_name(layer: ParallelLinear | VocabParallelEmbedding) -> str:
    return str(layer.weight.dtype).removeprefix("torch.")
