"""One page about a run, which needs nothing but a browser: curves, where the time went, a step's timeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from importlib.resources import files

from pyruntime.overlap.departures import Departure, departures
from pyruntime.overlap.files import RankLedger
from pyruntime.text import finite


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What was predicted of a run by parts, which add up, and what was measured; None where it was not."""

    words: str = ""
    """Why something was not predicted."""
    memory: dict[str, float] | None = None
    """Bytes of the fullest rank."""
    measured_memory: float | None = None
    step: dict[str, float] | None = None
    """Seconds of a step."""
    measured_step: float | None = None


def page(
    name: str,
    facts: str,
    metrics: Sequence[dict],
    ledgers: Sequence[RankLedger],
    plan: Prediction = Prediction(),
) -> str:
    """The page's HTML. `facts` is a line about the run; `metrics` are the lines of metrics.jsonl. Times in a
    timeline count from the beginning of its rank's step."""
    data = {
        "name": name,
        "facts": facts,
        "metrics": list(metrics),
        "plan": dataclasses.asdict(plan),
        "ranks": [_rank(*each) for each in zip(ledgers, departures(ledgers), strict=True)],
    }
    # What may stand in a script element as it is.
    text = json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c")
    return (files(__package__) / "page.html").read_text(encoding="utf-8").replace("__DATA__", text)


def _rank(ledger: RankLedger, left: dict[int, Departure]) -> dict:
    def at(seconds: float) -> float:
        return round(seconds - ledger.begin, 7)

    timeline = [
        {
            **dataclasses.asdict(entry),
            "kind": entry.kind.name,
            **{name: at(getattr(entry, name)) for name in ("begin", "wanted", "end")},
            "arrived": at(entry.arrived) if entry.arrived else None,
            "left": at(left[index].at) if index in left else None,
            "sender": left[index].rank if index in left else None,
        }
        for index, entry in enumerate(ledger.entries)
    ]
    return {
        "rank": ledger.rank,
        "place": " ".join(f"{axis}{at}" for axis, at in ledger.coordinate.items()),
        "steps": ledger.steps,
        "account": dataclasses.asdict(ledger.account),
        "saves": ledger.saves,
        "saved": ledger.saved and dataclasses.asdict(ledger.saved),
        "step": ledger.step,
        "seconds": ledger.end - ledger.begin,
        "thread": ledger.thread,
        "timeline": timeline,
    }
