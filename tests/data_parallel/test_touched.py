"""Of an embedding only the rows travel that a rank has touched, and the training is that of all rows, bit by
bit."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel import reducer
from pyruntime.data_parallel.buckets import Bucket
from pyruntime.data_parallel.touched import packed, tables_of, touched_rows, unpacked
from pyruntime.nn import VocabParallelEmbedding
from pyruntime.nn.cut import memory_of
from tests.data_parallel import cases
from tests.transports import TRANSPORTS, on_transport, take

VOCAB, WIDTH, STEPS = 61, 9, 5  # no number of ranks divides them; a bf16 row is no number of words
BUCKET = 100  # bytes: both tables travel alone


class Model(nn.Module):
    """Two tables and two layers; `other` is what else the first table is used for."""

    def __init__(self, other: str = ""):
        super().__init__()
        self.other = other
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH, padding_idx=3), nn.Embedding(40, WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.head = nn.Linear(12, WIDTH if other == "tied" else VOCAB, bias=False)

    def forward(self, ids):
        """Of ids [n], n may be 0."""
        x = (self.embed(ids) + self.places(torch.arange(len(ids)))).sum(0, keepdim=True)
        y = torch.tanh(self.up(x + 1))
        logits = F.linear(self.head(y), self.embed.weight) if self.other == "tied" else self.head(y)
        loss = logits.float().square().mean()
        return loss + self.embed.weight.float().sum() if self.other == "sum" else loss


def drawn(step: int, rank: int, micro_batch: int) -> torch.Tensor:
    """Ids as a tokenizer numbers them, most of them small; of rank 1 none in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_batch)
    count = 0 if rank == 1 and step % 2 else 7
    return torch.rand(count, generator=generator).pow(4).mul(VOCAB).long()


def dense():
    """Around steps in which all rows travel."""
    return patch.object(reducer, "may_send_some", lambda *_: False)


def made(group, kind, stage, dtype, other, **options):
    mesh, rank, size = cases.mesh_of(group, kind)
    torch.manual_seed(3)
    model = Model(other).to(dtype)
    handle = pyruntime.shard(model, mesh, stage=stage, bucket_bytes=BUCKET)
    return model, handle, handle.adamw(lr=1e-2, **options), rank, size


def trained(group, kind, stage, dtype, other, max_norm):
    """After every step the weights and this rank's states; bytes that this rank read of gradients."""
    model, handle, optimizer, rank, _ = made(group, kind, stage, dtype, other, max_norm=max_norm)
    names = [axis.name for axis in (handle.axes.shard, handle.axes.replicate) if axis.name]
    before = sum(comm.stats(name).bytes for name in names)
    found = []
    for step in range(STEPS):
        for micro_batch in range(2):
            with handle.accumulate() if micro_batch == 0 else contextlib.nullcontext():
                model(drawn(step, rank, micro_batch)).backward()
        norm = optimizer.step().grad_norm
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, tensor in optimizer.state_dict().items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            state[f"optimizer {name}"] = local.clone()
        found.append((norm, state))
    read = sum(comm.stats(name).bytes for name in names) - before
    handle.close()
    return found, read


def both(group, transport, *arguments):
    """Bytes read by gradients where rows are chosen, and where all travel. Raises AssertionError where the
    training differs in a bit."""
    take(group, transport)
    some, few = trained(group, *arguments)
    with dense():
        every, all_ = trained(group, *arguments)
    for step, ((norm, state), (expected_norm, expected)) in enumerate(zip(some, every, strict=True)):
        assert norm == expected_norm, f"norm of step {step}"
        for name, tensor in expected.items():
            same = torch.equal(bits(state[name]), bits(tensor))
            assert same, f"{name} after step {step}"
    return few, all_


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """-0 is not 0."""
    return torch.atleast_1d(tensor).contiguous().view(torch.uint8)


@pytest.mark.parametrize(("world", "stage"), [(3, 0), (3, 1), (3, 2), (3, 3), (2, 2), (4, 2)])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.second_tier(but=["symmetric_memory-2-2", "hierarchical-2-2", "process_group-2-2"])
def test_is_bitwise_the_training_in_which_all_rows_travel(ranks, world, transport, stage):
    for few, every in ranks.run(both, world, transport, "dp", stage, torch.bfloat16, "", 0.5):
        assert few < every


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.second_tier(but=["dtype0-3"])
def test_replicas_sum_the_rows_of_all(ranks, stage, dtype):
    for few, every in ranks.run(both, 4, "", "hsdp", stage, dtype, "", 1e9):
        assert few < every


@pytest.mark.parametrize("other", ["tied", "sum"])
@pytest.mark.parametrize("stage", [0, 2])  # at stage 3 a weight may be read by its module alone
@pytest.mark.second_tier(but=["0-tied"])
def test_a_table_that_is_used_otherwise_too_travels_whole(ranks, stage, other):
    # Of the other table 7 rows of 40 travel.
    for few, every in ranks.run(both, 3, "hierarchical", "dp", stage, torch.float32, other, 0.5):
        assert few < every


def reference(world):
    """Weights of one process, plain torch."""
    torch.manual_seed(3)
    model = Model().double()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(STEPS):
        for rank in range(world):
            for micro_batch in range(2):
                (model(drawn(step, rank, micro_batch)) / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.second_tier(but=["2-1"])
def test_equals_one_process(ranks, stage, world):
    arguments = (on_transport, world, "hierarchical", trained, "dp", stage, torch.float64, "", 0.5)
    for found, _ in ranks.run(*arguments):
        weights = found[-1][1]
        for name, expected in reference(world).items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-7, atol=1e-7, msg=name)


ROWS, COLUMNS, IDS = 4096, 32, (5, 9, 2047, 2048, 4000)


def bytes_of(group, by_rows, touch, steps=2):
    """Read by this rank in the last step, of a model that is one table; the first `touch` of IDS are touched,
    the last of them by rank 1 alone."""
    take(group, "symmetric_memory")
    mesh = DeviceMesh.from_group(group, "cpu")
    table = nn.Embedding(ROWS, COLUMNS)
    handle = pyruntime.shard(table, mesh, stage=1, bucket_bytes=BUCKET)
    optimizer = handle.adamw(max_norm=1e9)
    ids = torch.arange(ROWS * 5 // 8)
    if touch:
        ids = torch.tensor(IDS[: touch - (mesh.get_rank() == 0)], dtype=torch.long)
    with contextlib.nullcontext() if by_rows else dense():
        for _ in range(steps):
            before = comm.stats(handle.axes.shard.name).bytes
            table(ids).square().sum().backward()
            optimizer.step()
            handle.complete()
    read = comm.stats(handle.axes.shard.name).bytes - before
    handle.close()
    return read


@pytest.mark.parametrize("touch", [1, 3, 5])
def test_bytes_are_those_of_the_touched_rows(ranks, touch):
    per_rank = ROWS // 2
    for rank, (few, every) in enumerate(
        zip(ranks.run(bytes_of, 2, True, touch), ranks.run(bytes_of, 2, False, touch), strict=True)
    ):
        own = sum(each // per_rank == rank for each in IDS[:touch])
        norm = every - (per_rank + 1) * COLUMNS * 4
        assert 0 <= norm < 100  # what ranks tell each other of the norm
        bits_of_all = (ROWS + 2) // 8 + 1
        assert few - norm == (own + 1) * COLUMNS * 4 + bits_of_all


@pytest.mark.parametrize(
    ("steps", "searched"),
    [(1, True), (2, False), (reducer.SEARCH_EVERY, False), (reducer.SEARCH_EVERY + 1, True)],
)
@pytest.mark.second_tier("16-False")
def test_where_most_rows_are_touched_all_travel_and_few_steps_search_for_them(ranks, steps, searched):
    few, every = (ranks.run(bytes_of, 2, by_rows, 0, steps) for by_rows in (True, False))
    of_bits = (ROWS + 2) // 8 + 1 if searched else 0
    assert [one - other for one, other in zip(few, every, strict=True)] == [of_bits] * 2


def changing(group, by_rows):
    """Weights of a table of which most rows are touched in some steps, in others few."""
    take(group, "process_group")
    torch.manual_seed(3)
    table = nn.Embedding(ROWS, 3)
    handle = pyruntime.shard(table, DeviceMesh.from_group(group, "cpu"), stage=1, bucket_bytes=BUCKET)
    optimizer = handle.adamw(lr=1e-2, max_norm=1e9)
    with contextlib.nullcontext() if by_rows else dense():
        for step in range(2 * reducer.SEARCH_EVERY + 3):
            ids = torch.arange(ROWS if step in (0, 5, reducer.SEARCH_EVERY + 1) else 7 + group.rank())
            table(ids).square().sum().backward()
            optimizer.step()
    weights = table.state_dict()["weight"].clone()
    handle.close()
    return weights


def test_a_table_that_is_touched_more_and_less_is_trained_alike(ranks):
    for one, other in zip(ranks.run(changing, 2, True), ranks.run(changing, 2, False), strict=True):
        assert torch.equal(bits(one), bits(other))


def vocabulary_cut(group, stage, by_rows):
    """Weights of a table that is cut over two ranks, trained by two pairs; the norms."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    whole = nn.Embedding(VOCAB, WIDTH)
    table = VocabParallelEmbedding.from_embedding(whole, mesh["tp"], sequence_parallel=False)
    handle = pyruntime.shard(table, mesh["dp"], stage=stage, bucket_bytes=BUCKET)
    optimizer = handle.adamw(lr=1e-2, max_norm=0.5)
    norms = []
    with contextlib.nullcontext() if by_rows else dense():
        for step in range(STEPS):
            table(drawn(step, mesh["dp"].get_local_rank(), 0)).tanh().sum().backward()
            norms.append(optimizer.step().grad_norm)
    handle.complete()
    name = handle.axes.shard.name
    found = memory_of(table.weight).clone(), norms, comm.stats(name).bytes
    handle.close()
    comm.close(mesh["tp"])
    return found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.second_tier("1")
def test_a_vocabulary_that_is_cut_sends_the_rows_of_its_ranks(ranks, stage):
    few, every = (ranks.run(vocabulary_cut, 4, stage, by_rows) for by_rows in (True, False))
    torch.manual_seed(3)
    whole = nn.Embedding(VOCAB, WIDTH)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        for rank in range(2):
            (whole(drawn(step, rank, 0)).tanh().sum() / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    halves = whole.weight.detach().tensor_split(2)
    for rank in range(4):
        assert torch.equal(bits(few[rank][0]), bits(every[rank][0])) and few[rank][1] == every[rank][1]
        torch.testing.assert_close(few[rank][0], halves[rank % 2], rtol=1e-5, atol=1e-6)


def returned_first(group):
    """Names of the buckets in the order in which weights return, and of the first module that reads."""
    model, handle, optimizer, rank, _ = made(group, "dp", 2, torch.float32, "")
    model(drawn(0, rank, 0)).backward()
    optimizer.step()
    order = [bucket.name for bucket in handle._gatherer.update_order()]
    handle.close()
    return order


def test_the_table_that_is_read_first_returns_first(ranks):
    for order in ranks.run(returned_first, 3):
        assert order[:2] == ["embed.weight", "places.weight"]


# -- without ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_row_is_untouched_only_where_every_bit_is_zero(dtype, width):
    rows = torch.zeros(6, width, dtype=dtype)
    for row, value in {1: -0.0, 2: torch.nan, 4: torch.finfo(dtype).tiny, 5: -torch.inf}.items():
        rows[row, -1] = value
    assert touched_rows([rows], 6).tolist() == [False, True, True, False, True, True]
    other = torch.zeros(6, width)
    other[3, 0] = 1
    assert touched_rows([None, rows, other], 6).tolist() == [False, True, True, True, True, True]
    assert not touched_rows([None, None], 6).any()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_flags_come_back_from_their_bits(count):
    flags = torch.rand(count) < 0.3
    bits_ = packed(flags)
    assert bits_.dtype == torch.uint8 and len(bits_) == -(-count // 8)
    assert torch.equal(unpacked(bits_, count), flags)


@pytest.mark.parametrize("segments", [1, 2, 3, 7, 12])
def test_lines_of_a_table_are_its_rows_and_marks(segments):
    bucket = Bucket([("table", nn.Parameter(torch.zeros(10, 3)))], segments)
    rows = torch.rand(10) < 0.5
    lines = bucket.lines_with(rows).nonzero().flatten()
    found, marks = bucket.rows_of(lines)
    assert found[~marks].tolist() == rows.nonzero().flatten().tolist()
    assert int(marks.sum()) == segments and not found[marks].any()
    for line, row, mark in zip(lines.tolist(), found.tolist(), marks.tolist(), strict=True):
        segment, within = divmod(line, bucket.segment_lines)
        spans = bucket.spans(range(segment, segment + 1), range(within, within + 1))
        assert [span.source for span in spans] == ([] if mark else [row])


def test_only_tables_that_one_embedding_alone_has_are_searched():
    model = Model()
    assert [id(table) for table in tables_of(model)] == [id(model.embed.weight), id(model.places.weight)]
    model.head.weight = model.embed.weight
    model.places.weight.requires_grad_(False)
    assert tables_of(model) == []
