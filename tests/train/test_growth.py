"""A run of many steps holds no more than one of few: what lives is counted, not what is resident."""

import ctypes
import gc
import sys
from pathlib import Path

import pytest

from pyruntime.train.run import run
from pyruntime.train.signals import StopRequest
from pyruntime.train.watching.watch import Watch
from tests.train import jobs

pytestmark = pytest.mark.second_tier

FIRST, LAST = 200, 600
"""Steps between which something is counted: by the first, buffers are made and tiers are chosen."""
MOST_BYTES, MOST_BLOCKS = 256, 2
"""A step, of malloc and of Python: the record of a step that is kept is 13 to 17 blocks; what the interpreter
keeps for reuse is below one, and less with every step."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def held() -> tuple[int, int, int]:
    """Bytes of malloc that live, small blocks of Python that do, descriptors that are open."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks(), len(list(Path("/proc/self/fd").iterdir()))


def growth(group, config):
    """Bytes, blocks and descriptors by which each step holds more than the one before."""
    found = []

    def counted(self, measured, newest):
        if measured.step in (FIRST, LAST):
            found.append(held())
        return complete(self, measured, newest)

    complete = Watch.complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "complete", counted)
        run(config, "job", jobs.runtime(group, config), StopRequest())
    before, after = found
    return [(now - then) / (LAST - FIRST) for then, now in zip(before, after, strict=True)]


def small(folder, **parallel):
    config = jobs.job(folder, steps=LAST, batch_size=2, micro_batch_size=1, seq_len=16, val_every=0)
    config = jobs.changed(config, "model", hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return jobs.changed(config, "parallel", **parallel)


@pytest.mark.parametrize("size, parallel", [(1, {}), (2, {"tp": 2})])
def test_a_step_leaves_nothing_behind(ranks, tmp_path, size, parallel):
    for of_malloc, blocks, descriptors in ranks.run(growth, size, small(tmp_path, **parallel)):
        assert of_malloc < MOST_BYTES and blocks < MOST_BLOCKS and descriptors == 0
