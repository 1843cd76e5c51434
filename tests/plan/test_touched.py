"""The bytes of gradients that the planner counts are those that travel, where few rows of the table do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import pyruntime
from pyruntime import comm
from pyruntime.data_parallel import touched
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.plan.mesh import Job, Mesh
from pyruntime.plan.models import ModelShape
from pyruntime.plan.step import Predictor
from pyruntime.plan.touched import MOST_TOUCHED, SHIFT, travelling_share
from tests.plan.jobs import job

VOCAB, HIDDEN, SEQ = 4096, 64, 48
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=SEQ,
)
SHAPE = ModelShape("small", 1, HIDDEN, 4, 4, HIDDEN // 4, 96, VOCAB)


def drawn(count: int, seed: int) -> torch.Tensor:
    """Ids by Zipf's law."""
    chances = 1 / (np.arange(VOCAB) + 1 + SHIFT)
    found = np.random.default_rng(seed).choice(VOCAB, (count, SEQ), p=chances / chances.sum())
    return torch.from_numpy(found)


def bytes_read(group, sequences):
    """Of gradients, by this rank in its second step."""
    torch.manual_seed(0)
    model = Llama(CONFIG, dtype=torch.bfloat16)
    handle = pyruntime.shard(model, DeviceMesh.from_group(group, "cpu"), stage=1, bucket_bytes=1 << 14)
    optimizer = handle.adamw(max_norm=1.0)
    for step in range(2):
        before = comm.stats(handle.axes.shard.name).bytes
        ids = drawn(sequences, 10 * step + group.rank())
        model(ids, ids).backward()
        optimizer.step()
        handle.complete()
    read = comm.stats(handle.axes.shard.name).bytes - before
    handle.close()
    return read


@pytest.mark.parametrize("sequences", [2, 130])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.second_tier(but=["3-2"])
def test_the_bytes_of_gradients_are_those_that_travel(ranks, world, sequences):
    cluster = replace(job("llama3-8b", "thin", 8, 8, 8192).cluster, core_bandwidth=2e9)
    wanted = Job(SHAPE, cluster, world, world * sequences, SEQ)
    found = Predictor(wanted, sums_whole=True).gradient_bytes(Mesh(dp=world, micro_batch=sequences))
    counted = sum(ranks.run(bytes_read, world, sequences)) / (world - 1)
    assert counted == pytest.approx(found, rel=0.03)
    whole = Predictor(wanted).gradient_bytes(Mesh(dp=world, micro_batch=sequences))
    # Of few tokens nearly half of the parameters, the table, do not travel; of many all do.
    assert found < 0.6 * whole if sequences == 2 else found == whole


def test_where_tables_travel_whole_they_are_counted_whole():
    wanted = job("llama3-8b", "thin", 8, 8, 512)
    on_cpus = replace(wanted, cluster=replace(wanted.cluster, core_bandwidth=2e9))
    tied = replace(on_cpus, model=replace(on_cpus.model, tied=True))
    for each, few in ((wanted, False), (tied, False), (on_cpus, True)):
        predictor, mesh = Predictor(each, sums_whole=True), Mesh(tp=4, dp=2)
        assert (predictor.gradient_bytes(mesh) < 2 * predictor.parameters(mesh)) == few


def test_the_share_is_that_of_the_first_part():
    assert MOST_TOUCHED == touched.MOST_TOUCHED
    assert travelling_share(32000, 1, 2 * 2048) == pytest.approx(0.06, abs=0.006)
    assert travelling_share(32000, 2, 2 * 2048) == pytest.approx(0.11, abs=0.006)
    assert travelling_share(32000, 1, 8 * 65536) == 1.0
