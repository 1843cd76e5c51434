"""Cuts the linears of any model over a tensor-parallel group, in place."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pyruntime import comm
from pyruntime.any_model import lora
from pyruntime.any_model.activations.causal_loss import read_own_logits
from pyruntime.any_model.activations.fused_norms import fuse_norms
from pyruntime.any_model.auto import auto_plan
from pyruntime.any_model.first_call import FirstCall
from pyruntime.any_model.layer_hooks import CutModel
from pyruntime.any_model.llama4 import route_rows
from pyruntime.any_model.plans import LEFT_WHOLE, Plan, find_plan
from pyruntime.any_model.save_pretrained import save_whole
from pyruntime.comm.exchange import different
from pyruntime.comm.failed_forward import ForwardWatch, NotePasses
from pyruntime.nn.cut import memory_of
from pyruntime.nn.embedding import VocabParallelEmbedding
from pyruntime.nn.linear import ColumnParallelLinear, RowParallelLinear, is_transposed
from pyruntime.nn.module import ParallelModule
from pyruntime.nn.optimizer_states import replaced as replaced_by_shard
from pyruntime.nn.parallel_experts import ParallelExperts, why_not
from pyruntime.nn.parameters import Group, TensorGroup, axis_names
from pyruntime.nn.tiers import check_tier
from pyruntime.nn.wrappers import check_unwrapped


def parallelize(
    model: nn.Module,
    mesh: Group | TensorGroup,
    plan: str | Mapping[str, str] | Plan,
    *,
    experts: Group | TensorGroup | None = None,
    tier: str = "auto",
    strict: bool = False,
) -> nn.Module:
    """Replaces the modules that `plan` names by parallel layers, in place, and returns the model.

    A "column" linear gives only this rank's features, and a "row" linear takes them; the code between the two
    must work feature by feature or head by head (activations, attention). Everywhere else activations stay
    whole on every rank, so the rest of the model needs no change. See plans.py for patterns and styles.

    mesh: the 1-D DeviceMesh, process group or group name to cut over; or a 2-D mesh (x, y), whose second
    dimension cuts, inside of layers, the features that other layers read (docs/explanation/primitives.md).
    Every rank calls with the same full model. plan: "auto" (transformers' plan of the model, or one found
    from its data flow, auto/), a mapping {glob on module names: "column" | "column_gather" | "row" |
    "row_split" | "embedding" | "experts"}, or a plan's name ("llama"). tier, strict: options of every linear,
    see nn.ColumnParallelLinear.

    Whole weights that are read between a column and a row linear (norms over each head, gains, gates) get the
    sum of their gradients over the group (regions.py). The first call in training, and the first in
    evaluation, is compared with the whole model's. It raises ValueError where the plan changes what the model
    computes (first_call.py), and sets the counts of heads that modules keep to the rank's own. Under "auto",
    linears that cannot stay cut give and take whole activations from then on, and `pyruntime.explain` says
    why. `pyruntime.verify` compares a step of both models, with gradients.

    experts: the group over which experts of a mixture are spread, each whole on one rank
    (nn.ParallelExperts): `runtime.ep`; None: `mesh`. Over `runtime.ep` each rank sends its share of the rows,
    and data-parallel ranks, whose rows differ in number and content, may share experts. All ranks of both
    groups then call the model equally often, and `save_pretrained` too; `pyruntime.shard` over
    `runtime.replicas` divides what the gradients of experts sum.

    Tied weights stay tied: if an lm_head shares its weight with the embedding, the plan must name both. A
    linear with peft's LoRA adapters is cut with them. Raises ValueError, before anything is replaced, where a
    pattern matches nothing or a module of another kind, two patterns disagree, tp is too large for a module,
    the plan names only some of the modules that share a weight, the model lies on several devices, the ranks
    hold different models, "auto" finds nothing to cut, another tool has wrapped or cut the model, the mesh
    has an axis that is not tensor-parallel, a mesh of two dimensions meets adapters, linears that are cut
    part by part or `experts`, or no experts can be spread over `experts`. Raises TypeError where an argument
    is not a module, a group or a plan."""
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"parallelize() cuts a model that is built, an nn.Module; found: {found}.")
    group = TensorGroup.of(mesh)
    of_experts = _group_of_experts(experts, group)
    check_tier(tier)
    check_unwrapped(model)
    _check_unsharded(model)
    _check_one_device(model)
    plan = auto_plan(model, group.size, of_experts.size) if plan == "auto" else find_plan(plan)
    plan.check(model, group.size)
    styles = match_modules(model, plan.styles)
    _check_axes(plan, styles, group)
    if experts is not None:
        _check_experts(plan, styles)
    for axis in group.axes:
        check_same_model(model, axis)
    if of_experts is not group:
        check_same_model(model, of_experts)
    cut = CutModel(group, of_experts, plan.gives_way)
    options = {"tier": tier, "strict": strict}
    replaced: dict[str, ParallelModule] = {}
    for name, style in styles.items():
        packed = plan.packed.get(lora.wrapper_of(name), ())
        replaced[name] = _parallel(model.get_submodule(name), name, style, cut, packed, options)
    replaced = _under_all_names(model, replaced)
    _tie(model, replaced)
    for name, module in replaced.items():
        parent, _, leaf = name.rpartition(".")
        for key, parameter in model.get_submodule(name).named_parameters():
            replaced_by_shard(parameter, f"{name}.{key}")
        setattr(model.get_submodule(parent), leaf, module)
    route_rows(model)
    if names := axis_names((group, of_experts)):
        ForwardWatch(model, NotePasses(*names))
    if group.ranks > 1:
        _watch(model, replaced, cut)
        if plan.gives_way:
            read_own_logits(model)
            fuse_norms(model)
    vars(model)[LEFT_WHOLE] = dict(plan.left_whole)
    save_whole(model, group, of_experts)
    return model


def _group_of_experts(asked: Group | TensorGroup | None, group: TensorGroup) -> TensorGroup:
    """Returns the group over which experts are spread."""
    if asked is None:
        return group
    experts = TensorGroup.of(asked)
    if experts.name == group.name:
        return group
    if group.y is not None or experts.y is not None:
        raise ValueError(
            "parallelize() was asked to spread experts over a group of their own beside a mesh of two "
            "dimensions; use a mesh of one dimension."
        )
    if experts.copies is None:
        raise ValueError(
            f"experts={experts} is not the group of the mesh, {group}, and does not say which ranks hold the "
            "same experts; pass runtime.ep of the Runtime whose tp is the mesh."
        )
    return experts


def _check_experts(plan: Plan, styles: Mapping[str, str]) -> None:
    if "experts" in styles.values():
        return
    whole = [f" ({name}: {why})" for name, why in plan.left_whole.items() if "experts" in name.split(".")]
    raise ValueError(
        "parallelize() was given a group for experts, but no experts of this model can be spread"
        f"{whole[0] if whole else ''}; leave out experts=."
    )


def _watch(model: nn.Module, replaced: Mapping[str, ParallelModule], cut: CutModel) -> None:
    """Registers the hooks that compare the first call with the whole model's (first_call.py) and that keep
    random numbers alike (random_streams.py)."""
    holders: dict[nn.Module, None] = {}
    for name in replaced:
        while name:
            name = name.rpartition(".")[0]
            holders[model.get_submodule(name)] = None
    for holder in holders:
        if not any(isinstance(hook, FirstCall) for hook in holder._forward_pre_hooks.values()):
            hook = FirstCall(cut.form if holder is model else None)
            holder.register_forward_pre_hook(hook, with_kwargs=True)
        # torch's fast paths would read weights without calling their layers.
        if isinstance(holder, nn.TransformerEncoderLayer):
            holder.activation_relu_or_gelu = 0
        if isinstance(holder, nn.TransformerEncoder):
            holder.use_nested_tensor = False
    model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
    # Registered after the first call's hook, which finds out whether the model draws.
    model.register_forward_pre_hook(cut.streams.begin_forward)


def _refuse_attentions(model: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for output_attentions: a rank has only the attention weights of its own heads."""
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(getattr(model, "config", None), "output_attentions", False)):
        raise ValueError(
            "output_attentions=True was requested of a tensor-parallel model, but each rank computes only "
            "the attention of its own heads; leave it out, or run the model before parallelize()."
        )


def match_modules(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Returns {qualified module name: style} of the modules that the patterns match, in the model's order."""
    names = dict(model.named_modules())
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in styles.items():
        # A pattern that is a module's name is looked up: plan "auto" has one for every module.
        hits = [pattern] if pattern in names else [n for n in names if n and fnmatchcase(n, pattern)]
        if not hits:
            kinds = [name for name, module in names.items() if isinstance(module, nn.Linear | nn.Embedding)]
            shown = ", ".join(kinds[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else "")
            raise ValueError(
                f"The plan's pattern {pattern!r} matches no module; the model's linears are: "
                f"{shown or 'none'}."
            )
        for hit in hits:
            for name, its_style in lora.linears_of(hit, names[hit], style):
                _check_kind(name, names[name], pattern, its_style)
                before, by = found.setdefault(name, (its_style, pattern))
                if before != its_style:
                    raise ValueError(
                        f"{name} is {before!r} by pattern {by!r} and {its_style!r} by pattern {pattern!r}; "
                        "make them disjoint."
                    )
    return {name: found[name][0] for name in names if name in found}


def _check_kind(name: str, module: nn.Module, pattern: str, style: str) -> None:
    if isinstance(module, ParallelModule):
        raise ValueError(f"{name} (pattern {pattern!r}) is parallel already; parallelize a model once.")
    if style == "experts":
        if why := why_not(module):
            raise ValueError(
                f"The plan's pattern {pattern!r} asks for 'experts' on {name}, a {type(module).__name__}, "
                f"but {why}; leave it out of the plan, and it stays whole."
            )
        return
    wanted = nn.Embedding if style == "embedding" else nn.Linear
    # Exactly nn.Linear: a subclass (quantised, LoRA) computes more than the plain GEMM that would replace it.
    if type(module) is not wanted and not (wanted is nn.Linear and is_transposed(module)):
        raise ValueError(
            f"The plan's pattern {pattern!r} asks for {style!r} on {name}, which is a "
            f"{type(module).__name__} and not an nn.{wanted.__name__}; narrow the pattern."
        )


def _parallel(
    module: nn.Module,
    name: str,
    style: str,
    cut: CutModel,
    packed: tuple[int, ...],
    options: dict[str, Any],
) -> ParallelModule:
    new: ParallelModule
    group, shared = cut.group, {"sequence_parallel": False, "hook": cut.hook(name, style)}
    try:
        if style == "embedding":
            new = VocabParallelEmbedding.from_embedding(module, group, **shared)
        elif style == "experts":
            new = ParallelExperts.from_experts(module, cut.experts, tier=options["tier"], **shared)
        elif style.startswith("row"):
            new = RowParallelLinear.from_linear(module, group, **shared, **options)
        else:
            new = ColumnParallelLinear.from_linear(module, group, packed=packed, **shared, **options)
    except ValueError as error:
        raise ValueError(f"{name} cannot be cut as {style!r}: {error}") from error
    new.label = name
    return new


def _under_all_names(model: nn.Module, replaced: Mapping[str, ParallelModule]) -> dict[str, ParallelModule]:
    """Adds the other names of modules that have several (an embedding that encoder and decoder share)."""
    new = {id(model.get_submodule(name)): module for name, module in replaced.items()}
    every = model.named_modules(remove_duplicate=False)
    return {name: new[id(module)] for name, module in every if id(module) in new}


def _tie(model: nn.Module, replaced: Mapping[str, ParallelModule]) -> None:
    """Ties the new parameters of modules whose parameters were tied. Raises ValueError where only some of
    these modules are replaced."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((name, leaf))
    for places in holders.values():
        inside = [(name, leaf) for name, leaf in places if name in replaced]
        if len({id(model.get_submodule(name)) for name, _ in places}) == 1 or not inside:
            continue
        shared = " and ".join(f"{name}.{leaf}" for name, leaf in places)
        if len(inside) < len(places):
            raise ValueError(
                f"{shared} are one tied tensor, but only a part of them is in the plan; add the others or "
                "untie them."
            )
        first_name, first_leaf = inside[0]
        first = replaced[first_name].get_parameter(first_leaf)
        for name, leaf in inside[1:]:
            if replaced[name] is replaced[first_name]:
                continue
            if replaced[name].get_parameter(leaf).tp_dim != first.tp_dim:
                raise ValueError(
                    f"{shared} are one tied tensor, but the plan cuts them along different dimensions; untie "
                    "them."
                )
            setattr(replaced[name], leaf, first)


def check_same_model(model: nn.Module, group: TensorGroup) -> None:
    """Raises ValueError, the same on every rank, that names the first parameter whose name, shape, dtype or
    content differs between ranks. Reads every parameter once and exchanges one line for each."""
    if group.size == 1:
        return
    weights = {name: memory_of(parameter) for name, parameter in model.named_parameters()}
    for name, rank in different(weights, group.process_group):
        first, one = comm.rank_name(group.name, 0), comm.rank_name(group.name, rank)
        raise ValueError(
            f"The ranks hold different weights: {name} of {one} is not that of {first}; load the same "
            "checkpoint or seed every rank alike before building the model."
        )


def _check_axes(plan: Plan, styles: Mapping[str, str], group: TensorGroup) -> None:
    if plan.packed and group.y is not None and group.size > 1:
        raise ValueError(
            f"{', '.join(plan.packed)} are cut part by part, which works over one axis only; use a mesh of "
            "one dimension."
        )
    adapted = sorted({lora.wrapper_of(name) for name in styles} - set(styles))
    if adapted and group.y is not None and group.y.size > 1:
        raise ValueError(
            f"{adapted[0]} has adapters of peft, which are cut over one axis only: over two they could not "
            "be merged; use a mesh of one dimension, or merge them first."
        )


def _check_unsharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "sharded_as"):
            raise ValueError(
                f"{name} is sharded over data-parallel ranks already, but the layer that parallelize() puts "
                "in its place would not be; call parallelize() first, and shard() the model that it returns."
            )


def _check_one_device(model: nn.Module) -> None:
    places: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) > 1:
        found = " and ".join(f"{name} on {device}" for device, name in places.items())
        raise ValueError(
            f"parallelize() needs all of the model on one device of each rank, but this one has {found}; "
            "move it to one device first (without device_map)."
        )
