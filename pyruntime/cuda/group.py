"""The fused kernels of a group on one host: its workspaces in torch's symmetric memory, and the primitives.

The protocol is told in docs/cuda.md. A workspace grows when a product needs more; all ranks come to that at
the same call, because they call the same products in the same order.
"""

from __future__ import annotations

from contextlib import nullcontext
from ctypes import byref, c_void_p

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from pyruntime.comm.groups import Group, group_name, group_rank, group_size, process_group
from pyruntime.cuda import library as abi
from pyruntime.cuda.kernels import Kernels, dtype_code, product_sizes, stream_of
from pyruntime.cuda.library import CudaLibraryError, Library

PIECES = 4
"""Signals that the rows of one rank are sent with: at the end a product waits for the last piece alone."""


def rows_of_rank(rows: int, world_size: int, rank: int) -> int:
    """Rows are cut as torch.tensor_split cuts them."""
    return rows // world_size + (rank < rows % world_size)


class SharedWorkspace:
    """One rank's workspace and where the others' lie. Collective: all ranks make it together."""

    def __init__(self, library: Library, group: Group, shape: abi.Workspace, device: torch.device) -> None:
        self.shape = shape
        self.memory = symm_mem.empty(library.workspace_bytes(shape), dtype=torch.uint8, device=device)
        library.call("prepare_workspace", byref(shape), self.memory.data_ptr(), stream_of(self.memory))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._handle = symm_mem.rendezvous(self.memory, group_name(group))
        self._handle.barrier(channel=0)  # nobody signals into a workspace that is being prepared
        self.addresses = (c_void_p * group_size(group))(*self._handle.buffer_ptrs)
        self.calls = 0

    def holds(self, shape: abi.Workspace) -> bool:
        return shape.flags <= self.shape.flags and shape.slot_bytes <= self.shape.slot_bytes


class FusedGroup:
    """`all_gather_matmul` and `matmul_reduce_scatter` of a group whose ranks share one host, a kernel each.

    All ranks call the same products with the same sizes in the same order. On a GPU the calls are ordered by
    the current stream and nothing waits for the device; `check()` does, and raises CommTimeout where a wait
    took longer than `deadline_s` (of every single wait, in seconds). After that the group is of no use:
    close it and make another on all ranks.
    """

    def __init__(
        self, library: Library, group: Group, device: torch.device | str, *, deadline_s: float = 120.0
    ) -> None:
        self.kernels = Kernels(library)
        self.device = torch.device(device)
        self._library = library
        self._group = process_group(group)
        self._rank, self._world_size = group_rank(group), group_size(group)
        self._deadline_ns = int(deadline_s * 1e9)
        self._workspaces: dict[str, SharedWorkspace] = {}
        on_gpu = self.device.type == "cuda"
        # Its waits and signals must be scheduled before the blocks of a product that waits for the peers.
        self._push_stream = torch.cuda.Stream(self.device, priority=-1) if on_gpu else None

    def all_gather_matmul(
        self, x_shard: Tensor, weight: Tensor, rows: int, layout: str = "NT", bias: Tensor | None = None
    ) -> Tensor:
        """Y [rows, N] = gather(x_shard) W^T (+ bias). x_shard [rows of this rank, K], weight [N, K] (NT) or
        [K, N] (NN), bias [N]; bf16 or fp16."""
        if layout == "TN":
            raise ValueError("layout 'TN' gathers no rows; use 'NT' or 'NN'.")
        own, n, k = product_sizes(layout, x_shard, weight)
        self._check_rows("x_shard", own, rows)
        y = x_shard.new_empty(rows, n)
        tiles = self._library.choose_tiles(rows_of_rank(rows, self._world_size, 0), rows, n)
        request = self.kernels.request(layout, x_shard, weight, bias, y, rows, tiles)
        shape = abi.Workspace()
        self._library.call(
            "gather_workspace", self._world_size, rows, k, dtype_code(x_shard), PIECES, byref(shape)
        )
        group = self._begin("gather", shape)
        with self._beside_the_current_stream():
            engine = self.device.type == "cuda"
            self._library.call("push_chunk", byref(group), byref(request), engine, 0, stream_of(x_shard))
        self._library.call("all_gather_matmul", byref(group), byref(request), False, stream_of(x_shard))
        if self._push_stream is not None:
            # What writes x_shard next must wait until it has been sent, and so must the slot's next push.
            torch.cuda.current_stream(self.device).wait_stream(self._push_stream)
        return y

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, layout: str = "NT", bias: Tensor | None = None
    ) -> Tensor:
        """This rank's rows of the sum over ranks, in rank order, of X W^T (+ bias): x [M, K], weight [N, K]
        (NT) or [K, N] (NN); TN: x [K, M], weight [K, N]."""
        m, n, _ = product_sizes(layout, x, weight)
        y = x.new_empty(rows_of_rank(m, self._world_size, self._rank), n)
        tiles = self._library.choose_tiles(rows_of_rank(m, self._world_size, 0), m, n)
        request = self.kernels.request(layout, x, weight, bias, y, m, tiles)
        shape = abi.Workspace()
        self._library.call("scatter_workspace", self._world_size, m, n, dtype_code(x), tiles, byref(shape))
        group = self._begin("scatter", shape)
        self._library.call("matmul_reduce_scatter", byref(group), byref(request), stream_of(x))
        return y

    def check(self) -> None:
        """Waits for the current stream. Raises CommTimeout where a wait of this group failed."""
        for workspace in self._workspaces.values():
            self._library.raise_failure(self._view(workspace, 0), stream_of(workspace.memory))

    def close(self) -> None:
        """Waits for the device and lets go of the workspaces; on all ranks, when none uses them any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._workspaces.clear()

    def _check_rows(self, name: str, found: int, rows: int) -> None:
        wanted = rows_of_rank(rows, self._world_size, self._rank)
        if found != wanted:
            raise ValueError(
                f"{name} has {found} rows on rank {self._rank}; of {rows} rows over {self._world_size} ranks "
                f"it holds {wanted}."
            )

    def _begin(self, kind: str, shape: abi.Workspace) -> abi.Group:
        """The next flight of a kind, in the slot that is its turn."""
        workspace = self._workspaces.get(kind)
        if workspace is None or not workspace.holds(shape):
            workspace = self._grow(kind, shape)
        workspace.calls += 1
        return self._view(workspace, workspace.calls % abi.SLOTS)

    def _grow(self, kind: str, shape: abi.Workspace) -> SharedWorkspace:
        before = self._workspaces.get(kind)
        if before is not None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise CudaLibraryError(
                    "a workspace cannot grow while a CUDA graph is captured; run the products once before."
                )
            # The old memory may go when every rank has ended its flights: check() waits for this rank's, the
            # barrier for the others'.
            self.check()
            before._handle.barrier(channel=0)
            shape.slot_bytes = max(shape.slot_bytes, before.shape.slot_bytes)
            shape.flags = max(shape.flags, before.shape.flags)
        made = SharedWorkspace(self._library, self._group, shape, self.device)
        self._workspaces[kind] = made
        return made

    def _view(self, workspace: SharedWorkspace, slot: int) -> abi.Group:
        return abi.Group(workspace.shape, self._rank, slot, self._deadline_ns, workspace.addresses)

    def _beside_the_current_stream(self):
        if self._push_stream is None:
            return nullcontext()
        self._push_stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._push_stream)
