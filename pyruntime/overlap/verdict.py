"""Writes the first sentence of a page about a run: the exposed share of a step, its main place and cause.

Pure functions of ledgers and of lines of metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pyruntime.overlap.account import Account, Entry, EntryKind, Hidden, total
from pyruntime.overlap.files import RankLedger
from pyruntime.text import block_name

LITTLE = 0.02
"""Exposed share of a step below which its place and cause do not matter."""
Key = tuple[str, str, str]
"""Axis, layer and operator."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One figure, shown large at the top of the page."""

    label: str
    value: str
    note: str


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """The cost of one layer of all blocks ("layers.*.qkv") over one axis, summed over ranks and steps."""

    axis: str
    name: str
    lines: tuple[Hidden, ...]
    """One for each layer and operator, most exposed first."""

    @property
    def exposed_s(self) -> float:
        return sum(line.exposed_s for line in self.lines)

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def hidden(self) -> float:
        """Hidden share of the bytes read."""
        return sum(line.hidden_bytes for line in self.lines) / self.bytes if self.bytes else 1.0


def places(lines: Sequence[Hidden]) -> list[LayerGroup]:
    """Groups lines by axis and by layer without its block's number; the most exposed group comes first."""
    found: defaultdict[tuple[str, str], list[Hidden]] = defaultdict(list)
    for line in lines:
        found[line.axis, _place(line.layer, line.name)].append(line)
    made = [LayerGroup(axis, name, tuple(each)) for (axis, name), each in found.items()]
    return sorted(made, key=lambda place: (-place.exposed_s, -place.bytes, place.axis, place.name))


def _place(layer: str, name: str) -> str:
    return f"layer {layer}" if layer.isdigit() else block_name(layer) or name


def verdict(ledgers: Sequence[RankLedger], metrics: Sequence[dict]) -> str:
    """Returns one sentence about the run, from the ledgers or, if there are none, from the metrics."""
    if not ledgers:
        return _without_ledger(metrics)
    whole = total([ledger.account for ledger in ledgers])
    if not whole.axes:
        return f"Nothing was exchanged; {percent(whole.computing_s, whole.seconds)} of a step is computing."
    said = f"{percent(whole.exposed_s, whole.seconds)} of a step is exposed"
    if whole.exposed_s < LITTLE * whole.seconds:
        hidden = sum(axis.hidden_bytes for axis in whole.axes.values())
        said += f": {percent(hidden, _bytes_read(whole))} of the bytes that ranks read were hidden"
    else:
        most = places(whole.lines)[0]
        share = most.exposed_s / whole.exposed_s
        how_much = "most of it" if share > 0.5 else f"the largest part ({percent(share)} of it)"
        over = f" over {most.axis}" if len(whole.axes) > 1 else ""
        said += f", {how_much} in {most.name}{over}, because {_why(most, ledgers)}"
    return said + ("; the ledger ran full, so this is incomplete." if whole.lost else ".")


def _without_ledger(metrics: Sequence[dict]) -> str:
    if not metrics:
        return "There is nothing to report: no ledger and no step."
    share = _exposed(metrics)
    if share is None:
        return "How much of a step is exposed was not measured; a ledger would show it."
    return f"{percent(share)} of a step is exposed in the rank that waits most; a ledger would show why."


def _exposed(metrics: Sequence[dict]) -> float | None:
    """Returns the exposed share of a step; None if it was not measured."""
    exposed, seconds = _median(metrics, "exposed_comm_s"), _median(metrics, "step_time_s")
    return exposed / seconds if exposed is not None and seconds else None


def _bytes_read(account: Account) -> int:
    return sum(axis.bytes_read for axis in account.axes.values())


def _why(place: LayerGroup, ledgers: Sequence[RankLedger]) -> str:
    waited, late = lateness(place, ledgers)
    rank, seconds = max(late.items(), key=lambda item: item[1], default=(0, 0.0))
    if waited and sum(late.values()) > waited / 2:
        who = f"rank {rank} arrives" if seconds > sum(late.values()) / 2 else "ranks arrive"
        return f"{who} there late ({percent(sum(late.values()), waited)} of the waiting)"
    if place.axis == "pp":
        return "a stage has nothing to compute until its neighbour sends: the bubble of the pipeline"
    if place.axis in ("checkpoint", "offload"):
        return "the disk takes that long"
    more = waited_more(place, ledgers)
    if sum(more.values()) > place.exposed_s / 2:
        rank, seconds = max(more.items(), key=lambda item: item[1])
        return f"the others wait there for {f'rank {rank}' if seconds > sum(more.values()) / 2 else 'one'}"
    if not place.bytes:
        return "ranks wait there for each other"
    hidden = percent(place.hidden)
    return f"ranks compute too little meanwhile to hide its bytes ({hidden} of them were hidden)"


def lateness(place: LayerGroup, ledgers: Sequence[RankLedger]) -> tuple[float, dict[int, float]]:
    """Returns the seconds that all ranks waited in a place, in the step whose entries are kept. The second
    result is, by the rank that arrived last, how many of them passed before it began the same operation.

    If clocks differ by more than a step, the ranks are on different hosts; their lateness is not known."""
    begins = [_begins(ledger) for ledger in ledgers]
    waited, late = 0.0, defaultdict[int, float](float)
    for mine, ledger in enumerate(ledgers):
        peers = [each for each in range(len(ledgers)) if _meet(ledgers[each], ledger, place.axis)]
        for wait, key in _waits(place, ledger):
            waited += wait.seconds
            number = bisect_right(begins[mine].get(key, []), wait.begin) - 1
            came = [
                (begins[peer][key][number], ledgers[peer].rank)
                for peer in peers
                if number >= 0 and len(begins[peer].get(key, [])) == len(begins[mine][key])
            ]
            last, rank = max(came, default=(wait.begin, ledger.rank))
            if last > wait.begin:
                late[rank] += min(last, wait.end) - wait.begin
    return waited, dict(late)


def waited_more(place: LayerGroup, ledgers: Sequence[RankLedger]) -> dict[int, float]:
    """Returns seconds by slowest rank. Of the ranks that meet in a place, the slowest is the one that waited
    least; its seconds are how much longer the others waited, together."""
    keys = {_key(line) for line in place.lines}
    met: defaultdict[tuple, list[tuple[float, int]]] = defaultdict(list)
    for ledger in ledgers:
        waited = sum(line.exposed_s for line in ledger.account.lines if _key(line) in keys)
        met[tuple({**ledger.coordinate, place.axis: 0}.items())].append((waited, ledger.rank))
    more: defaultdict[int, float] = defaultdict(float)
    for ranks in met.values():
        least, slowest = min(ranks)
        more[slowest] += sum(waited - least for waited, _ in ranks)
    return dict(more)


def _key(each: Hidden | Entry) -> Key:
    return each.axis, each.layer, each.name


def _waits(place: LayerGroup, ledger: RankLedger) -> Iterator[tuple[Entry, Key]]:
    keys = {_key(line) for line in place.lines}
    for entry in ledger.entries:
        if entry.kind is EntryKind.WAIT and entry.thread == ledger.thread and _key(entry) in keys:
            yield entry, _key(entry)


def _begins(ledger: RankLedger) -> dict[Key, list[float]]:
    """Returns the times at which the rank began ops that read, in order, by axis, layer and operator."""
    found: defaultdict[Key, set[float]] = defaultdict(set)
    for entry in ledger.entries:
        if entry.kind is EntryKind.READ:
            found[_key(entry)].add(entry.begin)
    return {key: sorted(begins) for key, begins in found.items()}


def _meet(one: RankLedger, other: RankLedger, axis: str) -> bool:
    """Whether two ranks meet over an axis, and have the same clock."""
    places = [{**each.coordinate, axis: 0} for each in (one, other)]
    apart = abs(one.begin - other.begin)
    return one.rank != other.rank and places[0] == places[1] and apart < other.end - other.begin


def tiles(ledgers: Sequence[RankLedger], metrics: Sequence[dict]) -> list[Tile]:
    """Returns at most four tiles: medians of the steps after the first tenth, and means of the ledgers."""
    found = [*_of_metrics(metrics), *(_of_ledgers(ledgers) if ledgers else ())]
    order = ("tok/s", "MFU", "of the limit", "exposed", "validation loss", "training loss")
    rank = {label: number for number, label in enumerate(order)}
    by_label = {tile.label: tile for tile in found}  # a ledger's tile replaces that of the metrics
    if "MFU" in by_label:
        by_label.pop("of the limit", None)
    return sorted(by_label.values(), key=lambda tile: rank.get(tile.label, len(order)))[:4]


def _of_metrics(metrics: Sequence[dict]) -> Iterator[Tile]:
    speed, mfu, exposed = _median(metrics, "tokens_per_second"), _median(metrics, "mfu"), _exposed(metrics)
    seconds = _median(metrics, "step_time_s")
    step = "" if seconds is None else f"{_milliseconds(seconds)} a step"
    if speed is not None:
        yield Tile("tok/s", f"{speed:,.0f}", step)
    elif step:
        yield Tile("a step", _milliseconds(seconds or 0.0), "median")
    if mfu is not None:
        yield Tile("MFU", percent(mfu), "model FLOP/s of the ranks' peak")
    if exposed is not None:
        yield Tile("of the limit", percent(1 - exposed), "a step with nothing exposed is 100 %")
        yield Tile("exposed", percent(exposed), "of a step, in the rank that waits most")
    for name, label in (("val_loss", "validation loss"), ("loss", "training loss")):
        known = [(line[name], line["step"]) for line in metrics if line.get(name) is not None]
        if known:
            loss, step_of_it = known[-1]
            yield Tile(label, f"{loss:.3f}", f"nats per token, step {step_of_it}")


def _of_ledgers(ledgers: Sequence[RankLedger]) -> Iterator[Tile]:
    accounts = [ledger.account for ledger in ledgers]
    whole, steps = total(accounts), sum(ledger.steps for ledger in ledgers)
    shares = [each.exposed_s / each.seconds for each in accounts if each.seconds > 0]
    if shares and whole.axes:
        low, high = percent(min(shares)).removesuffix(" %"), percent(max(shares))
        spread = f"of a step; ranks {low} to {high}" if len(shares) > 1 else "of a step"
        yield Tile("exposed", percent(whole.exposed_s, whole.seconds), spread)
        yield Tile("of the limit", percent(1 - whole.exposed_s / whole.seconds), "100 % is nothing exposed")
    yield Tile("a step", _milliseconds(whole.seconds / steps), "mean")
    yield Tile("computing", percent(whole.computing_s, whole.seconds), "of a step")
    if size := _bytes_read(whole):
        hidden = sum(axis.hidden_bytes for axis in whole.axes.values())
        yield Tile(
            "hidden", percent(hidden, size), f"of {size / steps / 1e6:.2f} MB that a rank reads a step"
        )


def _median(metrics: Sequence[dict], name: str) -> float | None:
    """Returns the median of a figure over the steps after the first tenth, without the first step."""
    later = metrics[max(1, len(metrics) // 10) :] or metrics
    known = [line[name] for line in later if line.get(name) is not None]
    return statistics.median(known) if known else None


def percent(part: float, whole: float = 1.0) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
