"""Plans: how each module of a model is cut. Plans are data; parallelize.py applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

STYLES = {
    "column": "nn.Linear, out_features cut; every rank keeps its own outputs, for a row linear further on",
    "column_gather": "nn.Linear, out_features cut; the outputs are gathered, so any code may read them",
    "row": "nn.Linear, in_features cut, reads the outputs of column linears; the output is the sum over "
    "ranks, whole",
    "row_split": "nn.Linear, in_features cut, reads a whole input, of which every rank takes its features; "
    "the output is the sum over ranks, whole",
    "embedding": "nn.Embedding, vocabulary cut; the output is whole",
    "experts": "transformers' experts of a mixture, each whole on one rank; the output is whole",
}

LEFT_WHOLE = "_pyruntime_left_whole"
"""Name of the attribute of a cut model that holds its plan's `left_whole`."""


def _no_check(model: nn.Module, tp: int) -> None:
    """The check of plans that fit any model; not a lambda, so that a plan can be pickled."""


@dataclass(frozen=True)
class Plan:
    """A mapping of module-name patterns to styles, with a check of the models that it fits.

    styles: {pattern: style}. A pattern is a glob on the qualified names of `model.named_modules()`
        ("*.mlp.up_proj", "layers.[01].fc?"), matched as fnmatch.fnmatchcase does: `*` crosses dots.
    check: called first, with (model, tp); raises ValueError where tp cannot cut the model in this way.
    gives_way: whether the first call, where it finds that column and row linears cannot stay cut, makes them
        "column_gather" and "row_split", which is right for any model, instead of raising.
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
    """Raises ValueError unless tp divides both head counts of a Hugging Face config: heads cannot be cut."""
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
        except Exception:  # some configurations raise for values that vary from layer to layer
            heads = None
        if not isinstance(heads, int):
            raise ValueError(
                f"The plan 'llama' reads {key} from model.config, but in the {type(config).__name__} of this "
                f"{type(model).__name__} it is missing or no number; pass a mapping of module patterns to "
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
    """Returns the Plan for a plan's name, a mapping or a Plan. Raises ValueError for an unknown name or
    style, TypeError for any other argument."""
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
