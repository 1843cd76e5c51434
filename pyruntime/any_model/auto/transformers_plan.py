"""Translates the tensor-parallel plan that transformers ships with a model into our styles.

transformers collects `base_model_tp_plan` of the configurations and `_tp_plan` of the heads, also of nested
models, in `model._tp_plan`: {name with * for the number of a block: style}
(transformers/distributed/parallel_utils.py). Some of its styles only sum the gradients of norms and other
weights inside a region, or make activations whole. Those need no counterpart here: such gradients are found
in the autograd graph (regions.py), and every row linear gives whole activations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from pyruntime.any_model import lora
from pyruntime.nn.linear import is_transposed

LINEAR = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    # Linears that hold several: the code that splits their output counts whole features, so it gets those.
    "packed_colwise": "column_gather",
    "packed_rowwise": "row_split",
}
"""{transformers' style of a linear: ours}."""

KEPT = "transformers' plan keeps it whole"
WHOLE = {
    "replicate": KEPT,
    "replicated_with_grad_allreduce": KEPT,
    "mla_kv_a_proj": "its output is latent, which all heads share",
    "all_reduce": KEPT,
    "sequence_parallel": KEPT,
    "local_params": KEPT,
    "embedding_colwise": "only the vocabulary of an embedding is cut, not its features",
}
"""{transformers' style of a module that stays whole on every rank: why}."""

EXPERTS = {
    "moe_tp_experts",
    "moe_identity_expert",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
    "megamoe_router",
    "megamoe_experts",
}


EXPERTS_WHY = "experts of this kind are not spread over ranks"
"""The reason for experts that found_plan.py does not spread by their class."""


def transformers_plan(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Returns ({module: our style}, {module or parameter that the plan names and that stays whole: why});
    both are empty where no module of the model has a plan. Raises ValueError for an unknown style."""
    styles: dict[str, str] = {}
    left: dict[str, str] = {}
    for prefix, holder, plan in _plans(model):
        modules = dict(holder.named_modules())
        names = [*modules, *(name for name, _ in holder.named_parameters())]
        for pattern, style in plan.items():
            expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            for name in filter(expression.fullmatch, names):
                ours, why = _translated(name, modules.get(name), style, plan)
                if ours:
                    styles[prefix + name] = ours
                elif why:
                    left[prefix + name] = why
    return styles, left


def _plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Yields (prefix of its names, module, its plan) for the outermost modules that have a plan."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        plan = vars(module).get("_tp_plan")  # only its own: wrappers also show the plan of the wrapped model
        if not isinstance(plan, dict) or not plan or name.startswith(inside or ("\0",)):
            continue
        prefix = f"{name}." if name else ""
        yield prefix, module, plan
        if not name:
            return
        inside += (prefix,)


def _translated(name: str, module: nn.Module | None, style: str, plan: dict[str, str]) -> tuple[str, str]:
    """Returns (our style, ""), or ("", why the module stays whole)."""
    if "experts" in name.split(".") or style in EXPERTS:
        return "", EXPERTS_WHY
    if style in WHOLE:
        return "", WHOLE[style] if isinstance(module, nn.Linear | nn.Embedding) else ""
    if style == "embedding_rowwise":
        if type(module) is not nn.Embedding:
            return "", f"a {type(module).__name__} is no nn.Embedding"
        refused = [o for o in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, o)]
        return ("", f"nn.Embedding has {refused[0]}") if refused else ("embedding", "")
    if style not in LINEAR:
        raise ValueError(
            f"transformers' plan asks for style {style!r} on {name}, which the plan 'auto' does not know; "
            "pass a mapping of module patterns to styles instead."
        )
    if module is None:
        return "", "it is a parameter and no linear"
    if type(module) is nn.Linear or is_transposed(module) or lora.is_wrapper(module):
        return LINEAR[style], ""
    return "", f"a {type(module).__name__} is no nn.Linear"
