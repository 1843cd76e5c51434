"""Makes plan "auto": transformers' plan of the model where there is one, else one from its data flow.

A linear that holds several (q, k and v; gate and up) is cut part by part. The data flow shows the parts;
transformers' plans would gather its output.

Both kinds of plan are guesses. The first call checks them, and changes linears that cannot stay cut to
"column_gather" and "row_split" (first_call.py)."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping

from torch import nn

from pyruntime.any_model import lora
from pyruntime.any_model.auto.data_flow import Flow, flow_of, parts_of, styles_of
from pyruntime.any_model.auto.transformers_plan import transformers_plan
from pyruntime.any_model.plans import Plan
from pyruntime.nn.linear import features_of, is_transposed
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.parallel_experts import looks_like_experts, why_not
from pyruntime.nn.parameters import shard_bounds
from pyruntime.text import block_name


def auto_plan(model: nn.Module, tp: int, ep: int) -> Plan:
    """Makes the plan for `model` over `tp` ranks, and its experts over `ep`. Reads no weights and exchanges
    nothing. A model without a plan of transformers is run once on a few tokens, or traced by torch.fx.

    Raises ValueError where the model is parallel already, has no linear that can be cut, or has no plan and
    cannot be traced."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            raise ValueError(f"{name} is parallel already; parallelize a model once.")
    styles, left = transformers_plan(model)
    otherwise = "transformers' plan of the model does not name it"
    packed: dict[str, tuple[int, ...]] = {}
    if not any(style.startswith("row") for style in styles.values()):  # no plan, or only one of output heads
        flow = flow_of(model)
        styles, left = _by_flow(model, flow)
        packed = _packed(flow, tp)
        otherwise = "no call of it was seen where the model's data flow was followed"
    elif "row_split" in styles.values() and (seen := _seen(model)) is not None:
        packed = _packed(seen, tp)
        _cut_by_parts(seen, packed, styles)
    _leave_ties(model, styles, left)
    modules = dict(model.named_modules())
    _spread_experts(modules, styles, left)
    for name in list(styles):
        if why := _too_small(modules[name], styles[name], tp, ep):
            del styles[name]
            left[name] = why
    _leave_ties(model, styles, left)
    for name, module in modules.items():
        name = lora.wrapper_of(name)
        if _is_linear(module) and name not in styles:
            left.setdefault(name, otherwise)
    if not any(style not in ("embedding", "experts") for style in styles.values()):
        raise ValueError(
            f"The plan 'auto' has found no linear of this {type(model).__name__} that can be cut"
            f"{_reasons(left)}; pass a mapping such as "
            "{'*.up_proj': 'column', '*.down_proj': 'row'}."
        )
    packed = {name: sizes for name, sizes in packed.items() if styles.get(name) == "column"}
    return Plan("auto", styles, gives_way=True, left_whole=left, packed=packed)


def _seen(model: nn.Module) -> Flow | None:
    """Returns the data flow; None where it cannot be followed, as transformers' plan is right without it."""
    try:
        return flow_of(model)
    except ValueError:
        return None


def _packed(flow: Flow, tp: int) -> dict[str, tuple[int, ...]]:
    """Returns {linear: sizes of its parts} of the linears whose parts `tp` divides."""
    return {name: sizes for name, sizes in parts_of(flow).items() if not any(size % tp for size in sizes)}


def _cut_by_parts(flow: Flow, packed: Mapping[str, tuple[int, ...]], styles: dict[str, str]) -> None:
    """Keeps packed linears, which transformers' plan gathers, and a "row_split" linear cut where the latter
    reads nothing else."""
    for name, sources in flow.reads.items():
        columns = [each for each in sources if styles.get(each) == "column_gather" and each in packed]
        if styles.get(name) == "row_split" and columns and len(columns) == len(sources):
            styles.update(dict.fromkeys(columns, "column") | {name: "row"})


def _by_flow(model: nn.Module, flow: Flow) -> tuple[dict[str, str], dict[str, str]]:
    """Returns ({module: style}, {module that stays whole: why})."""
    styles = styles_of(flow)
    vocabulary = _vocabulary(model, flow.embeddings)
    if vocabulary and vocabulary not in flow.read_elsewhere:
        styles[vocabulary] = "embedding"
    return styles, dict.fromkeys(flow.read_elsewhere, "other code reads its weight")


def _vocabulary(model: nn.Module, embeddings: Iterable[str]) -> str:
    """Returns the token embedding: the one that the model names, else the one with most rows; "" for none."""
    modules = dict(model.named_modules())
    if isinstance(given := getattr(model, "get_input_embeddings", None), types.MethodType):
        return next((name for name in embeddings if modules[name] is given()), "")
    return max(embeddings, key=lambda name: modules[name].num_embeddings, default="")


def _spread_experts(modules: Mapping[str, nn.Module], styles: dict[str, str], left: dict[str, str]) -> None:
    """Adds the experts of mixtures, and why others stay whole."""
    for name, module in modules.items():
        if not looks_like_experts(module):
            continue
        for inside in [key for key in left if f"{key}.".startswith(f"{name}.")]:
            del left[inside]
        if why := why_not(module):
            left[name] = why
        else:
            styles[name] = "experts"


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def _too_small(module: nn.Module, style: str, tp: int, ep: int) -> str:
    """Says why some rank would get nothing; "" where every rank gets a part."""
    module = getattr(module, "base_layer", module)  # inside a linear with adapters
    if style == "embedding":
        size, what = module.weight.shape[0], "its num_embeddings"
    elif style == "experts":
        size, what = module.down_proj.shape[0], "its number of experts"
    else:
        size, what = features_of(module)[not style.startswith("row")], "its features"
    try:
        shard_bounds(size, tp, 0, what)
    except ValueError as error:
        return str(error)
    return ""


def _leave_ties(model: nn.Module, styles: dict[str, str], left: dict[str, str]) -> None:
    """Makes modules that share a parameter all be cut along the same dimension, or none."""
    holders: dict[int, list[str]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    for names in holders.values():
        cut = [name for name in names if name in styles]
        if len(names) == 1 or not cut:
            continue
        for name in names:  # an embedding whose head is cut
            if name not in styles and name not in left and type(modules[name]) is nn.Embedding:
                styles[name] = "embedding"
        dims = {_dim(modules[name], styles[name]) if name in styles else None for name in names}
        if len(dims) > 1 or None in dims:
            for name in names:
                if styles.pop(name, None):
                    others = ", ".join(other for other in names if other != name)
                    left[name] = f"its weight is that of {others} too, which cannot be cut with it"


def _dim(module: nn.Module, style: str) -> int:
    if style == "experts":
        return 0
    return int(style.startswith("row")) ^ int(is_transposed(module))


def _reasons(left: Mapping[str, str]) -> str:
    """Returns " (layers.*.mlp: why; ..)", or ""."""
    kinds = {block_name(name): why for name, why in left.items()}
    shown = [f"{name}: {why}" for name, why in list(kinds.items())[:4]]
    return f" ({'; '.join(shown)}{'; ..' if len(kinds) > 4 else ''})" if shown else ""
