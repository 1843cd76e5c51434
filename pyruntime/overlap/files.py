"""Writes and reads the ledgers of a run: RUN_DIR/ledger/rank-N.json, a file for each rank."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pyruntime.overlap.account import Account, AxisCost, Entry, EntryKind, Hidden
from pyruntime.text import short_repr

FOLDER = "ledger"
LARGEST_S, LARGEST = 1e15, 2**63
"""Limits on numbers in a file: on floats (seconds or bytes) and on integers."""
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class RankLedger:
    """One rank's ledger of a run: the summed account of several steps, and the entries of one."""

    rank: int
    coordinate: dict[str, int]
    """The rank's place in the mesh, by axis."""
    steps: int
    """Number of steps in `account`."""
    account: Account
    step: int
    """The step that the entries belong to; 0: to all."""
    begin: float
    end: float
    thread: int
    """The computing thread."""
    entries: tuple[Entry, ...]
    """If a checkpoint was saved after the step, its entries follow, after `end`."""
    saves: int = 0
    """Number of checkpoints in `saved`."""
    saved: Account | None = None
    """The summed account of saving them."""

    def text(self) -> str:
        """Returns the ledger as JSON."""
        plain = ("rank", "coordinate", "steps", "step", "begin", "end", "thread", "saves")
        document = {
            **{name: getattr(self, name) for name in plain},
            "account": dataclasses.asdict(self.account),
            "saved": self.saved and dataclasses.asdict(self.saved),
            "fields": [field.name for field in dataclasses.fields(Entry)],
            "entries": [dataclasses.astuple(entry) for entry in self.entries],
        }
        return json.dumps(document)

    def write(self, run_dir: Path) -> None:
        """Writes RUN_DIR/ledger/rank-N.json. Raises OSError if that is not possible."""
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        # Renamed, so that the file is complete or absent if the run is killed.
        path = folder / f"rank-{self.rank}.json"
        new = path.with_suffix(".new")
        new.write_text(self.text(), encoding="utf-8")
        new.replace(path)


def read(run_dir: Path) -> list[RankLedger]:
    """Returns the ledgers of a run in rank order; [] if it has none.

    Raises ValueError if a file is no ledger, or if the files are not from one run."""
    found = {path: _read(path) for path in _paths(run_dir)}
    axes = {path: list(ledger.coordinate) for path, ledger in found.items()}
    for path in found:
        first = min(found)
        if axes[path] != axes[first]:
            raise ValueError(
                f"{path} has the axes {short_repr(axes[path])}, but {first.name} beside it has "
                f"{short_repr(axes[first])}; they are not from one run."
            )
    return sorted(found.values(), key=lambda ledger: ledger.rank)


def forget(run_dir: Path) -> None:
    """Removes the ledgers of an earlier run from the folder. Raises OSError if that is not possible."""
    for path in _paths(run_dir):
        path.unlink()


def _paths(run_dir: Path) -> list[Path]:
    return list((run_dir / FOLDER).glob("rank-*.json"))


def _read(path: Path) -> RankLedger:
    try:
        ledger = from_text(path.read_text(encoding="utf-8"))
        if path.name != f"rank-{ledger.rank}.json":
            raise ValueError(f"it is the ledger of rank {ledger.rank}")
        return ledger
    except (OSError, ValueError) as error:
        cause = f"{type(error).__name__} {short_repr(str(error))}"
        raise ValueError(f"{path} does not hold the ledger of a rank: {cause}.") from error


def from_text(text: str) -> RankLedger:
    """Reads the result of RankLedger.text(). Raises ValueError for any other text."""
    try:
        document = json.loads(text)
        given, saved, fields = (document.pop(name) for name in ("account", "saved", "fields"))
        rows = _rows(fields, document.pop("entries"))
        facts = {
            **document,
            "account": _account(given),
            "saved": None if saved is None else _account(saved),
            "entries": _made(Entry, ({**row, "kind": EntryKind(row["kind"])} for row in rows)),
        }
        (ledger,) = _made(RankLedger, [facts])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} {short_repr(str(error))}") from error
    if ledger.steps < 1 or ledger.saves < (saved is not None) or ledger.end < ledger.begin:
        raise ValueError("it has less than one step or save, or ends before it begins")
    return ledger


def _rows(fields: list[str], rows: list[list]) -> Iterable[dict[str, Any]]:
    return (dict(zip(fields, row, strict=True)) for row in rows)


def _account(facts: dict[str, Any]) -> Account:
    axes = dict(zip(facts["axes"], _made(AxisCost, facts["axes"].values()), strict=True))
    (account,) = _made(Account, [{**facts, "axes": axes, "lines": _made(Hidden, facts["lines"])}])
    return account


def _made(cls: type[Made], all_facts: Iterable[dict[str, Any]]) -> tuple[Made, ...]:
    """Makes an instance of a dataclass from each dict of `all_facts`. Raises ValueError for a value that has
    another type than its field or is too large."""
    hints = typing.get_type_hints(cls)
    made = []
    for facts in all_facts:
        for name, value in facts.items():
            if name in hints and not _fits(value, hints[name]):
                raise ValueError(f"{name} of {cls.__name__} is {short_repr(value)}")
        made.append(cls(**facts))
    return tuple(made)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a field with that annotation; infinity and NaN fit none."""
    if hint is float:
        return type(value) in (int, float) and abs(value) <= LARGEST_S
    if hint is int:
        return type(value) is int and abs(value) < LARGEST
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple)
    return isinstance(value, hint)
