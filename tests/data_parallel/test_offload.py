"""Optimizer states in a file give the steps of resident ones, bit by bit, and what a disk refuses is told."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import time

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime.data_parallel import Muon, Offload, OffloadError
from tests.data_parallel import cases
from tests.data_parallel.test_ahead import NO_CLIPPING, made, states_of, stepped

FEW = 256
"""Bytes of each state of a run: even vectors leave, and a matrix is several runs."""


def both(group, folder, mesh_kind, stage, dtype, rounding, clipping, poisoned):
    """Raises AssertionError where a step with states in a file is not the step with resident ones."""
    arguments = group, mesh_kind, stage, dtype, clipping, rounding, poisoned
    reports, states = stepped(*arguments)
    found = stepped(*arguments, offload=Offload(folder, run_bytes=FEW))
    assert str(found[0]) == str(reports)  # NaN is NaN
    for step, (one, other) in enumerate(zip(found[1], states, strict=True)):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), f"{name} after step {step}"


BF16 = torch.bfloat16, "nearest"


@pytest.mark.parametrize(
    ("n", "mesh", "stage", "dtype", "rounding", "clipping", "poisoned"),
    [
        (1, "dp", 1, *BF16, NO_CLIPPING, ()),
        (2, "dp", 0, *BF16, 0.3, ()),
        (3, "dp", 2, *BF16, NO_CLIPPING, (3,)),
        (3, "dp", 3, *BF16, 0.3, (3,)),
        (3, "dp", 2, torch.float32, "nearest", NO_CLIPPING, ()),
        (3, "dp", 1, torch.bfloat16, "stochastic", 0.3, ()),
        (2, "dp", 1, torch.float64, "nearest", NO_CLIPPING, ()),
        (4, "hsdp", 3, *BF16, NO_CLIPPING, ()),
    ],
    ids=["one", "zero 0", "zero 2", "zero 3", "fp32", "stochastic", "fp64", "hsdp"],
)
@pytest.mark.second_tier(but=["one", "zero 2", "zero 3"])
def test_steps_are_bitwise_those_of_resident_states(
    ranks, tmp_path, n, mesh, stage, dtype, rounding, clipping, poisoned
):
    ranks.run(both, n, str(tmp_path), mesh, stage, dtype, rounding, clipping, poisoned)
    assert not list(tmp_path.iterdir())  # the file has no name


def at_once(group, folder):
    """Without a norm, buckets are updated during the backward pass."""
    found = []
    for more in ({}, {"offload": Offload(folder, run_bytes=FEW)}):
        whole, handle, optimizer, _, size = made(group, "dp", 2, torch.bfloat16, nonfinite="ignore", **more)
        for ids, labels in cases.batches(4, size):
            whole(ids, labels).backward()
            optimizer.step()
        found.append(states_of(whole, handle, optimizer))
        handle.close()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def test_updates_without_a_norm_are_the_same_too(ranks, tmp_path):
    ranks.run(at_once, 2, str(tmp_path))


def taken_over(group, folder):
    """States that go from resident to the file, and back, with steps between."""
    kinds = {"resident": {}, "file": {"offload": Offload(folder, run_bytes=FEW)}}
    made_of = {
        name: made(group, "dp", 2, torch.bfloat16, max_norm=NO_CLIPPING, **kinds[name]) for name in kinds
    }
    data = iter(cases.batches(6, made_of["file"][4]))

    def stepped_once(names):
        ids, labels = next(data)
        for name in names:
            whole, _, optimizer, *_ = made_of[name]
            whole(ids, labels).backward()
            optimizer.step()

    def equal():
        one, other = (states_of(*made_of[name][:3]) for name in kinds)
        return all(torch.equal(one[name], other[name]) for name in other)

    for first, second in (("resident", "file"), ("file", "resident")):
        stepped_once([first])
        stepped_once([first])
        assert not equal()
        (_, handle, optimizer, *_), (_, other_handle, other, *_) = made_of[first], made_of[second]
        other_handle.load_state_dict(handle.state_dict())
        other.load_state_dict(optimizer.state_dict())
        assert equal()
        stepped_once(kinds)
        assert equal()
    for _, handle, *_ in made_of.values():
        handle.close()


@pytest.mark.parametrize("n", [1, 3])
def test_states_are_taken_over_into_the_file_and_out_of_it(ranks, tmp_path, n):
    ranks.run(taken_over, n, str(tmp_path))


# -- what it reads, writes and holds


def model_of(features: int, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, features), nn.Linear(features, features, bias=False)).to(dtype)


def pass_over(model: nn.Module) -> None:
    model(torch.randn(4, model[0].in_features).to(model[0].weight.dtype)).float().square().mean().backward()


def test_the_ledger_has_all_bytes_that_a_step_reads_and_writes(tmp_path):
    model = model_of(128)
    optimizer = pyruntime.shard(model, None).adamw(offload=Offload(str(tmp_path), run_bytes=4096))
    pass_over(model)
    optimizer.step()
    with pyruntime.ledger() as ledger:
        for _ in range(2):
            pass_over(model)
            optimizer.step()
        optimizer.state_dict()  # waits for the writes, and forgets what was read ahead
    axis = ledger.account().axes["offload"]
    wanted = 2 * 12 * sum(p.numel() for p in model.parameters())
    assert axis.bytes_read == wanted
    assert axis.bytes_sent >= wanted  # some of the first step's end within
    assert 0 <= axis.hidden_bytes <= wanted and axis.exposed_s >= 0


def memory_of(kind: str) -> int:
    """Bytes of this process's resident memory of that kind."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(kind)]
    return int(line.split()[1]) << 10


def held(group, folder):
    """Bytes that states and steps add to the resident memory: resident, and in a file.

    Resident states are anonymous memory. Pages of mapped files (torch's libraries among them) count
    for the states in the file alone: the system takes such pages back whenever memory is short.
    Freed memory that the C library keeps is given back first, or states would lie in what was
    counted before.
    """

    def resident(kinds):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return sum(memory_of(kind) for kind in kinds)

    found = []
    for more, kinds in (
        ({}, ["RssAnon"]),
        ({"offload": Offload(folder, run_bytes=64 << 10)}, ["RssAnon", "RssFile"]),
    ):
        model = model_of(2048)
        handle = pyruntime.shard(model, None)
        pass_over(model)
        handle.zero_grad()
        before = resident(kinds)
        optimizer = handle.adamw(**more)
        optimizer.step()
        found.append(resident(kinds) - before)
        state = optimizer.state_dict()
        assert sum(tensor.nbytes for tensor in state.values()) > 96e6
        del state, optimizer, handle
    return found


def test_states_in_the_file_take_no_memory(ranks, tmp_path):
    (outcome,) = ranks.launch(held, 1, str(tmp_path), init=False)
    assert outcome.error is None, outcome.error
    resident, in_file = outcome.value
    assert resident > 90e6  # 12 bytes of each of 8.4 million parameters
    assert in_file < 8e6


# -- what goes wrong


def offloading(folder, **options):
    model = model_of(64)
    optimizer = pyruntime.shard(model, None).adamw(offload=Offload(str(folder), run_bytes=4096, **options))
    return model, optimizer


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OffloadError, match=r"cannot be kept in .*file/states: Not a directory \(.* MB are free"
    ):
        offloading(tmp_path / "file" / "states")


def test_a_full_disk_is_told_before_the_first_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OffloadError, match=r"Optimizer states \(0 MB so far\) .* No space left on device .* free room"
    ):
        offloading(tmp_path)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_told(tmp_path, monkeypatch, call):
    model, optimizer = offloading(tmp_path)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(OffloadError, match=r"could not be (read|written): Input/output error; name a folder"):
        for _ in range(2):
            pass_over(model)
            optimizer.step()
            optimizer.state_dict()


def test_a_disk_that_hangs_is_told_after_the_deadline(tmp_path, monkeypatch):
    model, optimizer = offloading(tmp_path, deadline_s=0.2)
    read = os.preadv

    def late(*arguments):
        time.sleep(1.0)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", late)
    pass_over(model)
    with pytest.raises(OffloadError, match=r"were not read in 0\.2 s; name a folder on a faster disk"):
        optimizer.step()


def test_a_file_that_was_cut_is_told(tmp_path):
    model, optimizer = offloading(tmp_path)
    os.ftruncate(optimizer.home._file.number, 0)
    pass_over(model)
    with pytest.raises(OffloadError, match="the file has ended, so another program has cut it"):
        optimizer.step()


def test_what_does_not_go_together_is_refused(tmp_path):
    model = model_of(64)
    with pytest.raises(ValueError, match="Muon reads whole momenta"):
        pyruntime.shard(model, None).adamw(muon=Muon([model[0].weight]), offload=Offload(str(tmp_path)))
    with pytest.raises(ValueError, match="run_bytes=100 is no multiple of 64"):
        Offload(str(tmp_path), run_bytes=100)
