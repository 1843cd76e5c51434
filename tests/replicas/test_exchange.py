"""The sum over members: that of a higher precision, the same bits for all, whatever the sizes; and what ends
it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import pytest
import torch

from pyruntime.replicas.member_sums import Interrupted, PeerFailed, sum_over


def connections(count: int) -> list[dict[int, socket.socket]]:
    """Of every member to every other one."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        found[one][other], found[other][one] = socket.socketpair()
    for peers in found:
        for each in peers.values():
            each.setblocking(False)
    return found


def run(tensors, peers, deadline_s=20.0, without=(), interrupted=lambda: False, control=None):
    """What each member found: (sums, bytes that came), or the exception."""
    results = [None] * len(tensors)

    def work(member):
        sums = torch.full_like(tensors[member], 3.0)
        silent, other_end = socket.socketpair()
        with silent, other_end:
            try:
                came = sum_over(
                    tensors[member], sums, member, peers[member], control or silent, interrupted, deadline_s
                )
                results[member] = sums, came
            except (Interrupted, PeerFailed) as error:
                results[member] = error

    threads = [threading.Thread(target=work, args=(m,)) for m in range(len(tensors)) if m not in without]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
        assert not each.is_alive()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("members", "elements"), [(2, 100_003), (3, 70_001), (5, 3), (4, 4096), (1, 77)])
def test_the_sum_is_that_of_a_higher_precision_and_the_same_for_all(members, elements, dtype):
    tensors = [torch.randn(elements).to(dtype) for _ in range(members)]
    before = [tensor.clone() for tensor in tensors]
    results = run(tensors, connections(members))
    exact = torch.stack(tensors).double().sum(0)
    for sums, came in results:
        assert torch.equal(sums, results[0][0])
        torch.testing.assert_close(sums.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)
        part = -(-elements // members)
        assert came <= 2 * (members - 1) * part * dtype.itemsize
    assert all(map(torch.equal, tensors, before)), "displacements are kept for another attempt"


def test_the_sum_is_bitwise_the_same_from_run_to_run():
    tensors = [torch.randn(50_001) * 10**place for place in range(3)]
    first, again = (run(tensors, connections(3))[0][0] for _ in range(2))
    assert torch.equal(first, again)


def test_a_member_that_closes_is_named_and_the_others_keep_what_they_have():
    tensors = [torch.randn(1_000_000) for _ in range(3)]
    before = [tensor.clone() for tensor in tensors]
    peers = connections(3)
    for each in peers[1].values():
        each.close()
    results = run(tensors, peers, without=(1,), deadline_s=2.0)
    assert isinstance(results[0], PeerFailed) and results[0].index == 1
    assert isinstance(results[2], PeerFailed) and results[2].index == 1
    assert all(map(torch.equal, tensors, before))


def test_a_member_that_is_silent_is_named_at_the_deadline():
    tensors = [torch.randn(1_000_000) for _ in range(2)]
    began = time.monotonic()
    (result, _) = run(tensors, connections(2), without=(1,), deadline_s=0.5)
    assert isinstance(result, PeerFailed) and result.index == 1
    assert 0.4 < time.monotonic() - began < 5


def test_an_order_of_the_service_ends_it():
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack():
        theirs.send(b"x")
        results = run(
            [torch.randn(1000)] * 2, connections(2), without=(1,), interrupted=lambda: True, control=ours
        )
    assert isinstance(results[0], Interrupted)
