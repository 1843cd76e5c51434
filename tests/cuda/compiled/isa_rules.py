"""Rules for the instructions of kernels on AMD's GPUs. Each takes a kernel or its tile and returns
complaints, none if the rule holds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.gpu.cdna_code import FLAG, MATRIX, WIDE_LOAD, Kernel
from bench.gpu.cdna_model import LANES, SHARED_BYTES, SIMDS, VGPRS_PER_SIMD_LANE, Tile

ATOMICS = ("add", "cmpswap")
"""Operations on 32-bit integers; AMD's GPUs may drop other atomics in uncached memory."""
MATRIX_INSTRUCTIONS = {
    ("gfx90a", "Bf16"): "v_mfma_f32_16x16x16bf16_1k",
    ("gfx90a", "Fp16"): "v_mfma_f32_16x16x16f16",
    ("gfx942", "Bf16"): "v_mfma_f32_16x16x16_bf16",
    ("gfx942", "Fp16"): "v_mfma_f32_16x16x16_f16",
    ("gfx950", "Bf16"): "v_mfma_f32_16x16x32_bf16",
    ("gfx950", "Fp16"): "v_mfma_f32_16x16x32_f16",
}
VGPR_GRANULE = 8
POLL = {"gfx90a": "glc"}
"""The bits of a flag's load that bypasses the caches; elsewhere sc0 sc1."""
DROP_CACHES = {"gfx90a": ("buffer_invl2", "buffer_wbinvl1_vol")}
"""The instructions after it, so that later loads do not hit stale caches; elsewhere buffer_inv sc0 sc1."""
NEAR = 12
"""The most instructions between two that belong together."""


def multiplies(tile: Tile, architecture: str) -> list[str]:
    """The loop has exactly the matrix instructions, of the right type, that the tile's FLOPs need."""
    turn = tile.code.turn(tile.loads)
    if turn is None:
        return ["no loop multiplies and brings the next operands by loads of 16 bytes alone"]
    found = [line.split()[0] for line in turn if line.startswith(MATRIX)]
    wanted = MATRIX_INSTRUCTIONS[architecture, tile.dtype]
    depth = 32 if "16x16x32" in wanted else 16
    count = tile.rows * tile.columns * 32 // (16 * 16 * depth * tile.waves)
    return [] if found == [wanted] * count else [f"a turn has {len(found)} of {set(found)}, not {count}"]


def loads_run_ahead(tile: Tile) -> list[str]:
    """No instruction waits for the loads of a turn before its barrier."""
    turn = tile.code.turn(tile.loads) or []
    at = [i for i, line in enumerate(turn) if line.startswith(WIDE_LOAD)]
    if not at:
        return ["a turn loads nothing"]
    ends = [i for i, line in enumerate(turn) if line.startswith("s_barrier") and i > at[0]]
    waits = [line for line in turn[at[0] : ends[0] if ends else None] if "vmcnt" in line]
    return [f"loads are waited for at once: {line}" for line in waits]


def no_scratch(kernel: Kernel) -> list[str]:
    complaints = [f"{kernel.scratch_bytes} bytes of scratch memory a lane"] if kernel.scratch_bytes else []
    used = [line for line in kernel.instructions if re.match(r"scratch_|buffer_(load|store)_dword", line)]
    return complaints + [f"scratch memory is used: {line}" for line in used]


def calls_nothing(kernel: Kernel) -> list[str]:
    """Everything is inlined, because counts of registers and scratch memory exclude callees."""
    return [f"a function is called: {line}" for line in kernel.instructions if "swappc" in line]


def fits(tile: Tile) -> list[str]:
    """The waves and blocks of the tile's configuration can be resident."""
    complaints = []
    registers = -(-tile.code.vgprs // VGPR_GRANULE) * VGPR_GRANULE * tile.waves_a_simd
    if registers > VGPRS_PER_SIMD_LANE:
        complaints.append(f"{tile.waves_a_simd} waves a SIMD take {registers} registers of a lane")
    shared = (tile.shared_bytes + tile.code.shared_bytes) * tile.blocks
    if shared > SHARED_BYTES:
        complaints.append(f"{tile.blocks} blocks take {shared} bytes of shared memory")
    if tile.code.threads != tile.waves * LANES or tile.waves * tile.blocks < 2 * SIMDS:
        complaints.append(f"{tile.code.threads} threads, {tile.blocks} blocks: not two waves a SIMD")
    return complaints


def integer_atomics(kernel: Kernel) -> list[str]:
    """Atomics outside shared memory are only integer additions and compare-and-swaps."""
    found = re.findall(r"^((?:flat|global|buffer)_atomic_(\w+))", "\n".join(kernel.instructions), re.M)
    return [f"{line} is dropped in uncached memory" for line, what in found if what not in ATOMICS]


def flags_follow_data(kernel: Kernel) -> list[str]:
    """Before every flag L2 is written back, the kernel waits for that, and stores only flags since."""
    complaints = []
    state = "nothing"  # then "written back", "waited for"
    after_mark = False
    for line in kernel.lines:
        if line == FLAG:
            after_mark = True
            if state != "waited for":
                complaints.append(f"a flag follows {state}")
        elif line.startswith("buffer_wbl2"):
            state = "written back"
        elif re.match(r"s_waitcnt .*vmcnt\(0\)", line) and state == "written back":
            state = "waited for"
        elif re.match(r"(flat|global|buffer)_(store|atomic)", line):
            if not after_mark:
                state = "a store"
            after_mark = False
    return complaints


def polls_read_past_the_caches(kernel: Kernel, architecture: str) -> list[str]:
    """A flag is loaded past the caches, the kernel waits for it, and then invalidates the caches."""
    poll = rf"(flat|global)_load_dwordx2 .* {POLL.get(architecture, 'sc0 sc1')}"
    then = [r"s_waitcnt .*vmcnt\(0\)", *DROP_CACHES.get(architecture, ("buffer_inv sc0 sc1",))]
    lines = kernel.instructions
    polls = [at for at, line in enumerate(lines) if re.match(poll, line)]
    broken = [at for at in polls if not _in_order(lines[at + 1 : at + 1 + NEAR], then)]
    return [f"loads may run before a flag is seen: {lines[at]}" for at in broken]


def stores_leave_before_signals(kernel: Kernel) -> list[str]:
    """In a scatter every wave waits for its stores before the two barriers that precede signals."""
    lines = kernel.instructions
    barriers = [at for at, line in enumerate(lines) if line.startswith("s_barrier")]
    drained = sum(_has_drained(lines[max(0, at - NEAR) : at]) for at in barriers)
    return [] if drained >= 2 else [f"{drained} barriers follow a wait for all stores, not 2"]


def _in_order(lines: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether lines match the patterns in order, with others between."""
    rest = iter(lines)
    return all(any(re.match(pattern, line) for line in rest) for pattern in patterns)


def _has_drained(lines: Sequence[str]) -> bool:
    """Whether the kernel's wait for all its stores is among these lines, and no store follows it."""
    stores = [at for at, line in enumerate(lines) if re.match(r"(global|flat|buffer)_(store|atomic)", line)]
    return "s_waitcnt vmcnt(0)" in lines[max(stores, default=-1) + 1 :]
