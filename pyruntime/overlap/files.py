"""What the ledgers of a run leave in its folder: RUN_DIR/ledger/rank-N.json, a file for each rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pyruntime.overlap.account import Account, Axis, Entry, Hidden, Kind
from pyruntime.text import short_repr

FOLDER = "ledger"


@dataclasses.dataclass(frozen=True)
class RankLedger:
    """What one rank entered in a run."""

    rank: int
    coordinate: dict[str, int]
    """By axis."""
    steps: int
    """That `account` is the sum of."""
    account: Account
    step: int
    """The one that the entries are of."""
    begin: float
    end: float
    thread: int
    """The one that computes."""
    entries: tuple[Entry, ...]
    """Where the step has saved a checkpoint, those of that, too, after `end`."""
    saves: int = 0
    saved: Account | None = None
    """The sum of what saving as many checkpoints took."""

    def write(self, run_dir: Path) -> None:
        """Raises OSError where the folder cannot be written."""
        plain = ("rank", "coordinate", "steps", "step", "begin", "end", "thread", "saves")
        document = {
            **{name: getattr(self, name) for name in plain},
            "account": dataclasses.asdict(self.account),
            "saved": self.saved and dataclasses.asdict(self.saved),
            "fields": [field.name for field in dataclasses.fields(Entry)],
            "entries": [dataclasses.astuple(entry) for entry in self.entries],
        }
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        # Renamed: who reads while a run is killed finds the file whole or not at all.
        path = folder / f"rank-{self.rank}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(document), encoding="utf-8")
        new.replace(path)


def read(run_dir: Path) -> list[RankLedger]:
    """The ledgers of a run in the order of ranks; none where it kept none.

    Raises ValueError where a file does not hold one."""
    found = [_read(path) for path in _paths(run_dir)]
    return sorted(found, key=lambda ledger: ledger.rank)


def forget(run_dir: Path) -> None:
    """Removes what an earlier run has left in the folder. Raises OSError where it cannot."""
    for path in _paths(run_dir):
        path.unlink()


def _paths(run_dir: Path) -> list[Path]:
    return list((run_dir / FOLDER).glob("rank-*.json"))


def _read(path: Path) -> RankLedger:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given, saved, fields = (document.pop(name) for name in ("account", "saved", "fields"))
        entries = tuple(_entry(dict(zip(fields, row, strict=True))) for row in document.pop("entries"))
        return RankLedger(
            account=_account(given), saved=saved and _account(saved), entries=entries, **document
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = f"{type(error).__name__} {short_repr(str(error))}"
        raise ValueError(f"{path} does not hold the ledger of a rank: {cause}.") from error


def _account(facts: dict[str, Any]) -> Account:
    axes = {name: Axis(**axis) for name, axis in facts["axes"].items()}
    return Account(**{**facts, "axes": axes, "lines": tuple(Hidden(**line) for line in facts["lines"])})


def _entry(facts: dict[str, Any]) -> Entry:
    return Entry(**{**facts, "kind": Kind(facts["kind"])})
