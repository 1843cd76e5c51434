"""Counts of heads and widths that a module keeps as attributes, and reads where its activations are cut.

Attention that views its projections as `[B, -1, self.num_heads, head_dim]` is right on a rank's heads only
when `num_heads` is theirs. Which attributes those are is guessed by their names, and the guess is kept only
where the numbers of the first call agree (first_call.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from pyruntime.nn.first_call import Mismatch

_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim", "hidden_size", "dim", "d_model")
_TRIALS = (_COUNTS, (*_COUNTS, *_WIDTHS))
_KEPT = "_pyruntime_whole_counts"  # on the module: {attribute: its value before}


def mended(root: nn.Module, compare: Callable[[], Mismatch | None], tp: int) -> Mismatch | None:
    """`compare()`, and again with counts divided by `tp` in the modules around each mismatch. None where that
    ends without one; else the first mismatch, and everything is as it was."""
    first = mismatch = compare()
    for names in _TRIALS:
        changed: list[nn.Module] = []
        while mismatch is not None:
            modules = [
                m for m in _around(root, mismatch) if _KEPT not in vars(m) and _divisible(m, names, tp)
            ]
            if not modules:
                break
            for module in modules:
                _divide(module, names, tp)
            changed += modules
            mismatch = compare()
        if mismatch is None:
            return None
        for module in changed:
            _restore(module)
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


def _divisible(module: nn.Module, names: tuple[str, ...], tp: int) -> bool:
    counts = _counts(module, names)
    return bool(counts) and all(count % tp == 0 for count in counts.values())


def _counts(module: nn.Module, names: tuple[str, ...]) -> dict[str, int]:
    values = vars(module)
    return {name: values[name] for name in names if type(values.get(name)) is int}


def _divide(module: nn.Module, names: tuple[str, ...], tp: int) -> None:
    counts = _counts(module, names)
    vars(module)[_KEPT] = counts
    vars(module).update({name: count // tp for name, count in counts.items()})


def _restore(module: nn.Module) -> None:
    vars(module).update(vars(module).pop(_KEPT))
