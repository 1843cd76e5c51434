"""One process that plays the ranks of a group on one GPU: workspaces, signals set by hand, device timing.

The layout of a workspace is that of csrc/cuda/portable/workspace.cuh; it is compared with what the library
says before anything relies on it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_int32, c_int64, c_void_p

import torch
from common import Sample
from torch import Tensor

from pyruntime.cuda import library as abi
from pyruntime.cuda.kernels import Kernels, dtype_code
from pyruntime.cuda.library import Library

SLOT = 0  # all flights use one slot, so that nothing of the other need be there
ALWAYS = 1 << 62  # an epoch that never comes: a signal of this value is set for good
DEADLINE_S = 5.0
PIECES = 4  # of a rank's rows in a gather, each with a flag
TILES = {abi.SMALL: "small", abi.LARGE: "large"}

CHUNK_SIGNATURES = {
    "pyruntime_put": [POINTER(abi.Group), c_void_p, c_int64, c_int32, c_int64, c_int32, c_int32, c_void_p],
    "pyruntime_end_puts": [POINTER(abi.Group), c_void_p],
    "pyruntime_await": [POINTER(abi.Group), c_int32, c_int32, c_int32, c_void_p],
    "pyruntime_finish": [POINTER(abi.Group), c_void_p],
    "pyruntime_slot_data": [POINTER(abi.Group), POINTER(c_void_p)],
    "pyruntime_sm90_choose_tiles": [c_int64, c_int64, c_int64, c_int64, c_int32],
}
"""Those that only the C++ core calls otherwise."""


def load(path=None, *, hopper: bool) -> Library:
    """The library; all its functions that the benchmarks call take their arguments at full width."""
    library = Library(path, hopper=hopper)
    for name, arguments in CHUNK_SIGNATURES.items():
        if hasattr(library._library, name):
            getattr(library._library, name).argtypes = arguments
    return library


def library_of(which: str) -> Library:
    """The portable kernels, or those for Hopper. Raises RuntimeError where these do not run."""
    if which == "portable":
        return load(hopper=False)
    if torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError(f"{torch.cuda.get_device_name()} is no Hopper, for which these kernels are.")
    library, ones = load(hopper=True), torch.ones(128, 128, dtype=torch.bfloat16, device="cuda")
    Kernels(library).matmul(ones, ones)
    if library.refusal:
        raise RuntimeError(library.refusal)
    return library


def round_up(size: int) -> int:
    return (size + 127) // 128 * 128


class Layout:
    """Byte offsets in a workspace."""

    def __init__(self, shape: abi.Workspace) -> None:
        signals = shape.world_size * shape.flags
        self.credits_at = 128
        self.flags_at = round_up(self.credits_at + 8 * shape.world_size)
        self.data_at = round_up(self.flags_at + 12 * signals)
        self.slot_stride = self.data_at + round_up(shape.slot_bytes)
        self.first_slot = 128
        self.credits, self.flags = shape.world_size, signals

    @property
    def end_of_first_slot(self) -> int:
        return self.first_slot + self.slot_stride

    @property
    def data(self) -> int:
        """Of slot 0."""
        return self.first_slot + self.data_at


class Workspaces:
    """The workspaces of all ranks of a group, of which this process plays each; `memory` of rank 0 is whole,
    the others' reach as far as slot 0 does."""

    def __init__(self, library: Library, shape: abi.Workspace, device: str, peers: str | None = None) -> None:
        """`peers`: where the others' workspaces lie, "pinned" for the host's memory; else on `device`."""
        self.library, self.shape, self.layout = library, shape, Layout(shape)
        whole = library.workspace_bytes(shape)
        if whole != self.layout.first_slot + abi.SLOTS * self.layout.slot_stride:
            raise RuntimeError(
                f"the library's workspace has {whole} bytes, which bench/gpu_ranks.py misreads."
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
            raise RuntimeError("the data of a slot lie elsewhere than bench/gpu_ranks.py believes.")

    def set_all_signals(self) -> None:
        """Rank 0 never waits again."""
        at = self.layout.first_slot
        for offset, count in (
            (self.layout.credits_at, self.layout.credits),
            (self.layout.flags_at, self.layout.flags),
        ):
            self.memory[0][at + offset :][: 8 * count].view(torch.int64).fill_(ALWAYS)

    def data(self, rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """The first elements of the slot's data, as a tensor that shares its memory."""
        count = 1
        for size in shape:
            count *= size
        itemsize = torch.empty(0, dtype=dtype).element_size()
        return self.memory[rank][self.layout.data :][: count * itemsize].view(dtype).view(*shape)

    def check(self) -> None:
        """Raises CommTimeout where a wait of rank 0 failed."""
        self.library.raise_failure(self.views[0], stream())


def stream() -> int | None:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def gather_shape(library: Library, world_size: int, m: int, k: int, x: Tensor, pieces: int) -> abi.Workspace:
    shape = abi.Workspace()
    library.call("gather_workspace", world_size, m, k, dtype_code(x), pieces, byref(shape))
    return shape


def scatter_shape(library: Library, world_size: int, m: int, n: int, x: Tensor) -> abi.Workspace:
    shape = abi.Workspace()
    library.call("scatter_workspace", world_size, m, n, dtype_code(x), byref(shape))
    return shape


def tiles_for(library: Library, hopper: bool, chunk_rows: int, m: int, n: int, k: int) -> int:
    if not hopper:
        return library.choose_tiles(chunk_rows, m, n)
    return library._function("sm90_choose_tiles")(chunk_rows, m, n, k, 0)


def fused(
    library: Library, spaces: Workspaces, op: str, a: Tensor, weight: Tensor, c: Tensor, m: int, tiles: int
) -> Callable[[], None]:
    """Rank 0's fused product, as something to call. `a`: its shard (gather) or all of X (scatter)."""
    request = Kernels(library).request("NT", a, weight, None, c, m, tiles)

    def run() -> None:
        group = byref(spaces.views[0])
        if op == "gather":
            library.call("all_gather_matmul", group, byref(request), 0, stream())
        else:
            library.call("matmul_reduce_scatter", group, byref(request), stream())

    return run


def error_of(seen: Tensor, wanted: Tensor) -> float:
    """|seen - wanted| / |wanted|; infinite where something was not written (NaN)."""
    difference = torch.linalg.vector_norm(seen.float() - wanted.float()) / torch.linalg.vector_norm(
        wanted.float()
    )
    value = float(difference)
    return value if value == value else float("inf")


class Stopwatch:
    """Times by CUDA events what variants take turns to do on the current stream.

    Before each timing the L2 is overwritten, and the device is kept busy for `lead_s` while the host queues
    what is timed, so launches cost nothing that the device does not see.
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
        """Seconds of every variant. Warms up with one round that is not counted."""
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
