"""Counts of heads and widths that a module keeps as attributes, and reads where its activations are cut.

Attention that views its projections as `[B, -1, self.num_heads, head_dim]` is right on a rank's heads only
when `num_heads` is theirs. Which attributes those are is guessed by their names, or by their value where it
is the size of a part of a packed linear, and the guess is kept only where the numbers of the first call agree
(first_call.py). A module that asks its configuration is given one that answers with the rank's own counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from pyruntime.any_model import lora

_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim", "hidden_size", "dim", "d_model")
# Where one head of keys is whole on every rank: how many heads of queries read it.
_READERS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_groups", "n_rep")
_KEPT = "_pyruntime_whole_counts"  # on the module: {attribute: its value before}


@dataclasses.dataclass(frozen=True)
class _Trial:
    """names: of attributes that are counts. and_more: also those of the configuration that have such a name,
    and attributes that are as large as a part of a packed linear."""

    names: tuple[str, ...]
    and_more: bool = False


_TRIALS = (_Trial(_COUNTS), _Trial((*_COUNTS, *_WIDTHS)), _Trial(_READERS), _Trial(_COUNTS, and_more=True))


class LocalConfig:
    """A configuration of which some counts are a rank's own; everything else is asked of it."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        vars(self).update(_config=config, **counts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # of copies and pickles that are not filled yet
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


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
            count_whole = [m for m in changed if any(layer in gave_way for layer in _layers_of(m))]
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
    for trial in _TRIALS:
        found = {
            module: local
            for module in _around(root, mismatch)
            if _KEPT not in vars(module) and (local := _divided(module, trial, tp))
        }
        if not found:
            continue
        for module, local in found.items():
            vars(module)[_KEPT] = {name: vars(module)[name] for name in local}
            vars(module).update(local)
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
        if any(layer in mismatch.layers for layer in _layers_of(module))
    }
    return [module for module in root.modules() if type(module) in classes]


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """What it holds itself, linears within adapters too."""
    if lora.is_wrapper(module):
        return
    for child in module.children():
        yield from child.modules() if lora.is_wrapper(child) else (child,)


def _divided(module: nn.Module, trial: _Trial, tp: int) -> dict[str, Any]:
    """What the attributes of a trial are on a rank, where tp divides all of them; else nothing."""
    values = vars(module)
    counts = {name: values[name] for name in trial.names if type(values.get(name)) is int}
    of_config: dict[str, int] = {}
    if trial.and_more:
        sizes = {size for layer in _layers_of(module) for size in getattr(layer, "packed", ())}
        counts |= {name: n for name, n in values.items() if type(n) is int and n in sizes}
        of_config = _counts_of(values.get("config"), trial.names)
    if any(count % tp for count in (*counts.values(), *of_config.values())):
        return {}
    local: dict[str, Any] = {name: count // tp for name, count in counts.items()}
    if of_config:
        own = {name: count // tp for name, count in of_config.items()}
        local["config"] = LocalConfig(values["config"], own)
    return local


def _counts_of(config: Any, names: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in names:
        try:
            count = getattr(config, name, None)
        except Exception:  # some configurations refuse to tell what varies from layer to layer
            continue
        if type(count) is int:
            found[name] = count
    return found
