"""Plays all ranks of a group on one GPU in one process: workspaces, signals set by hand, device timing.

The layout of a workspace is that of csrc/cuda/portable/workspace.cuh, and is checked against the library
before use.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from bench.common.measuring import Sample
from bench.gpu import library as abi
from bench.gpu.library import Library

SLOT = 0  # all flights use one slot, so the others need no memory
ALWAYS = 1 << 62  # an epoch that is never reached, so a signal with it stays set
DEADLINE_S = 5.0
PIECES = 4  # of a rank's rows in a gather, each with a flag
TILES = {abi.SMALL: "small", abi.LARGE: "large"}
SPARE_BLOCKS = 1  # BlockBudget::kSpare
SIGNAL_ROWS, SIGNAL_COLUMNS = 64, 128  # PYRUNTIME_SIGNAL_ROWS and PYRUNTIME_SIGNAL_COLUMNS


def library_of(which: str) -> Library:
    """Returns the portable kernels, or those for Hopper. Raises RuntimeError if these cannot run."""
    if which == "portable":
        return Library()
    if torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError(f"{torch.cuda.get_device_name()} is not a Hopper, which these kernels need.")
    library = Library(hopper=True)
    library.call("sm90_is_on_device")
    return library


def round_up(size: int) -> int:
    return (size + 127) // 128 * 128


class Layout:
    """Byte offsets in a workspace."""

    def __init__(self, shape: abi.Workspace) -> None:
        signals = shape.world_size * shape.flags
        self.credits_at = 128
        self.flags_at = round_up(self.credits_at + 8 * shape.world_size)
        self.data_at = round_up(self.flags_at + 8 * signals)
        self.slot_stride = self.data_at + round_up(shape.slot_bytes)
        self.first_slot = 128
        self.credits, self.flags = shape.world_size, signals

    @property
    def end_of_first_slot(self) -> int:
        return self.first_slot + self.slot_stride

    @property
    def data(self) -> int:
        """Returns the offset of slot 0's data."""
        return self.first_slot + self.data_at


class Workspaces:
    """The workspaces of all ranks of a group, all played by this process. Rank 0's `memory` is complete; the
    others' end after slot 0."""

    def __init__(self, library: Library, shape: abi.Workspace, device: str, peers: str | None = None) -> None:
        """`peers`: "pinned" puts the others' workspaces into the host's memory; else they are on `device`."""
        self.library, self.shape, self.layout = library, shape, Layout(shape)
        whole = library.workspace_bytes(shape)
        if whole != self.layout.first_slot + abi.SLOTS * self.layout.slot_stride:
            raise RuntimeError(
                f"the library's workspace has {whole} bytes, and bench/gpu/ranks.py counts others."
            )
        self.memory = [torch.zeros(whole, dtype=torch.uint8, device=device)]
        for _ in range(1, shape.world_size):
            where = {"pin_memory": True} if peers == "pinned" else {"device": device}
            self.memory.append(torch.zeros(self.layout.end_of_first_slot, dtype=torch.uint8, **where))
        self.addresses = (c_void_p * shape.world_size)(*(memory.data_ptr() for memory in self.memory))
        deadline = int(DEADLINE_S * 1e9)
        self.views = [
            abi.Group(shape, rank, SLOT, deadline, self.addresses) for rank in range(shape.world_size)
        ]
        data = c_void_p()
        library.call("slot_data", byref(self.views[0]), byref(data))
        if data.value != self.memory[0].data_ptr() + self.layout.data:
            raise RuntimeError("the library's offset of a slot's data differs from bench/gpu/ranks.py.")

    def set_all_signals(self) -> None:
        """Sets all of rank 0's signals for good, so that it never waits."""
        at = self.layout.first_slot
        for offset, count in (
            (self.layout.credits_at, self.layout.credits),
            (self.layout.flags_at, self.layout.flags),
        ):
            self.memory[0][at + offset :][: 8 * count].view(torch.int64).fill_(ALWAYS)

    def data(self, rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Returns the first elements of the slot's data as a tensor over the same memory."""
        count = 1
        for size in shape:
            count *= size
        itemsize = torch.empty(0, dtype=dtype).element_size()
        return self.memory[rank][self.layout.data :][: count * itemsize].view(dtype).view(*shape)

    def check(self) -> None:
        """Raises CommTimeout if a wait of rank 0 failed."""
        self.library.raise_failure(self.views[0], stream())


def stream() -> int | None:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def padded(width: int) -> int:
    """Returns the row stride of sent rows in elements, rounded up to whole vectors."""
    return (width + 7) // 8 * 8


def gather_shape(world_size: int, m: int, k: int, pieces: int) -> abi.Workspace:
    """Returns the workspace of a gather of bf16 rows."""
    return abi.Workspace(world_size, pieces, 2 * m * padded(k))


def scatter_shape(world_size: int, m: int, n: int) -> abi.Workspace:
    """Returns the workspace of a scatter of bf16 parts, with a flag for each signal of a part."""
    rows = -(-m // world_size)
    signals = -(-rows // SIGNAL_ROWS) * -(-n // SIGNAL_COLUMNS)
    return abi.Workspace(world_size, signals, 2 * world_size * rows * padded(n))


def fused(
    library: Library, spaces: Workspaces, op: str, a: Tensor, weight: Tensor, c: Tensor, m: int, tiles: int
) -> Callable[[], None]:
    """Returns a call of rank 0's fused GEMM, launched as csrc/transport/device/fused_gemm.cpp does. `a`: its
    shard (gather) or all of X (scatter); weight [n, k]; bf16."""
    request = abi.Matmul(abi.BF16, abi.NT, tiles, m, *weight.shape, spare_blocks=SPARE_BLOCKS)
    request.a, request.b, request.c = (tensor.data_ptr() for tensor in (a, weight, c))
    request.lda, request.ldb, request.ldc = (tensor.stride(0) for tensor in (a, weight, c))
    name = "all_gather_matmul" if op == "gather" else "matmul_reduce_scatter"
    return lambda: library.fused(name, byref(spaces.views[0]), byref(request), stream())


def reduce(library: Library, out: Tensor, parts: Sequence[Tensor]) -> None:
    """Writes the sum of bf16 parts, in their order, to `out`, as the owner of rows does."""
    addresses = (c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    library.call("reduce", out.data_ptr(), addresses, len(parts), out.numel(), abi.BF16, None, 1, 0, stream())


def error_of(seen: Tensor, wanted: Tensor) -> float:
    """Returns |seen - wanted| / |wanted|; infinite if something was not written (NaN)."""
    difference = torch.linalg.vector_norm(seen.float() - wanted.float()) / torch.linalg.vector_norm(
        wanted.float()
    )
    value = float(difference)
    return value if value == value else float("inf")


class Stopwatch:
    """Times variants by CUDA events while they take turns on the current stream.

    Before each timing the L2 is overwritten, and the device is kept busy for `lead_s` while the host queues
    the timed work, so that slow launches by the host do not count.
    """

    def __init__(self, lead_s: float) -> None:
        properties = torch.cuda.get_device_properties(0)
        self._flush = torch.empty(
            max(4 * properties.L2_cache_size, 1 << 26), dtype=torch.uint8, device="cuda"
        )
        self._cycles = int(lead_s * 2e9)
        self.seed = 0

    def seconds(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(self.seed % 251)
        torch.cuda._sleep(self._cycles)
        begin.record()
        run()
        end.record()
        return begin, end

    def interleave(self, variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Sample]:
        """Returns the seconds of every variant. The first round warms up and is not counted."""
        found: dict[str, list[float]] = {name: [] for name in variants}
        names = sorted(variants)
        gc.collect()
        gc.disable()
        try:
            for round_ in range(-1, rounds):
                self.seed += 1
                random.Random(self.seed).shuffle(names)
                events = {name: self.seconds(variants[name]) for name in names}
                torch.cuda.synchronize()
                for name, (begin, end) in events.items():
                    if round_ >= 0:
                        found[name].append(begin.elapsed_time(end) / 1e3)
        finally:
            gc.enable()
        return {name: Sample(tuple(seconds)) for name, seconds in found.items()}
