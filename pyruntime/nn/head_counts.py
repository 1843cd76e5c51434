"""Counts of heads and widths that a module keeps as attributes, and reads where its activations are cut.

Attention that views its projections as `[B, -1, self.num_heads, head_dim]` is right on a rank's heads only
when `num_heads` is theirs. Which attributes those are is guessed by their names, and the guess is kept only
where the numbers of the first call agree (first_call.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim", "hidden_size", "dim", "d_model")
# Where one head of keys is whole on every rank: how many heads of queries read it.
_READERS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_groups", "n_rep")
_TRIALS = (_COUNTS, (*_COUNTS, *_WIDTHS), _READERS)
_KEPT = "_pyruntime_whole_counts"  # on the module: {attribute: its value before}


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Where the cut model differs from the whole one: `fact`, and `advice` for who wrote the plan. `layers`:
    those around the place; `position`: how many compared inputs come before it."""

    fact: str
    advice: str
    layers: tuple[nn.Module, ...]
    position: int = 0

    @property
    def message(self) -> str:
        return f"{self.fact}; {self.advice}."


def settled(
    root: nn.Module,
    compare: Callable[[], Mismatch | None],
    tp: int,
    give_way: Callable[[Mismatch], Sequence[nn.Module]],
) -> Mismatch | None:
    """`compare()` until it finds nothing. For each mismatch counts are divided by `tp` in the modules around
    it; where that takes the comparison no further, they are put back and `give_way` may have layers work on
    whole activations, and returns these. None where it ends without a mismatch; else the one that nothing
    mends, and every count is as it was."""
    changed: list[nn.Module] = []
    mismatch = compare()
    while mismatch is not None:
        after = _mended(root, mismatch, compare, tp, changed)
        if after is mismatch:
            gave_way = give_way(mismatch)
            if not gave_way:
                _put_back(changed)
                return mismatch
            count_whole = [m for m in changed if any(child in gave_way for child in m.children())]
            _put_back(count_whole)
            changed = [module for module in changed if module not in count_whole]
            after = compare()
        mismatch = after
    return None


def _mended(
    root: nn.Module,
    mismatch: Mismatch,
    compare: Callable[[], Mismatch | None],
    tp: int,
    changed: list[nn.Module],
) -> Mismatch | None:
    """What is left to mend, further on, once counts around the mismatch are a rank's own; `mismatch` itself
    where none are."""
    for names in _TRIALS:
        found = {
            module: counts
            for module in _around(root, mismatch)
            if _KEPT not in vars(module) and (counts := _divisible(module, names, tp))
        }
        if not found:
            continue
        for module, counts in found.items():
            vars(module)[_KEPT] = counts
            vars(module).update({name: count // tp for name, count in counts.items()})
        after = compare()
        if after is None or after.position > mismatch.position:
            changed += found
            return after
        _put_back(found)
    return mismatch


def _put_back(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        vars(module).update(vars(module).pop(_KEPT))


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
