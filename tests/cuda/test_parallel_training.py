"""Data, pipeline and context parallelism as their chunks travel between devices, here by the host dialect."""

from __future__ import annotations

import pytest
import torch

from pyruntime.comm.core import _C
from tests.context import test_ring_attention as attention
from tests.cuda import build
from tests.data_parallel.test_shard import trained
from tests.pipeline import test_executor as executor
from tests.transports import take

pytestmark = pytest.mark.usefixtures("host_kernels")


def by_devices(group, case, *arguments):
    _C.use_device_library("cpu", str(build.LIBRARY))
    return case(group, *arguments)


@pytest.mark.parametrize(("world", "stage", "dtype"), [
    (2, 0, torch.float32), (2, 1, torch.bfloat16), (3, 2, torch.float32), (2, 3, torch.float32),
])  # fmt: skip
@pytest.mark.second_tier(but=["2-1-dtype1"])
def test_data_parallel_training_is_that_of_shared_memory(ranks, world, stage, dtype):
    job = ("dp", stage, False, dtype, 4 * world, 1.0)
    found = ranks.run(by_devices, world, trained, "device", *job)
    expected = ranks.run(by_devices, world, trained, "symmetric_memory", *job)
    for mine, theirs in zip(found, expected, strict=True):
        assert_alike(mine, theirs)


@pytest.mark.parametrize(("world", "kind"), [(2, "gpipe"), (3, "1f1b"), (2, "zb-h1")])
@pytest.mark.second_tier("3-1f1b")
def test_a_pipeline_equals_the_whole_model(ranks, world, kind):
    micro_batches = 7
    found = ranks.run(by_devices, world, executor.piped, "device", kind, micro_batches, 1)
    executor.check(found, micro_batches)


@pytest.mark.parametrize(("world", "variant"), [(2, "ring"), (3, "ring"), (2, "ulysses")])
@pytest.mark.second_tier("2-ulysses")
def test_ring_attention_equals_dense_attention(ranks, world, variant):
    ranks.run(by_devices, world, take, "device")
    attention.check(ranks, world, 2 * world * 5, 2 * world, world, transport="device", variant=variant)


def assert_alike(mine, theirs):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        mine, theirs = list(mine.values()), list(theirs.values())
    if isinstance(mine, tuple | list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(mine, float | torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    else:
        assert mine == theirs
