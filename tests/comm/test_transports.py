"""Which transport a group takes, what it costs on the wire, and how it is chosen."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyruntime import comm, ops
from pyruntime.comm import group_rank, group_size
from tests.transports import take


def reopened(group, **settings) -> str:
    comm.close(group)
    comm.configure(group, **settings)
    ops.all_gather(torch.ones(2, 3), group)
    return comm.transport_of(group)


@pytest.mark.parametrize(
    ("world_size", "settings", "found"),
    [
        (3, {"transport": "symmetric_memory"}, "symmetric memory, 3 ranks of one host"),
        (3, {"hosts": ["a", "b", "c"]}, "ring over gloo, 3 hosts, measured"),
        (3, {"hosts": ["a", "b", "b"]}, "ring over gloo, 3 hosts"),  # uneven: every rank for itself
        (4, {"hosts": ["a", "b", "a", "b"]}, "hierarchical: 2 hosts of 2 ranks"),
        (4, {"hosts": ["a", "b", "a", "b"], "transport": "process_group"}, "ring over gloo, 4 hosts"),
        (2, {"transport": "process_group", "chunk_bytes": 64}, "chunks of about 64 bytes"),
    ],
)
def test_the_transport_follows_from_where_the_ranks_are(ranks, world_size, settings, found):
    for description in ranks.run(described_case, world_size, settings):
        assert found in description


def described_case(group, settings) -> str:
    return reopened(group, **settings)


def refused_case(group, settings, error, sentence):
    comm.close(group)
    with pytest.raises(error, match=sentence):
        reopened(group, **settings)
    comm.configure(group, transport="symmetric_memory")


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"transport": "pigeon"}, ValueError, "transport='pigeon' is no transport; use 'auto'"),
        ({"hosts": ["a"]}, ValueError, "hosts names 1 ranks' hosts and group .* has 2 ranks"),
        ({"transport": "hierarchical"}, ValueError, "it needs several hosts with the same number of ranks"),
        ({"transport": "symmetric_memory", "hosts": ["a", "b"]}, ValueError, "whose ranks are on 2 hosts"),
        ({"wire_dtype": torch.float16}, ValueError, "wire_dtype=torch.float16 does not travel"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes=0 is no size"),
        ({"traffic_class": "urgent"}, ValueError, "traffic_class='urgent' is no class of traffic"),
    ],
)
def test_settings_that_make_no_sense_are_refused_on_every_rank(ranks, settings, error, sentence):
    ranks.run(refused_case, 2, settings, error, sentence)


def late_settings_case(group):
    ops.all_gather(torch.ones(2, 3), group)
    with pytest.raises(RuntimeError, match="choose its transport before the first op, or after closing it"):
        comm.configure(group, transport="process_group")


def test_a_transport_is_chosen_before_the_first_op(ranks):
    ranks.run(late_settings_case, 2)


def wire_case(group, wire_dtype, operand_dtype):
    """The largest error of a sum over the ranks, relative to the exact one."""
    comm.close(group)
    comm.configure(group, transport="process_group", wire_dtype=wire_dtype)
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(group_size(group), 64, 33, generator=generator).to(operand_dtype)
    found = ops.reduce_scatter(parts[group_rank(group)], group)
    assert found.dtype == operand_dtype
    exact = parts.double().sum(0).tensor_split(group_size(group))[group_rank(group)]
    return ((found.double() - exact).abs() / exact.abs().clamp_min(1.0)).max().item()


def test_partial_sums_travel_in_the_dtype_asked_for(ranks):
    one_rounding = 2.0**-8
    narrow = max(ranks.run(wire_case, 4, None, torch.bfloat16))
    wide = max(ranks.run(wire_case, 4, torch.float32, torch.bfloat16))
    assert wide <= one_rounding < narrow <= 4 * one_rounding
    exact = max(ranks.run(wire_case, 4, None, torch.float32))
    rounded = max(ranks.run(wire_case, 4, torch.bfloat16, torch.float32))
    assert exact < 1e-6 < rounded <= 4 * one_rounding


def bytes_case(group, transport):
    """Bytes that this rank sent to other hosts for one all-gather and one reduce-scatter."""
    comm.close(group)
    comm.configure(group, transport="symmetric_memory")  # forgets what other tests settled
    take(group, transport)
    sent = []
    own = torch.ones(6, 5)
    for op, operand in ((ops.all_gather, own), (ops.reduce_scatter, torch.ones(6 * group_size(group), 5))):
        torch.distributed.barrier(group=group)
        before = comm.traffic()["tp"].bytes_sent
        op(operand, group, **({"rows": 6 * group_size(group)} if op is ops.all_gather else {}))
        torch.distributed.barrier(group=group)
        sent.append(comm.traffic()["tp"].bytes_sent - before)
    return sent


def test_each_byte_crosses_the_network_once(ranks):
    """H hosts: each receives (H - 1) / H of the rows, so (H - 1) times the operand is sent in all."""
    operand = 6 * 4 * 5 * 4
    ring = ranks.run(bytes_case, 4, "process_group")
    assert [sum(column) for column in zip(*ring, strict=True)] == [3 * operand, 3 * operand]
    hosts = ranks.run(bytes_case, 4, "hierarchical")
    assert [sum(column) for column in zip(*hosts, strict=True)] == [operand, operand]


def names_in_a_profile(group) -> set[str]:
    take(group, "process_group")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ops.all_gather(torch.ones(64, 3), group)
    return {event.key for event in found.key_averages()}


def test_transfers_are_not_recorded_as_they_may_outlive_a_profiler(ranks):
    for names in ranks.run(names_in_a_profile, 2):
        assert "pyruntime::all_gather" in names
        assert not {name for name in names if name.startswith("gloo:")}
