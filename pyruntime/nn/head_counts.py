"""Counts of heads and widths that a module keeps as attributes, and reads where its activations are cut.

Attention that views its projections as `[B, -1, self.num_heads, head_dim]` is right on a rank's heads only
when `num_heads` is theirs. Which attributes those are is guessed by their names, and the guess is kept only
where the numbers of the first call agree (first_call.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim", "hidden_size", "dim", "d_model")
_TRIALS = (_COUNTS, (*_COUNTS, *_WIDTHS))
_KEPT = "_pyruntime_whole_counts"  # on the module: {attribute: its value before}


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Where the cut model differs from the whole one. `layers`: those around the place."""

    message: str
    layers: tuple[nn.Module, ...]


def mended(root: nn.Module, compare: Callable[[], Mismatch | None], tp: int) -> Mismatch | None:
    """`compare()`, and again with counts divided by `tp` in the modules around each mismatch. None where that
    ends without one; else the first mismatch, and everything is as it was."""
    first = mismatch = compare()
    for names in _TRIALS:
        changed: list[nn.Module] = []
        while mismatch is not None:
            found = {
                module: counts
                for module in _around(root, mismatch)
                if _KEPT not in vars(module) and (counts := _divisible(module, names, tp))
            }
            if not found:
                break
            for module, counts in found.items():
                vars(module)[_KEPT] = counts
                vars(module).update({name: count // tp for name, count in counts.items()})
            changed += found
            mismatch = compare()
        if mismatch is None:
            return None
        for module in changed:
            vars(module).update(vars(module).pop(_KEPT))
        mismatch = first
    return first


@contextlib.contextmanager
def whole(root: nn.Module) -> Iterator[None]:
    """Counts are the whole model's inside."""
    kept = [(module, dict(vars(module)[_KEPT])) for module in root.modules() if _KEPT in vars(module)]
    local = [(module, {name: getattr(module, name) for name in before}) for module, before in kept]
    for module, before in kept:
        vars(module).update(before)
    try:
        yield
    finally:
        for module, values in local:
            vars(module).update(values)


def _around(root: nn.Module, mismatch: Mismatch) -> list[nn.Module]:
    """Every module of a class that holds one of the mismatch's layers: layers of one kind go together."""
    classes = {
        type(module)
        for module in root.modules()
        if any(child in mismatch.layers for child in module.children())
    }
    return [module for module in root.modules() if type(module) in classes]


def _divisible(module: nn.Module, names: tuple[str, ...], tp: int) -> dict[str, int]:
    """The counts of these names, where tp divides all of them; else none."""
    values = vars(module)
    counts = {name: values[name] for name in names if type(values.get(name)) is int}
    return counts if all(count % tp == 0 for count in counts.values()) else {}
