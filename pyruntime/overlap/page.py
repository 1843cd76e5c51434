"""Writes an HTML page about a run: a verdict, the parts of its time, a step's timeline, layers and curves."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from pyruntime.comm import Runtime
from pyruntime.comm.exchange import Exchange
from pyruntime.overlap.account import Account, Hidden, total
from pyruntime.overlap.departures import Departure, departures
from pyruntime.overlap.files import RankLedger, from_text
from pyruntime.overlap.record import Ledger
from pyruntime.overlap.verdict import LayerGroup, places, tiles, verdict
from pyruntime.text import finite

DATE = "%Y-%m-%d %H:%M"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted memory and step time of a run, in parts that add up, and the measured ones; None: unknown."""

    words: str = ""
    """Says why something was not predicted."""
    memory: dict[str, float] | None = None
    """Bytes of the fullest rank, by part."""
    measured_memory: float | None = None
    step: dict[str, float] | None = None
    """Seconds of a step, by part."""
    measured_step: float | None = None


def write_page(
    path: str | Path, ledger: Ledger, runtime: Runtime, *, steps: int = 1, metrics: Sequence[dict] = ()
) -> None:
    """Writes the page about your own training loop, on rank 0. Every rank calls it when its ledger is off:

        with pyruntime.ledger() as ledger:
            for _ in range(3):
                step()
        write_page("report.html", ledger, runtime, steps=3)  # pyruntime.overlap.write_page

    Args:
        steps: number of steps in the block; figures are means over them.
        metrics: for tiles and curves, a dict for each step: "step", from 1, and any of "loss", "val_loss"
            (nats per token), "step_time_s", "exposed_comm_s", "tokens_per_second", "mfu", "memory_bytes".

    Raises:
        ValueError: `steps` is below 1.
        OSError: the file cannot be written.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1.")
    found = ledger.stretch
    times = found.begin, found.end, found.thread, found.entries
    own = RankLedger(runtime.rank, runtime.coordinate._asdict(), steps, found.account(), 0, *times)
    exchange = Exchange(runtime.world, "Gathering the ledgers")
    if runtime.rank > 0:
        exchange.tell(own.text(), to=0)
    else:
        others = range(1, runtime.world.size())
        ledgers = [own, *(from_text(exchange.hear(rank, str, to_this_rank=True)) for rank in others)]
        facts = {
            "written": time.strftime(DATE),
            "ranks": ranks_in_words(len(ledgers), runtime.sizes._asdict()),
        }
        text = page(Path(path).stem, facts, metrics, ledgers)
        Path(path).write_text(text, encoding="utf-8")


def ranks_in_words(ranks: int, mesh: Mapping[str, int]) -> str:
    spread = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return f"{ranks} rank{'s' if ranks > 1 else ''}{spread and ': ' + spread}"


def page(
    name: str,
    facts: Mapping[str, str],
    metrics: Sequence[dict],
    ledgers: Sequence[RankLedger],
    plan: Prediction | None = None,
    samples: Sequence[Mapping[str, str | None]] = (),
) -> str:
    """Returns the page's HTML.

    facts: values about the run, by their label. metrics: the records of metrics.jsonl. plan: None leaves out
    the section about predictions. samples: of the model, each with "prompt", "before" and "after" training,
    and "wanted", the answer in the data; what is None in all of them is left out. Times of a rank's timeline
    count from the beginning of its step.
    """
    data = {
        "name": name,
        "verdict": verdict(ledgers, metrics),
        "tiles": [dataclasses.asdict(tile) for tile in tiles(ledgers, metrics)],
        "facts": dict(facts),
        "metrics": list(metrics),
        "plan": plan and dataclasses.asdict(plan),
        "samples": [dict(each) for each in samples],
        "ranks": [_rank(*each) for each in zip(ledgers, departures(ledgers), strict=True)],
        "places": _places(ledgers),
    }
    # "<" is escaped, so that the text cannot end its script element.
    text = json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c")
    return (files(__package__) / "page.html").read_text(encoding="utf-8").replace("__DATA__", text)


def _places(ledgers: Sequence[RankLedger]) -> list[dict]:
    """Returns the exposed places of the page; figures are means over ranks and steps."""
    if not ledgers:
        return []
    exposed = [
        (
            ledger.rank,
            {
                (line.axis, line.layer, line.name): line.exposed_s / ledger.steps
                for line in ledger.account.lines
            },
        )
        for ledger in ledgers
    ]
    steps = sum(ledger.steps for ledger in ledgers)

    def figures(each: LayerGroup | Hidden, hidden: float) -> dict:
        return {"exposed_s": each.exposed_s / steps, "bytes": each.bytes / steps, "hidden": hidden}

    def line_of(line: Hidden) -> dict:
        key = line.axis, line.layer, line.name
        most, rank = max((lines.get(key, 0.0), -rank) for rank, lines in exposed)
        return {
            "name": f"{line.layer}: {line.name}" if line.layer else line.name,
            **figures(line, line.hidden_bytes / line.bytes if line.bytes else 1.0),
            "most_s": most,
            "most_rank": -rank,
            "behind": next(iter(line.behind), "-"),
        }

    return [
        {
            "axis": place.axis,
            "name": place.name,
            **figures(place, place.hidden),
            "lines": [line_of(line) for line in place.lines],
        }
        for place in places(total([ledger.account for ledger in ledgers]).lines)
    ]


def _account(account: Account) -> dict:
    """Returns the account without its lines, which the page shows as places."""
    return dataclasses.asdict(dataclasses.replace(account, lines=()))


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
        "account": _account(ledger.account),
        "saves": ledger.saves,
        "saved": ledger.saved and _account(ledger.saved),
        "step": ledger.step,
        "seconds": ledger.end - ledger.begin,
        "thread": ledger.thread,
        "timeline": timeline,
    }
