"""Reports the tier on which every parallel layer ran, why not a faster one, and what else a plan changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace

from torch import nn

from pyruntime.any_model.activations.causal_loss import logits_read
from pyruntime.any_model.activations.fused_norms import fused_norms
from pyruntime.any_model.layer_hooks import ColumnHook, LinearHook
from pyruntime.any_model.plans import LEFT_WHOLE
from pyruntime.comm import transport_of
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.linear import ParallelLinear
from pyruntime.nn.parallel_experts import ParallelExperts
from pyruntime.nn.signatures import bytes_moved, signature_of
from pyruntime.nn.tiers import OpUse, strict_refusal, tier_of
from pyruntime.text import block_name, columns, footnotes

Layer = ParallelLinear | VocabParallelEmbedding | ParallelExperts
_HEAD = (
    *("layer", "pass", "op", "rows", "n", "k", "dtype", "tp", "transport", "asked", "tier"),
    *("why not a faster one", "strict=True would refuse", "placements", "bytes moved"),
)


@dataclass(frozen=True)
class LayerReport:
    """One primitive of one layer, as of the layer's last call.

    rows, n, k: the GEMM of a rank, [rows, k] @ [n, k]^T, with the rows of all ranks; rows is 0 before the
    first call. transport: how chunks travel, "" before the group's first op. asked, tier, reason: the
    requested tier, the one that runs at this shape, and why not a faster one.
    strict: what strict=True would refuse, "" where nothing. placements: of operands and results over the
    ranks, as `pyruntime.ops.conversions` writes them; "P > S(0)" is converted. moved: bytes that all ranks
    together receive for that; 0 for a layer that shares its operator with one above. A head has a line for
    the loss that read its own logits last; a loss that is called on logits without their head has none."""

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
    placements: str
    moved: int


@dataclass(frozen=True)
class Report:
    """The result of `explain`. str() is a table; reasons that several lines share stand below it.

    gave_way: {layer: why the first call made it give or take whole activations}. left_whole: {module or
    parameter: why plan "auto" did not cut it}. packed: {layer: sizes of the parts of its features, each cut
    by itself}. shared: groups of layers that read one input and run as one op where gradients are on. form:
    whether norms and residuals are on a rank's rows, or why not; "" before the first call, and under plans
    other than "auto". norms: {RMS norm to which plan "auto" gave the fused kernel: why its last call ran the
    model's code instead, or ""}. loss: which logits the last loss of a causal model read; "" before the
    first, and where the model's own loss is used."""

    rows: tuple[LayerReport, ...]
    gave_way: Mapping[str, str] = field(default_factory=dict)
    left_whole: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    form: str = ""
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=dict)
    loss: str = ""

    def __str__(self) -> str:
        if not self.rows:
            return "The model has no parallel layer; use pyruntime.nn's or call pyruntime.parallelize first."
        reasons, notes = footnotes([row.reason for row in self.rows])
        rows = (replace(row, reason=reason) for row, reason in zip(self.rows, reasons, strict=True))
        lines = [[str(cell) for cell in astuple(row)] for row in rows]
        table = columns(_HEAD, lines, left=range(len(_HEAD)))
        parts = {name: f"{' + '.join(map(str, sizes))} features" for name, sizes in self.packed.items()}
        packed = _by_reason("cut by its parts", parts)
        gave_way = _by_reason("reads or gives whole activations", self.gave_way)
        kinds = dict.fromkeys(", ".join(map(block_name, names)) for names in self.shared)
        shared = [f"one op for what reads one input: {names}" for names in kinds]
        form = [f"activations: {self.form}"] if self.form else []
        left = _by_reason("left whole", self.left_whole)
        fused = dict.fromkeys(block_name(name) for name, why in self.norms.items() if not why)
        norms = [f"norm by one kernel: {', '.join(fused)}"] if fused else []
        unfused = {name: why for name, why in self.norms.items() if why}
        norms += _by_reason("norm by the model's code", unfused)
        loss = [f"loss: {self.loss}"] if self.loss else []
        return "\n".join([table, *notes, *shared, *form, *norms, *loss, *packed, *gave_way, *left])


def _by_reason(what: str, reasons: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, with its modules. Modules of all blocks are named once."""
    kinds: dict[str, dict[str, None]] = {}
    for name, why in reasons.items():
        kinds.setdefault(block_name(why), {})[block_name(name)] = None
    return [f"{what}: {', '.join(names)}: {why}" for why, names in kinds.items()]


def explain(model: nn.Module) -> Report:
    """Reports every primitive of every parallel layer of `model`, a line each. Communicates nothing.

    The tier is that of the layer's last call. Run a step first, else the line says that the layer has not run
    yet. Raises TypeError where `model` is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain() takes an nn.Module; found: {type(model).__name__}.")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    hooks = {name: layer.hook for name, layer in layers.items() if isinstance(layer.hook, LinearHook)}
    inputs = dict.fromkeys(hook.shared for hook in hooks.values() if isinstance(hook, ColumnHook))
    beside = {layer for each in inputs if each for layer in each.layers[1:]}
    forms = dict.fromkeys(hook.model.form for hook in hooks.values() if hook.model.form)
    return Report(
        tuple(
            _line(name, layer, use, layer in beside)
            for name, layer in layers.items()
            for use in layer.op_uses()
        ),
        {name: hook.gave_way for name, hook in hooks.items() if hook.gave_way},
        {
            f"{prefix}.{name}" if prefix else name: why
            for prefix, module in model.named_modules()
            for name, why in vars(module).get(LEFT_WHOLE, {}).items()
        },
        tuple(tuple(layer.label for layer in each.layers) for each in inputs if each and each.layers),
        "; ".join(form.said for form in forms if form.said),
        {name: layer.packed for name, layer in layers.items() if getattr(layer, "packed", ())},
        fused_norms(model),
        logits_read(model),
    )


def _line(name: str, layer: Layer, use: OpUse, shares: bool) -> LayerReport:
    asked = "collective" if use.collective else layer.tier
    tier, reason, refused = "-", "has not run yet", ""
    if use.collective or layer.last_rows:
        tier, reason = tier_of(layer, use)
        refused = strict_refusal(asked, tier)
    group = use.group or layer.group
    return LayerReport(
        name=name or layer.label,
        when=use.when,
        op=use.op,
        rows=layer.last_rows,
        n=use.n,
        k=use.k,
        dtype=str(layer.weight.dtype).removeprefix("torch."),
        group_size=group.size,
        # Only the kind; `pyruntime.comm.transport_of` also has what was measured of the link.
        transport="-" if group.size == 1 else transport_of(group.name).split(",")[0],
        asked=asked,
        tier=tier,
        reason=reason,
        strict=refused,
        placements=", ".join(map(str, signature_of(layer, use))),
        moved=0 if shares else bytes_moved(layer, use),
    )
