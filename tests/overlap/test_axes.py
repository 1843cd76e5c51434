"""Two axes of a training step at once: the ledger's account of each is what its transports have counted."""

from __future__ import annotations

import time

import pytest
import torch

import pyruntime
from pyruntime import comm
from pyruntime.overlap import Account, EntryKind
from tests.train import jobs
from tests.transports import take

MESHES = [
    {"tp": 2, "dp": 2, "zero": 1},
    {"tp": 1, "cp": 2, "dp": 2, "zero": 3},
    {"tp": 2, "pp": 2},
]


def counted(names: list[str]) -> dict[str, tuple[float, ...]]:
    """Bytes read and sent, seconds waited and moved, by axis; once nothing is under way any more."""
    torch.distributed.barrier()
    seen = -1.0
    while seen != (seen := sum(figures.transfer_s for figures in comm.traffic().values())):
        time.sleep(0.3)
    found = comm.traffic()
    empty = comm.groups.Traffic()
    rows = {name: found.get(name, empty) for name in names}
    return {name: (row.bytes_read, row.bytes_sent, row.waiting_s, row.moving_s) for name, row in rows.items()}


def a_step(group, config, names) -> tuple[dict[str, list[float]], dict[str, list[float]], Account]:
    """What the transports have counted of a step by axis, what was entered of it, and its account."""
    runtime = jobs.runtime(group, config)
    for mesh in (*(runtime.mesh[axis] for axis in runtime.mesh.mesh_dim_names), runtime.replicas.mesh):
        if mesh is not None:
            take(mesh, "process_group")
    trainer = jobs.trainer(group, config)
    steps = trainer.fit()
    next(steps)  # opens the groups
    before = counted(names)
    with pyruntime.ledger() as ledger:
        next(steps)
        after = counted(names)
    for _ in steps:
        pass
    trainer.close()
    entries = ledger.stretch.entries
    entered = {
        name: [
            sum(e.bytes for e in entries if e.axis == name and e.kind is EntryKind.READ),
            sum(e.bytes for e in entries if e.axis == name and e.kind is EntryKind.SENT),
            sum(e.seconds for e in entries if e.axis == name and e.kind is EntryKind.WAIT),
            sum(e.seconds for e in entries if e.axis == name and e.kind in (EntryKind.COPY, EntryKind.SUM)),
        ]
        for name in names
    }
    grown = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in names}
    return grown, entered, ledger.account()


@pytest.mark.parametrize("parallel", MESHES, ids=lambda mesh: "-".join(f"{k}{v}" for k, v in mesh.items()))
@pytest.mark.second_tier(but=["tp2-pp2"])
def test_each_of_two_axes_has_the_bytes_and_seconds_of_its_transports_and_all_parts_add_up(
    ranks, tmp_path, parallel
):
    config = jobs.job(tmp_path, steps=3, seq_len=32, batch_size=4, micro_batch_size=1, val_every=0)
    config = jobs.changed(config, "parallel", **{**parallel, "tp": None})
    jobs.prepare(config)
    names = sorted(name for name, size in parallel.items() if name != "zero" and size > 1)
    results = ranks.run(a_step, 4, config, names)
    for grown, entered, account in results:
        for name in names:
            assert entered[name] == pytest.approx(grown[name]), name
            assert account.axes[name].bytes_read == grown[name][0]
            assert account.axes[name].bytes_sent == grown[name][1]
            assert grown[name][1] > 0
        parts = (account.computing_s, account.copying_s, account.summing_s, account.rest_s)
        assert all(part >= 0 for part in parts)
        assert sum(parts) + account.exposed_s == pytest.approx(account.seconds, rel=1e-6)
        assert account.lost == 0
    assert all(sum(grown[name][0] for grown, _, _ in results) > 0 for name in names)
