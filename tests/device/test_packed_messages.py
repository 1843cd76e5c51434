"""What is packed has the bits of CPU ranks on devices of one host and of two: gradients, and displacements of
replicas that rarely synchronize. The host waits for neither."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import pyruntime
from pyruntime import comm
from pyruntime.comm import Runtime, companions
from pyruntime.comm.groups import crosses_hosts
from pyruntime.data_parallel.axes import axes_of
from pyruntime.data_parallel.compression import Compression
from pyruntime.replicas import averaging, co2, streaming_diloco
from pyruntime.train.config import mesh_of
from pyruntime.train.device import Device, check_device
from pyruntime.train.metrics import read
from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from tests.cuda import build as kernels
from tests.data_parallel.compression import cases
from tests.device import sim, test_between_hosts, test_replicas
from tests.device.test_training import job
from tests.train import jobs

pytestmark = pytest.mark.usefixtures("simulated")

CASES = [
    (Compression("quantize", bits=3), co2(3, lr=0.9, momentum=0.4), torch.bfloat16, (0, 1)),
    (Compression("top_k", density=0.05), streaming_diloco(4, fragments=2, delay=1), torch.float32, (1,)),
]
"""Of displacements, and the stages of ZeRO at which gradients are packed."""


def begin(hosts: int) -> None:
    if hosts == 2:
        test_between_hosts.begin(delays=5)
        return
    sim.begin_rank(delays=6)
    sim.use_kernels(kernels.LIBRARY)


def walk(mesh, device, rank, method, settings, dtype):
    """Returns the parameters after every step and in the end, what packing has lost, and the host's waits in
    the rounds after the first."""
    module, goals = test_replicas.model_of(rank, dtype, device)
    with patch.object(averaging, "RUN_BYTES", 4096):
        outer = pyruntime.OuterOptimizer(module, mesh, method, compression=settings)
    found, waits = test_replicas.steps_of(outer, module, goals, 12, method.tau)
    found += [lost for name, lost in outer.state_dict().items() if name.startswith("lost.")]
    outer.close()
    return [each.cpu() for each in found], waits


def compare(group, hosts, world):
    begin(hosts)
    with Runtime.start(tp=1, dp=world, device="sim") as runtime:
        if hosts == 2:
            test_between_hosts.tell_hosts()
        on_cpu = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for settings, method, dtype, stages in CASES:
            here, _ = walk(on_cpu, "cpu", runtime.rank, method, settings, dtype)
            there, waits = walk(runtime.dp, "sim", runtime.rank, method, settings, dtype)
            assert not waits, (settings, waits)
            unlike = [i for i, pair in enumerate(zip(here, there, strict=True)) if not torch.equal(*pair)]
            assert not unlike, (settings, unlike)
            for stage in stages if hosts == 2 else ():
                one = cases.send_over(axes_of(on_cpu, stage), settings)
                other = cases.send_over(axes_of(runtime.dp.mesh, stage), settings, device="sim")
                assert one.marks == other.marks and one.numbers == other.numbers
                pairs = zip((*one.reduced, *one.lost), (*other.reduced, *other.lost), strict=True)
                assert all(torch.equal(*pair) for pair in pairs), (settings, stage)
        assert crosses_hosts(runtime.dp, runtime.device) == (hosts == 2)


def train(group, config, device):
    """Returns the loss and the gradient norm of each step; devices are of two hosts."""
    if device != "cpu":
        begin(hosts=2)
    with Runtime.start(**vars(mesh_of(config, 2)), device=device) as runtime:
        check_device(config, Device(runtime.device))
        if device != "cpu":
            test_between_hosts.tell_hosts()
        folder = run(config, "job", runtime, StopRequest())
        served = [each.name for name in runtime._groups for each in companions._of_group(name)]
        assert any("on 2 hosts" in comm.transport_of(name) for name in served) == (device != "cpu")
    return [(step["loss"], step["grad_norm"]) for step in read(folder / "metrics.jsonl")]


@pytest.mark.second_tier
@pytest.mark.parametrize("method", ["every_step", "co2"])
@pytest.mark.parametrize("compression", ["quantize", "top_k"])
def test_the_trainer_learns_on_two_hosts_what_cpu_ranks_learn(ranks, tmp_path, method, compression):
    """The last bits of gradients differ between the two, and so may single codes."""
    config = job(tmp_path, parallel={"tp": 1, "dp": 2})
    rounds = {} if method == "every_step" else {"tau": 1}
    config = jobs.changed(config, "data_parallel", method=method, compression=compression, **rounds)
    found = []
    for device in ("cpu", "sim"):
        config = jobs.changed(config, "output", run_dir=str(tmp_path / device))
        outcomes = ranks.launch(train, 2, config, device, init=False, timeout=120.0)
        assert [rank.error for rank in outcomes] == [None, None]
        found.append(torch.tensor(outcomes[0].value, dtype=torch.float64))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("hosts", "world"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.second_tier("2-4")
def test_packed_messages_have_the_bits_of_cpu_ranks(ranks, hosts, world):
    for rank in ranks.launch(compare, world, hosts, world, init=False, timeout=180.0):
        assert rank.error is None and rank.exit_code == 0, (rank.error, rank.output)
