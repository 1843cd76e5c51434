"""Adapts counts of heads and widths that modules keep as attributes to the features that a rank has.

Attention that views its projections as `[B, -1, self.num_heads, head_dim]` is right on a rank's heads only if
`num_heads` counts those. Such attributes are guessed by name, or by value where it is the size of a part of a
packed linear. A guess is kept only if the numbers of the first call then agree (first_call.py). A module that
reads its configuration gets one that answers with the rank's own counts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from pyruntime.any_model import lora

_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = ("embed_dim", "all_head_size", "inner_dim", "hidden_size", "dim", "d_model")
# If the one head of keys is whole on every rank: how many heads of queries read it.
_READERS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_groups", "n_rep")
_KEPT = "_pyruntime_whole_counts"  # on the module: {attribute: its value before}


@dataclasses.dataclass(frozen=True)
class _Trial:
    """One guess. names: attributes that are counts. and_more: also entries of the configuration with such
    names, and attributes whose value is the size of a part of a packed linear."""

    names: tuple[str, ...]
    and_more: bool = False


_TRIALS = (_Trial(_COUNTS), _Trial((*_COUNTS, *_WIDTHS)), _Trial(_READERS), _Trial(_COUNTS, and_more=True))


class LocalConfig:
    """A configuration in which some counts are the rank's own; all else is read from the original."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        vars(self).update(_config=config, **counts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # while a copy or pickle is being filled
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A difference between the cut and the whole model: `fact`, and `advice` for the author of the plan.
    `layers`: those around the difference; `position`: how many compared inputs come before it."""

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
    """Repeats `compare()` until it finds no mismatch, and returns None. For each mismatch it divides counts
    by `tp` in the modules around it. If the comparison then gets no further, it restores them and calls
    `give_way`, which may make layers work on whole activations, and returns those layers. If nothing repairs
    a mismatch, restores all counts and returns that mismatch."""
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
    """Divides counts around the mismatch. Returns the next mismatch, further on, or None; `mismatch` itself
    where dividing does not help."""
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
    """Sets all counts to the whole model's inside the context."""
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
    """Returns all modules of the classes that hold one of the mismatch's layers: layers of one kind change
    together."""
    classes = {
        type(module)
        for module in root.modules()
        if any(layer in mismatch.layers for layer in _layers_of(module))
    }
    return [module for module in root.modules() if type(module) in classes]


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module's own children, and the linears within adapters."""
    if lora.is_wrapper(module):
        return
    for child in module.children():
        yield from child.modules() if lora.is_wrapper(child) else (child,)


def _divided(module: nn.Module, trial: _Trial, tp: int) -> dict[str, Any]:
    """Returns {attribute: its value on a rank} for a trial if tp divides all of them; else {}."""
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
        except Exception:  # some configurations raise for values that vary from layer to layer
            continue
        if type(count) is int:
            found[name] = count
    return found
