"""Rows of a table that the next pass reads return first, and the training is that of tables that return
whole, bit by bit."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel.first_rows import FirstRows
from pyruntime.data_parallel.weights import BucketWeights
from pyruntime.nn import VocabParallelEmbedding
from tests.data_parallel.test_touched import STEPS, VOCAB, bits, drawn, made
from tests.transports import TRANSPORTS, take

pytestmark = pytest.mark.usefixtures("pool_as_it_was")

NAMED = ("right", "too few", "none of them", "sometimes")


def named(how: str, step: int, size: int) -> torch.Tensor | None:
    """What ranks say that the step's first micro-batch reads."""
    ids = torch.cat([drawn(step, rank, 0) for rank in range(size)])
    if how == "sometimes" and step % 2:
        return None
    if how == "too few":
        return ids[: len(ids) // 3]
    return (ids + 30) % VOCAB if how == "none of them" else ids


def trained(group, kind, stage, dtype, max_norm, how, poisoned=()):
    """After every step the weights and this rank's states; how often first rows left, and were taken back."""
    options = {"max_norm": max_norm, "nonfinite": "skip" if max_norm else "ignore"}
    model, handle, optimizer, rank, size = made(group, kind, stage, dtype, "", **options)
    found, left = [], []
    begin = FirstRows._begin

    def begun(first, rows):
        left.append(len(first._rows))
        begin(first, rows)

    with patch.object(FirstRows, "_begin", begun):
        for step in range(STEPS):
            for micro_batch in range(2):
                loss = model(drawn(step, rank, micro_batch))
                if micro_batch == 1 and how and (ids := named(how, step + 1, size)) is not None:
                    handle.will_read(model.embed, ids)
                if step in poisoned and rank == size - 1:
                    loss = loss * float("nan")
                with handle.accumulate() if micro_batch == 0 else contextlib.nullcontext():
                    loss.backward()
            report = optimizer.step()
            if step % 2:  # else the next pass finds rows under way
                state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                for name, tensor in optimizer.state_dict().items():
                    state[f"optimizer {name}"] = getattr(tensor, "to_local", lambda t=tensor: t)().clone()
                found.append((report.grad_norm, state))
    handle.complete()
    found.append((0.0, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    handle.close()
    return found, left


def both(group, transport, kind, stage, dtype, max_norm, how, poisoned=()):
    take(group, transport)
    expected, _ = trained(group, kind, stage, dtype, max_norm, "", poisoned)
    found, left = trained(group, kind, stage, dtype, max_norm, how, poisoned)
    for (norm, state), (expected_norm, expected_state) in zip(found, expected, strict=True):
        assert str(norm) == str(expected_norm)
        for name, tensor in expected_state.items():
            assert torch.equal(bits(state[name]), bits(tensor)), name
    return left


@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_is_bitwise_the_training_of_tables_that_return_whole(ranks, world, transport, how):
    for left in ranks.run(both, world, transport, "dp", 2, torch.bfloat16, 1e9, how):
        assert len(left) >= (STEPS - 1) // 2 and all(left)


@pytest.mark.parametrize(("max_norm", "poisoned"), [(0.3, ()), (1e-3, ()), (1e9, (1, 3)), (0.0, ())])
@pytest.mark.parametrize("stage", [1, 2])
def test_steps_that_are_taken_back_return_the_old_rows(ranks, stage, max_norm, poisoned):
    for left in ranks.run(both, 3, "hierarchical", "dp", stage, torch.float32, max_norm, "right", poisoned):
        assert left


@pytest.mark.parametrize("stage", [0, 3])
def test_where_tables_do_not_return_so_nothing_changes(ranks, stage):
    for left in ranks.run(both, 2, "process_group", "dp", stage, torch.float32, 0.5, "right"):
        assert left == []


def test_replicas_agree(ranks):
    for left in ranks.run(both, 4, "", "hsdp", 1, torch.bfloat16, 1e9, "right"):
        assert left


ROWS, COLUMNS, IDS = 4096, 32, (5, 9, 2047, 2048, 4000)


class Two(nn.Module):
    """A table and what is read after it."""

    def __init__(self):
        super().__init__()
        self.table, self.other = nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)

    def forward(self, ids):
        return self.other(self.table(ids)).square().mean()


def order_and_waits(group, transport, ids):
    """What began, in order, in an update whose rows are named; seconds of the embedding and of the rest in a
    pass in which rank 1 is late with the table; whether the embedding's result is that of the whole table."""
    take(group, transport)
    torch.manual_seed(1)
    model = Two()
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=1, bucket_bytes=100)
    optimizer = handle.adamw(lr=1e-2, max_norm=1e-9)  # no step is taken ahead
    named, begun, late = torch.tensor(IDS), [], 0.0
    send, begin_first = BucketWeights._send, FirstRows._begin

    def sending(each, gather, rows):
        begun.append(each.bucket.name)
        if each.bucket.name == "table.weight" and group.rank() == 1:
            time.sleep(late)
        send(each, gather, rows)

    def beginning(first, rows):
        begun.append("first rows")
        begin_first(first, rows)

    def step():
        handle.will_read(model.table, named)
        model(named).backward()
        optimizer.step()

    step()
    handle.complete()
    with patch.object(BucketWeights, "_send", sending), patch.object(FirstRows, "_begin", beginning):
        step()
        handle.complete()
        names = list(begun)
        late = 0.6
        comm.process_group(group).barrier().wait()
        step()
        start = time.monotonic()
        found = model.table(torch.tensor(ids)).detach().clone()
        seconds = time.monotonic() - start
    handle.complete()
    same = torch.equal(found, model.table.weight.detach()[torch.tensor(ids)])
    handle.close()
    return names, seconds, same


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_the_named_rows_leave_first_and_the_table_last(ranks, transport):
    results = ranks.run(order_and_waits, 2, transport, IDS[1:4])
    for names, _, same in results:
        assert names[0] == "first rows" and names[-1] == "table.weight" and "other.weight" in names
        assert same
    assert results[0][1] < 0.3  # the table is on its way


@pytest.mark.parametrize("transport", ["symmetric_memory", "process_group"])
def test_a_row_that_was_not_named_is_waited_for(ranks, transport):
    results = ranks.run(order_and_waits, 2, transport, (*IDS[1:4], 77))
    assert all(same for _, _, same in results)
    assert results[0][1] > 0.3


def bytes_read(group, names_rows):
    take(group, "symmetric_memory")
    model = Two()
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=1, bucket_bytes=100)
    optimizer = handle.adamw(max_norm=1e9)
    for _ in range(2):
        before = comm.stats(handle.axes.weights.name).bytes
        if names_rows:
            handle.will_read(model.table, torch.tensor(IDS))
        model(torch.tensor(IDS)).backward()
        optimizer.step()
        handle.complete()
    read = comm.stats(handle.axes.weights.name).bytes - before
    handle.close()
    return read


def test_the_named_rows_travel_twice(ranks):
    found = zip(ranks.run(bytes_read, 2, True), ranks.run(bytes_read, 2, False), strict=True)
    for rank, (first, whole) in enumerate(found):
        of_other = sum(each // (ROWS // 2) != rank for each in IDS)
        assert first - whole == of_other * COLUMNS * 4


def refused(group, what):
    comm.set_deadline(group, 5.0)
    model = Two()
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=1, bucket_bytes=100)
    optimizer = handle.adamw()
    try:
        if what == "module":
            handle.will_read(model.other, torch.tensor(IDS))
        for _ in range(2):
            handle.will_read(model.table, torch.tensor(IDS[group.rank() :]))
            model(torch.tensor(IDS)).backward()
            optimizer.step()
            model(torch.tensor(IDS))
    except (ValueError, pyruntime.CommError) as error:
        return f"{type(error).__name__}: {error}"


def test_what_does_not_fit_is_said(ranks):
    for message in ranks.run(refused, 2, "module"):
        assert message.startswith("ValueError: will_read() was called with Linear, which is no embedding")
    for message in (outcome.value for outcome in ranks.launch(refused, 2, "rows")):
        assert "disagree" in message.lower() or "different" in message.lower(), message


def vocabulary_cut(group, names_rows):
    """A table that is cut over two ranks, trained by two pairs."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    table = VocabParallelEmbedding.from_embedding(nn.Embedding(VOCAB, 9), mesh["tp"], sequence_parallel=False)
    handle = pyruntime.shard(table, mesh["dp"], stage=2, bucket_bytes=100)
    optimizer, found = handle.adamw(lr=1e-2, max_norm=1e9), []
    for step in range(STEPS):
        y = table(drawn(step, mesh["dp"].get_local_rank(), 0))
        found.append(y.detach().clone())
        if names_rows:
            handle.will_read(table, torch.cat([drawn(step + 1, rank, 0) for rank in range(2)]))
        y.tanh().sum().backward()
        optimizer.step()
    handle.close()
    comm.close(mesh["tp"])
    return found


def test_a_vocabulary_that_is_cut_names_the_rows_of_its_ranks(ranks):
    with_names, without = (ranks.run(vocabulary_cut, 4, names) for names in (True, False))
    for one, other in zip(with_names, without, strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
