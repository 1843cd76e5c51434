"""Reads the instructions and resources of each kernel from the assembly of AMD's compiler (-save-temps, -S).

Instructions have the names of the CDNA ISA documents (gfx90a, gfx942, gfx950), in the listing's order.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from functools import cached_property

from bench.gpu.machine_code import demangled

FLAG = "; flag"
"""The comment that dialect_hip.h puts into the listing before the store of a flag."""
MATRIX = "v_mfma_"
WIDE_LOAD = "global_load_dwordx4"


@dataclass(frozen=True)
class Kernel:
    """A kernel: its C++ `name` without namespaces, its instructions and labels, its resources."""

    name: str
    lines: tuple[str, ...]
    vgprs: int  # per lane, with accumulation registers
    scratch_bytes: int  # per lane
    shared_bytes: int  # static; a launch may add more
    threads: int  # of a block, at most

    @cached_property
    def instructions(self) -> tuple[str, ...]:
        return tuple(line for line in self.lines if not line.endswith(":") and line != FLAG)

    def count(self, prefix: str) -> int:
        return sum(line.startswith(prefix) for line in self.instructions)

    def turn(self, loads: int) -> list[str] | None:
        """Returns one turn of the loop that multiplies: the shortest path from its first matrix instruction
        back to it on which a lane starts `loads` loads of 16 bytes and no narrower ones. None if there is no
        such path."""
        blocks = _basic_blocks(self.lines)
        for begin, block in enumerate(blocks):
            if any(line.startswith(MATRIX) for line in block.lines):
                way = _shortest_turn(blocks, begin, loads)
                if way is not None:
                    return [line for at in way for line in blocks[at].lines]
        return None


def kernels_in(listing: str) -> list[Kernel]:
    """Returns all kernels of a listing for one GPU. Raises ValueError if there are none."""
    metadata = listing.partition("amdhsa.kernels:")[2].split("\n  - ")
    kernels = [dict(re.findall(r"^(?:    )?\.(\w+): +(\w+)$", text, re.M)) for text in metadata]
    described = {fields["name"]: fields for fields in kernels if "name" in fields}
    found = []
    for symbol, body in re.findall(r"^(_Z\w+):[^\n]*\n(.*?)^\.Lfunc_end", listing, re.M | re.S):
        if symbol not in described:
            continue  # a function that kernels call
        fields = described[symbol]
        found.append(
            Kernel(
                demangled(symbol),
                tuple(_lines(body)),
                int(fields["vgpr_count"]),
                int(fields["private_segment_fixed_size"]),
                int(fields["group_segment_fixed_size"]),
                int(fields["max_flat_workgroup_size"]),
            )
        )
    if not found:
        raise ValueError("the listing holds no kernel; build it with tools/build_hip.py.")
    return found


def _lines(body: str) -> list[str]:
    found = []
    for line in body.splitlines():
        if line.strip() == FLAG:
            found.append(FLAG)
            continue
        text = line.split(";")[0].strip()
        if text and (text.endswith(":") or not text.startswith(".")):
            found.append(text)
    return found


@dataclass
class _Block:
    lines: list[str]
    label: str | None
    ends: str = ""  # the branch at its end


def _basic_blocks(lines: tuple[str, ...]) -> list[_Block]:
    blocks = [_Block([], None)]
    for line in lines:
        if line.endswith(":"):
            blocks.append(_Block([], line[:-1]))
        elif line != FLAG:
            blocks[-1].lines.append(line)
            if line.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc")):
                blocks[-1].ends = line
                blocks.append(_Block([], None))
    return blocks


def _successors(blocks: list[_Block], labels: dict[str, int], at: int) -> list[int]:
    ends = blocks[at].ends
    if ends.startswith(("s_endpgm", "s_setpc")):
        return []
    target = [labels[name] for name in re.findall(r"(\.L\w+)$", ends) if name in labels]
    if ends.startswith("s_branch"):
        return target
    return target + ([at + 1] if at + 1 < len(blocks) else [])


def _shortest_turn(blocks: list[_Block], begin: int, loads: int) -> list[int] | None:
    """Dijkstra over (block, loads so far); a block with narrow loads is never entered."""
    labels = {block.label: i for i, block in enumerate(blocks) if block.label}
    wide = [sum(line.startswith(WIDE_LOAD) for line in block.lines) for block in blocks]
    narrow = [
        any(re.match(r"(flat|global)_load_", line) and not line.startswith(WIDE_LOAD) for line in block.lines)
        for block in blocks
    ]
    waiting: list[tuple[int, int, int, list[int]]] = [(0, begin, 0, [])]
    seen = set()
    while waiting:
        length, at, loaded, way = heapq.heappop(waiting)
        if at == begin and way:
            if loaded == loads:
                return way
            continue
        if (at, loaded) in seen or narrow[at] or loaded + wide[at] > loads:
            continue
        seen.add((at, loaded))
        for following in _successors(blocks, labels, at):
            state = (length + len(blocks[at].lines), following, loaded + wide[at], [*way, at])
            heapq.heappush(waiting, state)
    return None
