"""The ledger of ranks that compute: its sums are those of the transports' counters, on every transport."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import pyruntime
from pyruntime import comm
from pyruntime.comm.core import _C
from pyruntime.nn.cut import memory_of
from pyruntime.overlap import Account, EntryKind, account
from tests.transports import TRANSPORTS, on_transport

PLAN = {"up": "column", "down": "row"}


class Block(nn.Module):
    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner), nn.Linear(inner, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def two_blocks(group, *, features: int = 24, inner: int = 60, tier: str = "auto") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(features, inner), Block(features, inner))
    plan = {f"{block}.{name}": style for block in "01" for name, style in PLAN.items()}
    return pyruntime.parallelize(model, group, plan, tier=tier)


def step(model: nn.Module, rows: int = 26, features: int = 24) -> None:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).square().mean().backward()


def counted(group) -> list[float]:
    stats, sent = comm.stats(group), comm.traffic()["tp"].bytes_sent
    return [stats.bytes, stats.waiting_s, stats.moving_s, sent]


def sums(group) -> tuple[list[float], list[float], Account, float]:
    """What the transports have counted, what the ledger has, its account, and the seconds of the step."""
    model = two_blocks(group, tier="chunked")
    step(model)  # opens the group
    all_acknowledged(group)
    before = counted(group)
    with pyruntime.ledger() as ledger:
        began = time.monotonic()
        step(model)
        seconds = time.monotonic() - began
        all_acknowledged(group)
    after = counted(group)
    found, entries = ledger.account(), ledger.stretch.entries
    seen = [
        sum(entry.bytes for entry in entries if entry.kind is EntryKind.READ),
        sum(entry.seconds for entry in entries if entry.kind is EntryKind.WAIT),
        sum(entry.seconds for entry in entries if entry.kind in (EntryKind.COPY, EntryKind.SUM)),
        sum(entry.bytes for entry in entries if entry.kind is EntryKind.SENT),
    ]
    return [b - a for a, b in zip(before, after, strict=True)], seen, found, seconds


def all_acknowledged(group) -> None:
    """Returns when nothing is under way any more: the seconds that transfers have taken no longer grow."""
    comm.process_group(group).barrier().wait()
    seen = -1.0
    while seen != (seen := comm.traffic()["tp"].transfer_s):
        time.sleep(0.3)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.second_tier(but=["2-hierarchical"])
def test_bytes_and_seconds_are_those_that_the_transports_have_counted(ranks, transport, size):
    results = ranks.run(on_transport, size, transport, sums)
    if transport == "process_group" or (transport == "hierarchical" and size != 4):
        # No memory is shared: all that is read has been sent, and read once.
        assert sum(seen[0] for _, seen, _, _ in results) == sum(seen[3] for _, seen, _, _ in results)
    for expected, seen, found, seconds in results:
        assert seen == pytest.approx(expected)
        assert seen[0] > 0
        tp = found.axes["tp"]
        assert tp.bytes_read == expected[0]
        assert tp.bytes_sent == expected[3]
        assert (tp.bytes_sent > 0) == (transport != "symmetric_memory")
        assert tp.exposed_s == pytest.approx(expected[1])
        assert found.copying_s + found.summing_s == pytest.approx(expected[2])
        assert 0 <= tp.hidden <= 1
        assert found.seconds >= seconds
        assert found.computing_s > 0 and found.rest_s >= 0
        assert found.lost == 0


def read_and_sent(group) -> tuple[int, int]:
    """In the backward pass of a row linear whose dW is summed in two parts."""
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((26, 40), (24, 40)))
    y = pyruntime.matmul_reduce_scatter(x, weight, group, tier="chunked")
    all_acknowledged(group)
    before = counted(group)
    y.sum().backward()
    all_acknowledged(group)
    after = counted(group)
    return int(after[0] - before[0]), int(after[3] - before[3])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.second_tier("3")
def test_rows_that_two_products_read_come_once(ranks, size):
    results = ranks.run(on_transport, size, "hierarchical", read_and_sent)
    assert sum(read for read, _ in results) == sum(sent for _, sent in results) > 0


SEQ, HEADS, DIM = 10, 12, 8


def attention_sums(group, variant: str) -> tuple[list[float], list[float], Account]:
    """What the transports have counted of attention, forward and backward, what the ledger has, its
    account."""
    q, k, v = torch.randn(3, 1, SEQ, HEADS, DIM).requires_grad_().unbind()

    def attend() -> None:
        pyruntime.ring_attention(q, k, v, group, layout="striped", variant=variant).sum().backward()

    def counted() -> list[float]:
        stats = _C.group_stats_by_class()["cp"]
        return [stats.bytes, stats.waiting_s, stats.moving_s]

    attend()  # opens the group
    comm.process_group(group).barrier().wait()
    before = counted()
    with pyruntime.ledger() as ledger:
        attend()
    expected = [b - a for a, b in zip(before, counted(), strict=True)]
    entries = ledger.stretch.entries
    seen = [
        sum(entry.bytes for entry in entries if entry.kind is EntryKind.READ),
        sum(entry.seconds for entry in entries if entry.kind is EntryKind.WAIT),
        sum(entry.seconds for entry in entries if entry.kind in (EntryKind.COPY, EntryKind.SUM)),
    ]
    assert {entry.axis for entry in entries if entry.kind is EntryKind.READ} == {"cp"}
    return expected, seen, ledger.account()


@pytest.mark.parametrize("variant", ["ring", "all_gather_kv", "ulysses"])
@pytest.mark.second_tier("ring")
def test_attention_over_ranks_is_entered_whatever_carries_it(ranks, variant):
    for expected, seen, found in ranks.run(on_transport, 3, "process_group", attention_sums, variant):
        assert seen == pytest.approx(expected)
        cp = found.axes["cp"]
        assert cp.bytes_read == expected[0] > 0
        assert cp.exposed_s == pytest.approx(expected[1]) and cp.exposed_s > 0
        parts = found.computing_s + found.copying_s + found.summing_s + found.exposed_s
        assert parts <= found.seconds == pytest.approx(parts + found.rest_s)
        if variant == "ulysses":
            # Queries, keys, values and results, and their gradients: two of three shares of all come from
            # others. The sums of gradient times result have one feature.
            assert cp.bytes_read == 2 * SEQ * HEADS * (8 * DIM + 1) * 4 // 3
            assert cp.hidden == 0


def layers_of(group) -> set[tuple[str, str]]:
    model = two_blocks(group)
    with pyruntime.ledger() as ledger:
        step(model)
    return {(entry.layer, entry.name) for entry in ledger.stretch.entries if entry.kind is EntryKind.READ}


def test_what_is_read_is_entered_under_its_layer_forward_and_backward(ranks):
    for found in ranks.run(layers_of, 2):
        forward_and_backward = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
        for layer in ("0.up", "0.down", "1.up", "1.down"):
            assert {name for path, name in found if path == layer} & forward_and_backward, (layer, found)
        assert all(layer for layer, _ in found), found


def late(group) -> Account:
    model = two_blocks(group)
    step(model)
    comm.process_group(group).barrier().wait()
    with pyruntime.ledger() as ledger:
        if group.rank() == 1:
            model[1].up.register_forward_pre_hook(lambda *_: time.sleep(0.3))
        step(model)
    return ledger.account()


def test_a_late_rank_is_waited_for_in_the_layer_where_it_is_late(ranks):
    waiting, _ = ranks.run(late, 2)
    assert 0.2 < waiting.axes["tp"].exposed_s < 1.0
    assert waiting.lines[0].layer.startswith("1."), waiting.lines[0]
    assert waiting.lines[0].exposed_s > 0.2


def switched(group) -> tuple[list[EntryKind], int, int, str]:
    model = two_blocks(group)
    step(model)
    with pyruntime.ledger() as empty:
        pass
    with pyruntime.ledger(capacity=3) as small:
        step(model)
        try:
            with pyruntime.ledger():
                refused = ""
        except RuntimeError as error:
            refused = str(error)
    # What was sent before may be acknowledged in it.
    entered = [entry.kind for entry in empty.stretch.entries if entry.kind is not EntryKind.SENT]
    return entered, len(small.stretch.entries), small.stretch.lost, refused


def test_nothing_is_entered_while_it_is_off_what_finds_no_room_is_counted_and_a_second_is_refused(ranks):
    for empty, few, lost, refused in ranks.run(switched, 2):
        assert empty == []
        assert few == 3
        assert lost > 3
        assert "is on already" in refused


def one_by_one(group) -> list[float]:
    model = two_blocks(group)
    step(model)
    step(model)
    seconds = []
    with pyruntime.ledger() as ledger:
        for _ in range(3):
            before = comm.stats(group).bytes
            step(model)
            taken = ledger.take().account()
            seconds.append(taken.seconds)
            assert taken.axes["tp"].bytes_read == comm.stats(group).bytes - before
    return seconds


def test_an_account_may_be_taken_after_every_step(ranks):
    for seconds in ranks.run(one_by_one, 2):
        assert all(0 < each < 5 for each in seconds)


def test_the_gradient_is_the_same_with_and_without_a_ledger(ranks):
    for plain, entered in ranks.run(gradients, 2):
        assert torch.equal(plain, entered)


def gradients(group) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for on in (False, True):
        model = two_blocks(group)
        if on:
            with pyruntime.ledger():
                step(model)
        else:
            step(model)
        found.append(memory_of(model[0].up.weight.grad).clone())
    return found[0], found[1]


def test_an_account_can_be_asked_for_any_stretch():
    assert account([], 1.0, 3.0, thread=0).rest_s == 2.0
