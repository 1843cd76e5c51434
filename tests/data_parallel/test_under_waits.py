"""Weight gradients that data parallelism takes, multiplied under the waits of tensor parallelism between
hosts: the bits of those at once, one order of leaving, and the same end of every failure."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import gelu

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel.reducer import GradientReducer
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear
from pyruntime.nn.cut import memory_of
from pyruntime.nn.weight_sinks import InTurn
from pyruntime.overlap import EntryKind

ROWS, FEATURES, INNER = 157, 250, 1331
"""A weight gradient has 52 million floating-point operations: two pieces."""
PRODUCT = "linear weight gradient"
_meshes: list[DeviceMesh] = []


def mesh_of(transport: str = "process_group") -> DeviceMesh:
    """(dp, tp) of the pool's four ranks, made once; tp goes between hosts unless it is told otherwise."""
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    for axis, kind in (("tp", transport), ("dp", "process_group")):
        group = _meshes[0][axis]
        if comm.transport_of(group).startswith("ring") != (kind == "process_group"):
            comm.close(group)
            comm.configure(group, transport=kind, chunk_bytes=16 << 10)
    return _meshes[0]


class Block(nn.Module):
    def __init__(self, group, dtype: torch.dtype):
        super().__init__()
        options = {"group": group, "dtype": dtype, "bias": False, "tier": "chunked"}
        self.up = ColumnParallelLinear(FEATURES, INNER, **options)
        self.down = RowParallelLinear(INNER, FEATURES, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(x, ROWS)))


class Model(nn.Module):
    """Blocks of two linears, the same on every replica. late: the block whose backward pass takes `late_s`
    seconds longer on this rank."""

    def __init__(self, group, dtype: torch.dtype, blocks: int = 3):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(group, dtype) for _ in range(blocks))
        self.late: int | None = None
        self.late_s = 0.05

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.late:
                x.register_hook(lambda _: time.sleep(self.late_s))
        return x


@contextlib.contextmanager
def recorded(names: list[str]) -> Iterator[None]:
    """Buckets as they leave."""
    leave = GradientReducer._leave

    def noted(self, index, *arguments, **options):
        names.append(self._inboxes[index].bucket.name)
        return leave(self, index, *arguments, **options)

    GradientReducer._leave = noted
    try:
        yield
    finally:
        GradientReducer._leave = leave


def batch(step: int, replica: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(ROWS, FEATURES, generator=generator, dtype=dtype)


def train(
    group, transport: str, stage: int, dtype: torch.dtype, late: int | None, at_once: bool
) -> tuple[list[Tensor], list[float], list[str], bool]:
    """Weights, norms, buckets as they left, and whether products were multiplied piece by piece."""
    mesh = mesh_of(transport)
    tp, replica = mesh["tp"], mesh.get_local_rank("dp")
    model = Model(tp, dtype)
    handle = pyruntime.shard(model, mesh["dp"], stage=stage, bucket_bytes=1)
    optimizer = handle.adamw(lr=1e-2, weight_decay=0.0)
    if late == group.rank():
        model.late = 1
    norms, names = [], []
    most, InTurn.MOST = InTurn.MOST, 0 if at_once else InTurn.MOST
    try:
        with recorded(names), pyruntime.ledger() as ledger:
            for step in range(2):
                for last in (False, True):
                    x = batch(2 * step + last, replica, dtype).tensor_split(2)[mesh.get_local_rank("tp")]
                    loss = model(x).square().sum() / ROWS
                    with contextlib.nullcontext() if last else handle.accumulate():
                        loss.backward()
                norms.append(optimizer.step().grad_norm)
    finally:
        InTurn.MOST = most
    handle.complete()
    found = any(entry.kind is EntryKind.OP and entry.name == PRODUCT for entry in ledger.stretch.entries)
    weights = [memory_of(parameter).clone() for parameter in model.parameters()]
    handle.close()
    return weights, norms, names, found


def bits(group, stage: int, dtype: torch.dtype) -> tuple[list[Tensor], list[float], list[str]]:
    plain, norms, order, found = train(group, "process_group", stage, dtype, None, at_once=True)
    assert found
    orders = []
    for late in (None, 3):
        weights, other, names, _ = train(group, "process_group", stage, dtype, late, at_once=False)
        assert other == norms, f"rank {late} was late"
        for one, two in zip(weights, plain, strict=True):
            assert torch.equal(one, two), f"rank {late} was late"
        orders.append(names)
    assert orders[1:] == orders[:1]
    assert sorted(orders[0]) == sorted(order)
    return plain, norms, orders[0]


def reference(dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """One process: weights [column, row, ...] and norms."""
    torch.manual_seed(1)
    model = Model(None, dtype)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for step in range(2):
        for part in range(2):
            for replica in range(2):
                loss = model(batch(2 * step + part, replica, dtype)).square().sum() / ROWS
                (loss / 2).backward()
        norms.append(float(nn.utils.get_total_norm([weight.grad for weight in weights])))
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in weights], norms


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.second_tier("0", "3")
def test_gradients_under_waits_have_the_bits_of_those_at_once_and_are_those_of_one_process(ranks, stage):
    results = ranks.run(bits, 4, stage, torch.float64)
    expected, norms = reference(torch.float64)
    for rank, (weights, found, names) in enumerate(results):
        assert names == results[0][2], "all ranks must send their buckets in one order"
        assert found == pytest.approx(norms, rel=1e-9)
        for number, (weight, whole) in enumerate(zip(weights, expected, strict=True)):
            mine = whole.tensor_split(2, number % 2)[rank % 2]
            torch.testing.assert_close(weight, mine, rtol=0, atol=1e-7)


def test_so_do_those_of_bf16(ranks):
    results = ranks.run(bits, 4, 2, torch.bfloat16)
    assert all(names == results[0][2] for _, _, names in results)


def on_one_host(group) -> bool:
    return train(group, "symmetric_memory", 2, torch.float32, None, at_once=False)[3]


def test_on_one_host_they_are_multiplied_where_they_leave_from(ranks):
    assert ranks.run(on_one_host, 4) == [False] * 4


def filled(group) -> tuple[float, float]:
    """Seconds of products that this rank multiplied before its last wait for tp ended; rank 1 is late."""
    mesh = mesh_of()
    model = Model(mesh["tp"], torch.float32)
    handle = pyruntime.shard(model, mesh["dp"], bucket_bytes=1)
    optimizer = handle.adamw()
    for step in range(2):
        if step == 1 and group.rank() == 1:
            model.late, model.late_s = 0, 0.5
        with pyruntime.ledger() as ledger:
            x = batch(step, 0, torch.float32).tensor_split(2)[mesh.get_local_rank("tp")]
            model(x).square().mean().backward()
        optimizer.step()
    handle.close()
    entries = ledger.stretch.entries
    waits = [entry for entry in entries if entry.kind is EntryKind.WAIT and entry.axis == "tp"]
    products = [entry for entry in entries if entry.kind is EntryKind.OP and entry.name == PRODUCT]
    assert not any(wait.begin < each.begin < wait.end for wait in waits for each in products)
    last = max((wait.end for wait in waits), default=0.0)  # a late rank may not have waited
    return sum(each.seconds for each in products if each.end < last), sum(each.seconds for each in products)


def test_a_rank_that_waits_multiplies(ranks):
    under, all_of_it = ranks.run(filled, 4)[0]
    assert 0 < under <= all_of_it


def failing(group) -> tuple[list[str], bool]:
    """A pass that fails on every rank while products wait; then the step is taken again."""
    mesh = mesh_of()
    replica, place = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    def step(model, optimizer) -> float:
        x = batch(0, replica, torch.float32).tensor_split(2)[place]
        model(x).square().mean().backward()
        return optimizer.step().grad_norm

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("of this test")

    found = []
    for fails in (False, True):
        model = Model(mesh["tp"], torch.float32)
        handle = pyruntime.shard(model, mesh["dp"], bucket_bytes=1)
        optimizer = handle.adamw()
        if fails:
            model.blocks[1].up.register_forward_hook(lambda _module, _x, y: y.register_hook(fail) and None)
            with pytest.raises(RuntimeError, match="of this test"):
                step(model, optimizer)
            model.blocks[1].up._forward_hooks.clear()
            with pyruntime.ledger() as ledger:
                model(batch(0, replica, torch.float32).tensor_split(2)[place])
            assert all(entry.name != PRODUCT for entry in ledger.stretch.entries), "its queue lives on"
        norm = step(model, optimizer)
        handle.complete()
        found.append((norm, [parameter.detach().clone() for parameter in model.parameters()]))
        handle.close()
    (norm, weights), (other, same) = found
    assert norm == other
    assert all(torch.equal(one, two) for one, two in zip(weights, same, strict=True))


def test_a_pass_that_fails_takes_its_products_with_it(ranks):
    ranks.run(failing, 4)


def faulty(group, fault: str) -> tuple[str, str, float]:
    """Rank 1 is killed, or late, while rank 0 multiplies under its wait for it."""
    mesh = mesh_of()
    model = Model(mesh["tp"], torch.float32)
    handle = pyruntime.shard(model, mesh["dp"], bucket_bytes=1)
    optimizer = handle.adamw()
    x = batch(0, 0, torch.float32).tensor_split(2)[mesh.get_local_rank("tp")]
    model(x).square().mean().backward()
    optimizer.step()
    for axis in ("tp", "dp"):
        comm.set_deadline(mesh[axis], 30.0 if fault == "killed" else 1.0)

    def fail(gradient: Tensor) -> None:
        time.sleep(0.2 if fault == "killed" else 4.0)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    y = model.blocks[1](model.blocks[0](x))
    if group.rank() == 1:
        y.register_hook(fail)
    start = time.monotonic()
    try:
        model.blocks[2](y).square().mean().backward()
        optimizer.step()
    except pyruntime.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.parametrize(
    ("fault", "error", "most"), [("killed", "PeerLost", 10.0), ("late", "CommTimeout", 3.5)]
)
@pytest.mark.second_tier("late-CommTimeout-3.5")
def test_a_fault_in_the_middle_of_a_filled_wait_ends_all(ranks, fault, error, most):
    outcomes = ranks.launch(faulty, 4, fault)
    if fault == "killed":
        assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        found, message, seconds = outcomes[rank].value
        assert found == error and "rank" in message, (rank, message)
        assert seconds < most, (rank, message)
