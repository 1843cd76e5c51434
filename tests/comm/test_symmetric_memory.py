"""torch's own symmetric-memory interface on CPU tensors, across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import pyruntime
from pyruntime import _C
from pyruntime.comm import group_rank, group_size
from tests.ranks import without_processes


def neighbours_case(group):
    """Every rank reads what its neighbour wrote, after a signal from it."""
    rank, size = group_rank(group), group_size(group)
    mine = symm_mem.empty(1000, dtype=torch.float32, device="cpu")
    handle = symm_mem.rendezvous(mine, group)
    assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, size, 4000)
    mine.fill_(rank)
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        handle.put_signal(right, channel=3)
        handle.wait_signal(left, channel=3)
    assert torch.equal(handle.get_buffer(left, (1000,), torch.float32), torch.full((1000,), float(left)))
    handle.barrier(channel=0)
    handle.get_buffer(right, (1000,), torch.float32)[5] = 100.0 + rank  # and writes into it
    handle.barrier(channel=1)
    assert mine[5] == 100.0 + left
    dist.barrier(group=group)
    assert not handle.get_signal_pad(rank).any()  # every signal was taken, and the pad is zero again
    dist.barrier(group=group)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_peers_read_and_write_each_others_memory(ranks, world_size):
    ranks.run(neighbours_case, world_size)


def rendezvous_again_case(group):
    memory = symm_mem.empty(16, dtype=torch.uint8, device="cpu")
    handle = symm_mem.rendezvous(memory, group)
    again = symm_mem.rendezvous(memory, group)
    assert again.buffer_ptrs == handle.buffer_ptrs  # torch's contract: the same group gets the same handle
    other = (
        dist.new_group(list(range(group_size(group)))) if group_size(group) == dist.get_world_size() else None
    )
    if other is not None:
        symm_mem.rendezvous(memory, other)


def test_memory_of_one_group_cannot_join_another(ranks):
    for error in ranks.run(rendezvous_again_case, 4, expect_errors=True):
        assert isinstance(error, RuntimeError) and "double rendezvous" in str(error)


def sizes_case(group):
    memory = symm_mem.empty(16 + group_rank(group), dtype=torch.uint8, device="cpu")
    symm_mem.rendezvous(memory, group)


def test_sizes_that_differ_are_an_error_on_every_rank(ranks):
    errors = ranks.run(sizes_case, 3, expect_errors=True)
    assert all(
        isinstance(error, ValueError) and "has the same size on every rank" in str(error) for error in errors
    )


def foreign_host_case(group):
    """Rank 1 is not there; what it would have written from another host stands in the group's store."""
    memory = symm_mem.empty(16, dtype=torch.uint8, device="cpu")
    if group_rank(group) == 1:
        name = group.group_name
        pads = symm_mem.get_signal_pad_size()
        invitation = f"{os.getpid()} 0 16 {pads} another-boot-id pid:[1]"
        group.get_group_store().set(f"pyruntime/symmetric_memory/{name}/0/1", invitation)
        dist.barrier(group=group)
        return None
    try:
        symm_mem.rendezvous(memory, group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier(group=group)
    return "no error"


def test_a_peer_on_another_host_is_a_clear_error(ranks):
    message = ranks.launch(foreign_host_case, 2)[0].value
    assert "rank 1 runs on another host or in another container than rank 0" in message
    assert "reaches one host only" in message


def use_after_free_case(group):
    memory = symm_mem.empty(16, dtype=torch.uint8, device="cpu")
    handle = symm_mem.rendezvous(memory, group)
    handle.barrier(channel=0)
    if group_rank(group) == 1:
        del memory
    dist.barrier(group=group)
    try:
        handle.get_buffer(1, (16,), torch.uint8)
    finally:
        dist.barrier(group=group)  # rank 0 keeps its own until rank 1 has looked, too


def test_use_after_free_names_the_rank_that_freed(ranks):
    for error in ranks.run(use_after_free_case, 2, expect_errors=True):
        assert isinstance(error, RuntimeError) and "the tensor of rank 1 has been freed" in without_processes(
            str(error)
        )


def foreign_pointer_case(group):
    symm_mem.rendezvous(torch.empty(4), group)


def test_ordinary_tensors_are_refused(ranks):
    (error,) = ranks.run(foreign_pointer_case, 1, expect_errors=True)
    assert isinstance(error, RuntimeError)


def timeout_case(group, what):
    memory = symm_mem.empty(16, dtype=torch.uint8, device="cpu")
    handle = symm_mem.rendezvous(memory, group)
    if group_rank(group) == 1:
        dist.barrier(group=group)  # alive, but silent
        return None
    start = time.monotonic()
    try:
        if what == "wait_signal":
            handle.wait_signal(1, channel=2, timeout_ms=200)
        elif what == "barrier":
            handle.barrier(channel=2, timeout_ms=200)
        else:
            handle.put_signal(1, channel=2, timeout_ms=200)
            handle.put_signal(1, channel=2, timeout_ms=200)  # the first was never taken
    except pyruntime.CommTimeout as error:
        return str(error), time.monotonic() - start
    finally:
        dist.barrier(group=group)
    return "no error", 0.0


@pytest.mark.parametrize("what", ["wait_signal", "barrier", "put_signal"])
def test_every_wait_ends_at_its_deadline(ranks, what):
    message, seconds = ranks.run(timeout_case, 2, what)[0]
    assert f"{what} on group" in message and "rank 0, peer rank 1, channel 2" in without_processes(message)
    assert "expected" in message and "seen" in message
    assert 0.15 < seconds < 5


def late_rendezvous_case(group):
    _C.set_symmetric_memory_deadline(0.5)
    if group_rank(group) == 0:
        symm_mem.rendezvous(symm_mem.empty(16, dtype=torch.uint8, device="cpu"), group)
    else:
        time.sleep(1.5)


def test_a_rank_that_never_comes_to_the_rendezvous(ranks):
    late, _ = ranks.run(late_rendezvous_case, 2, expect_errors=True)
    assert isinstance(late, pyruntime.CommTimeout) and "rank 1 did not come within 0.5" in without_processes(
        str(late)
    )


def bad_channel_case(group):
    memory = symm_mem.empty(16, dtype=torch.uint8, device="cpu")
    symm_mem.rendezvous(memory, group).put_signal(0, channel=10**6)


def test_channels_that_do_not_fit_the_pad_are_refused(ranks):
    (error,) = ranks.run(bad_channel_case, 1, expect_errors=True)
    assert isinstance(error, ValueError) and "does not fit in the signal pad" in str(error)


def open_memory_files() -> set[str]:
    """Inode numbers of the memfds that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if "pyruntime-symmetric-memory" in target:
            found.add(descriptor.name)
    return found


def release_case(group):
    before, bytes_before = open_memory_files(), _C.symmetric_memory_bytes()
    for _ in range(5):
        memory = symm_mem.empty(1 << 20, dtype=torch.uint8, device="cpu")
        handle = symm_mem.rendezvous(memory, group)
        handle.barrier(channel=0)
        assert _C.symmetric_memory_bytes() == bytes_before + (1 << 20)
        del memory, handle
        dist.barrier(group=group)
    assert open_memory_files() == before
    assert _C.symmetric_memory_bytes() == bytes_before


def test_freed_memory_is_given_back(ranks):
    ranks.run(release_case, 3)


def large_case(group):
    """Bytes of /dev/shm that 80 MB of symmetric memory use up."""

    def used() -> int:
        space = os.statvfs("/dev/shm")
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    before = used()
    memory = symm_mem.empty(80 << 20, dtype=torch.uint8, device="cpu")
    handle = symm_mem.rendezvous(memory, group)
    memory.fill_(7)
    handle.barrier(channel=0)
    assert int(handle.get_buffer(1 - group_rank(group), (80 << 20,), torch.uint8)[-1]) == 7
    grown = used() - before
    handle.barrier(channel=1)
    dist.barrier(group=group)
    return grown


@pytest.mark.alone
def test_memory_larger_than_64_mb_takes_nothing_of_dev_shm(ranks):
    assert all(grown < 16 << 20 for grown in ranks.run(large_case, 2))


def killed_case(group):
    """Rank 1 is killed while rank 0 waits for it: nothing of its memory may be left under any name."""
    memory = symm_mem.empty(8 << 20, dtype=torch.uint8, device="cpu")
    handle = symm_mem.rendezvous(memory, group)
    memory.fill_(1)
    handle.barrier(channel=0)
    if group_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        handle.wait_signal(1, channel=0, timeout_ms=30_000)
    except pyruntime.PeerLost as error:
        seconds = time.monotonic() - start
        del memory, handle  # the survivor's own memory, and with the handle its view of the killed one's
        return str(error), seconds, len(open_memory_files())
    return "no error", 0.0, 0


def test_a_killed_peer_is_named_at_once_and_leaves_nothing(ranks):
    survivor, killed = ranks.launch(killed_case, 2)
    assert killed.exit_code == -signal.SIGKILL
    message, seconds, _ = survivor.value
    assert "wait_signal on group" in message and "has ended" in message
    assert seconds < 5
    assert survivor.value[2] == 0


def test_importing_the_package_registers_it():
    program = (
        "import pyruntime, torch.distributed._symmetric_memory as symm, torch; "
        "print(symm.empty(4, device='cpu').numel())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr
