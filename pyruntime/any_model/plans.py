"""Plans: which module of a model is cut how. Data only; parallelize.py carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

STYLES = {
    "column": "nn.Linear, out_features cut; every rank keeps its own outputs, for a row linear further on",
    "column_gather": "nn.Linear, out_features cut; the outputs are gathered, so any reader may follow",
    "row": "nn.Linear, in_features cut, reading what column linears left; the output is the sum over ranks, "
    "whole",
    "row_split": "nn.Linear, in_features cut, reading what is whole, of which every rank takes its features; "
    "the output is the sum over ranks, whole",
    "embedding": "nn.Embedding, vocabulary cut; the output is whole",
}

LEFT_WHOLE = "_pyruntime_left_whole"
"""On a model that was cut by a plan: the plan's `left_whole`."""


def _no_check(model: nn.Module, tp: int) -> None:
    """Of plans that fit any model; not a lambda, so that a plan can be pickled."""


@dataclass(frozen=True)
class Plan:
    """Module-name patterns to styles, and what must hold of a model before they are right.

    styles: {pattern: style}. A pattern is a glob on qualified module names as `model.named_modules()` gives
        them ("*.mlp.up_proj", "layers.[01].fc?"), matched as fnmatch.fnmatchcase does: `*` crosses dots.
    check: called with (model, tp) first; raises ValueError where tp cannot cut the model in this way.
    gives_way: what the first call finds cannot stay cut between column and row is made "column_gather" and
        "row_split" there, which is right for any model, instead of being refused.
    left_whole: {module or parameter: why it is not cut}, for explain().
    packed: {column linear: sizes of the parts of its features, each of which is cut by itself}.
    """

    name: str
    styles: Mapping[str, str]
    check: Callable[[nn.Module, int], None] = _no_check
    gives_way: bool = False
    left_whole: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def check_heads(model: nn.Module, tp: int) -> None:
    """Whole heads on every rank: tp must divide both head counts of a Hugging Face config."""
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            "The plan 'llama' reads num_attention_heads and num_key_value_heads from model.config, which "
            f"this {type(model).__name__} does not have; pass a mapping of module patterns to styles "
            "instead."
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        try:
            heads = getattr(config, key, None)
        except Exception:  # some configurations refuse to tell what varies from layer to layer
            heads = None
        if not isinstance(heads, int):
            raise ValueError(
                f"The plan 'llama' reads {key} from model.config, and the {type(config).__name__} of this "
                f"{type(model).__name__} has none that is a number; pass a mapping of module patterns to "
                "styles instead."
            )
        if heads % tp:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"tp={tp} does not divide {key}={heads}, and a head cannot be cut; use a tp out of {fits}."
            )


LLAMA = Plan(
    name="llama",
    styles={
        "*.self_attn.q_proj": "column",
        "*.self_attn.k_proj": "column",
        "*.self_attn.v_proj": "column",
        "*.self_attn.o_proj": "row",
        "*.mlp.gate_proj": "column",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
        "*embed_tokens": "embedding",
        "*lm_head": "column_gather",
    },
    check=check_heads,
)

PLANS = {LLAMA.name: LLAMA}


def find_plan(plan: str | Mapping[str, str] | Plan) -> Plan:
    """The Plan that a name, a mapping or a Plan stands for; ValueError for an unknown name or style,
    TypeError for what is none of these."""
    if isinstance(plan, str):
        if plan not in PLANS:
            raise ValueError(
                f"There is no plan named {plan!r}; use one of 'auto', {', '.join(map(repr, PLANS))}, or pass "
                "a mapping such as "
                "{'*.up_proj': 'column', '*.down_proj': 'row'}."
            )
        return PLANS[plan]
    if not isinstance(plan, Plan | Mapping):
        raise TypeError(
            f"A plan is 'auto', a plan's name, or a mapping such as {{'*.up_proj': 'column', '*.down_proj': "
            f"'row'}}; found: {type(plan).__name__}."
        )
    found = plan if isinstance(plan, Plan) else Plan("custom", dict(plan))
    if not found.styles:
        raise ValueError("The plan is empty; map at least one module pattern to a style.")
    for pattern, style in found.styles.items():
        if style not in STYLES:
            raise ValueError(
                f"Pattern {pattern!r} asks for style {style!r}; use one of {', '.join(map(repr, STYLES))}."
            )
    return found
