"""Reads and writes schedules as CSV, so that they can be edited by hand.

A header line, then one line a rank with its actions in order::

    kind,1f1b,micro_batches,2,slices,1,placement,0 1
    F0.0,F0.1,B0.0,B0.1
    F1.0,B1.0,F1.1,B1.1

F1.0 is the forward of stage 1 for micro-batch 0, F1.0/2 that of its slice 2. B is a backward, I and W are its
two halves. `placement` is the rank of each stage. Sends and receives (SA, RA, SG, RG) may be left out. If
micro-batches skip stages, the header goes on with the stages that each visits, in order::

    kind,1f1b,micro_batches,2,slices,1,placement,0 1 2,paths,0-1-2 0-2

If stages have replicas, their number follows (`Schedule.replicas`)::

    kind,1f1b,micro_batches,2,slices,1,placement,0 1 2 3,paths,0-2 1-3,replicas,2
"""

from __future__ import annotations

import csv
import io
import re

from pyruntime.pipeline.actions import Action, Kind, Schedule, with_transfers

NAMES = ("kind", "micro_batches", "slices", "placement")
"""Every second cell of the header; some of MORE_NAMES may follow."""
MORE_NAMES = ("paths", "replicas")
CELL = re.compile(r"([A-Z]+)([0-9]+)\.([0-9]+)(?:/([0-9]+))?")
KINDS = {kind.value: kind for kind in Kind}


def to_csv(schedule: Schedule) -> str:
    """Returns `schedule` as CSV. If `check` accepts the schedule, `from_csv` makes the same one from it.

    Sends and receives are left out if they stand where `with_transfers` would put them.
    """
    actions = tuple(tuple(action for action in own if action.kind.is_compute) for own in schedule.actions)
    if with_transfers(actions, schedule.placement, schedule.paths) != schedule.actions:
        actions = schedule.actions
    placement = " ".join(map(str, schedule.placement))
    values = (schedule.kind, schedule.micro_batches, schedule.slices, placement)
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    header = [cell for pair in zip(NAMES, values, strict=True) for cell in pair]
    if schedule.paths:
        header += [MORE_NAMES[0], " ".join("-".join(map(str, path)) for path in schedule.paths)]
    if schedule.replicas > 1:
        header += [MORE_NAMES[1], str(schedule.replicas)]
    writer.writerow(header)
    writer.writerows(map(str, own) for own in actions)
    return lines.getvalue()


def from_csv(text: str) -> Schedule:
    """Reads the schedule in `text`. If it has no sends and receives, `with_transfers` adds them. Empty cells
    are skipped.

    Raises ValueError, one sentence that names line and cell, for text that cannot be read. Does not check
    whether the schedule works: see `check`.
    """
    rows = _rows(text)
    if not rows:
        raise ValueError(
            f"The table is empty; its first line must be {','.join(NAMES)}, each with its value."
        )
    kind, micro_batches, slices, placement, paths, replicas = _header(rows[0])
    ranks = max(placement) + 1
    lines = rows[1:]
    while len(lines) > ranks and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if len(lines) != ranks:
        raise ValueError(
            f"line 1, cell 8: stages are placed on {ranks} rank(s), but there are {len(lines)} line(s) of "
            "actions below it; write one for each rank."
        )
    actions = tuple(
        tuple(
            _action(cell.strip(), f"line {number}, cell {column}", len(placement))
            for column, cell in enumerate(line, start=1)
            if cell.strip()
        )
        for number, line in enumerate(lines, start=2)
    )
    if all(action.kind.is_compute for own in actions for action in own):
        actions = with_transfers(actions, placement, paths)
    return Schedule(kind, micro_batches, slices, placement, actions, paths, replicas)


def _rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"The table is not CSV: {error}.") from error


def _header(cells: list[str]) -> tuple[str, int, int, tuple[int, ...], tuple[tuple[int, ...], ...], int]:
    stripped = [cell.strip() for cell in cells]
    while len(stripped) > 2 * len(NAMES) and not stripped[-1]:
        stripped.pop()
    least = 2 * len(NAMES)
    more = MORE_NAMES[: (len(stripped) > least) + (len(stripped) > least + 3)]
    names = (*NAMES, *more)
    for index, name in enumerate(names):
        found = stripped[2 * index] if 2 * index < len(stripped) else ""
        if found != name:
            raise ValueError(f"line 1, cell {2 * index + 1}: expected {name}, found {_shown(found)}.")
    if len(stripped) != 2 * len(names):
        raise ValueError(f"line 1: expected {2 * len(names)} cells, found {len(stripped)}.")
    _, micro_batches, slices, placement, *rest = stripped[1::2]
    paths, replicas = rest[:1], rest[1:]
    stages = placement.split()
    if not stages:
        raise ValueError("line 1, cell 8: expected the rank of each stage, found nothing; write e.g. 0 1.")
    return (
        cells[1],
        _number(micro_batches, "line 1, cell 4"),
        _number(slices, "line 1, cell 6"),
        tuple(_number(rank, "line 1, cell 8") for rank in stages),
        tuple(
            tuple(_number(stage, "line 1, cell 10") for stage in path.split("-"))
            for each in paths
            for path in each.split()
        ),
        _number(replicas[0], "line 1, cell 12") if replicas else 1,
    )


def _shown(cell: str) -> str:
    """Returns `cell` for an error message: on one line and short."""
    text = cell if cell.isprintable() else ascii(cell)
    return (text if len(text) <= 40 else f"{text[:40]}..") or "nothing"


def _number(cell: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", cell):
        raise ValueError(f"{where}: expected a number, found {_shown(cell)}.")
    return int(cell)


def _action(cell: str, where: str, stages: int) -> Action:
    match = CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{where}: {_shown(cell)} is no action; write e.g. F0.3, or F0.3/1 for slice 1.")
    code, *numbers = match.groups(default="0")
    if code not in KINDS:
        raise ValueError(f"{where}: {cell} begins with none of {', '.join(KINDS)}.")
    action = Action(KINDS[code], *(_number(number, where) for number in numbers))
    if action.stage >= stages:
        raise ValueError(f"{where}: {cell} names stage {action.stage}, but line 1 places {stages} stage(s).")
    return action
