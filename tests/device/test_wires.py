"""Rows that are rounded on their way between devices: the bits of the CPU's formats, and every wire of the
trainer, without a wait of the host."""

from __future__ import annotations

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.comm import Runtime
from pyruntime.comm.channel import Channels
from pyruntime.comm.wire import Wire
from tests.comm.test_wire import rows_of
from tests.cuda import build as kernels
from tests.device import sim
from tests.device.test_training import ONCE_A_STEP, job, learned, waits_of_steps
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

FORMATS = ["bf16", "fp8"]
WIRES = {
    "pipeline": ({"pp": 2}, {"wire": "fp8"}),
    "data_parallel": ({"dp": 2, "zero": 3}, {"weight_wire": "fp8"}),
    "context": ({"cp": 2}, {"wire": "fp8"}),
    "parallel": ({"tp": 2}, {"tp_wire": "fp8"}),
}
"""Axes, and options of a section."""


def compare_bits(group):
    sim.begin(delays=4)
    with pytest.raises(ValueError, match="cannot round rows on sim: there are no device kernels for"):
        Wire("fp8", 8, torch.float32, sim.DEVICE)
    sim.use_kernels(kernels.LIBRARY)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (1, 130, 512, 515):
            rows = rows_of(dtype, width)
            rows[1, width // 2] = float("inf")
            for name in FORMATS:
                here, there = (Wire(name, width, dtype, device) for device in ("cpu", sim.DEVICE))
                packed = there.packed(rows.to(sim.DEVICE))
                assert torch.equal(packed.cpu(), here.packed(rows)), (name, dtype, width)
                read = there.unpacked(packed).cpu()
                assert torch.equal(read.nan_to_num(), here.unpacked(here.packed(rows)).nan_to_num())
                assert torch.equal(read.isnan(), here.unpacked(here.packed(rows)).isnan())


def test_formats_have_the_bits_of_the_cpu(ranks):
    ranks.run(compare_bits, 1)


def exchange(group):
    """What a message and a gather bring, and by how much a second time makes the host wait."""
    sim.begin_rank(delays=6)
    sim.use_kernels(kernels.LIBRARY)
    width, rows = 130, 7
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(9, width, generator=generator)
    dy = torch.randn(rows, width, generator=generator)
    with Runtime.start(tp=2, device=sim.DEVICE) as runtime:
        own, rank = comm.process_group(runtime.tp.mesh), runtime.rank
        shard, w, dy_shard = (
            each.to(sim.DEVICE) for each in (x.tensor_split(2)[rank], weight, dy.tensor_split(2)[rank])
        )
        hidden = torch.ones(rows, 9, device=sim.DEVICE, requires_grad=True)
        whole, down = x.to(sim.DEVICE), weight.t().contiguous().to(sim.DEVICE)
        for name in FORMATS:
            channels = Channels(own, "pp", [(0, 1)], rows, width, torch.float32, runtime.device, name)

            def once(name=name, channels=channels):
                if rank == 0:
                    channels.send(1, whole)
                else:
                    channels.expect(0, [rows])
                came = channels.receive(0) if rank else None
                gathered = ops.all_gather_matmul(shard, [w], own, rows=rows, return_gathered=True, wire=name)
                ops.matmul_reduce_scatter(hidden, down, own, wire=name).backward(dy_shard)
                grad, hidden.grad = hidden.grad, None
                return came, *gathered, grad

            once()
            sim.reset_counts()
            came, y, gathered, dx = once()
            assert sim.host_waits() == {}, sim.host_waits()
            wire = Wire(name, width, torch.float32)
            read, read_dy = wire.unpacked(wire.packed(x)), wire.unpacked(wire.packed(dy))
            assert came is None or torch.equal(came.cpu(), read)
            assert torch.equal(gathered.cpu(), read) and not torch.equal(read, x)
            torch.testing.assert_close(y.cpu(), read @ weight.t(), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(dx.cpu(), read_dy @ weight.t(), rtol=1e-5, atol=1e-4)


def test_rows_arrive_rounded_and_the_host_never_waits(ranks):
    for rank in ranks.launch(exchange, 2, init=False):
        assert rank.error is None, rank.error


def with_wire(tmp_path, section: str):
    parallel, values = WIRES[section]
    # Large enough that matrices are gathered alone: others travel exactly.
    config = job(tmp_path, parallel={"tp": 1} | parallel, model={"intermediate_size": 1024})
    return config, jobs.changed(config, section, **values)


@pytest.mark.parametrize("section", WIRES)
@pytest.mark.second_tier(but=["pipeline"])
def test_the_trainer_learns_as_with_the_same_wire_on_cpus(ranks, tmp_path, section):
    """The last bits of sums differ between the two, and so may single roundings: a 16th of a value each."""
    plain, config = with_wire(tmp_path, section)
    exact = learned(ranks, plain, "cpu", str(tmp_path / "exact"))
    expected = learned(ranks, config, "cpu", str(tmp_path / "cpu"))
    found = learned(ranks, config, sim.DEVICE, str(tmp_path / "sim"), delays=len(section))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert not torch.allclose(found, exact, rtol=1e-6, atol=0)


@pytest.mark.second_tier
@pytest.mark.parametrize("section", WIRES)
def test_a_steady_step_waits_no_more_than_without(ranks, tmp_path, section):
    _, config = with_wire(tmp_path, section)
    assert waits_of_steps(ranks, config, tmp_path) == ONCE_A_STEP
