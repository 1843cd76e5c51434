"""explain() and strict mode: which tier, why, and what would be refused. The names in a profile."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pyruntime import comm, explain, ops, parallelize
from pyruntime.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from pyruntime.nn.tiers import strict_refusal
from tests.transports import take


class Net(nn.Module):
    def __init__(self, group, **options):
        super().__init__()
        self.embed = VocabParallelEmbedding(32, 8, group=group)
        self.up = ColumnParallelLinear(8, 16, group=group, **options)
        self.down = RowParallelLinear(16, 8, group=group, **options)

    def forward(self, ids):
        return self.down(self.up(self.embed(ids)).relu())


def explained(group) -> tuple[str, str]:
    take(group, "symmetric_memory")
    net = Net(group, tier="unfused")
    before = explain(net)
    assert [row.tier for row in before.rows if row.name != "embed"] == ["-"] * 4
    net(torch.arange(10)).sum().backward()
    after = explain(net)
    size = dist.get_world_size(group)
    shapes = [(row.name, row.when, row.op, row.rows, row.n, row.k) for row in after.rows]
    assert shapes == [
        ("embed", "forward", "reduce_scatter", 10, 32 // size, 8),
        ("embed", "backward", "reduce_scatter_backward", 10, 32 // size, 8),
        ("up", "forward", "all_gather_matmul", 10, 16 // size, 8),
        ("up", "backward", "all_gather_matmul_backward", 10, 16 // size, 8),
        ("down", "forward", "matmul_reduce_scatter", 10, 8, 16 // size),
        ("down", "backward", "matmul_reduce_scatter_backward", 10, 8, 16 // size),
    ]
    for row in after.rows[2:]:
        assert (row.dtype, row.group_size, row.asked, row.strict) == ("float32", size, "unfused", "")
        answer = ops.tier_of(row.op, row.rows, row.n, row.k, torch.float32, group, "unfused")
        assert (row.tier, row.reason) == answer
    return str(before), str(after)


def by_rule(group) -> list[tuple[str, str, str]]:
    """(pass, tier, reason) of what "auto" takes after one step."""
    take(group, "symmetric_memory")
    net = Net(group)
    net(torch.arange(10)).sum().backward()
    return [(row.when, row.tier, row.reason) for row in explain(net).rows if row.asked == "auto"]


def without_communication(group) -> list[tuple[str, str]]:
    """(layer, pass) that a replicated column and row call local."""
    torch.manual_seed(0)
    net = parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), group, {"0": "column", "1": "row"})
    net(torch.ones(4, 8)).sum().backward()
    return [(row.name, row.when) for row in explain(net).rows if row.tier == "local"]


def strict_net(group) -> str | None:
    """What a strict net says of a slow tier: the core's answer is replaced for the call."""
    net = Net(group, strict=True)
    net.up.label = "up"
    real = ops.tier_of

    def slow(*asked):
        return ("unfused", "as if unfused had been tuned") if dist.get_world_size(group) > 1 else real(*asked)

    ops.tier_of = slow
    try:
        net.up(net.embed(torch.arange(10)))
    except RuntimeError as error:
        return str(error)
    finally:
        ops.tier_of = real
    return None


def strict_checks_a_backward_too(group) -> list[int]:
    """How often a strict net asks in each of ten steps: in the first, and never again."""
    net = Net(group, strict=True)
    asked, counts, real = [], [], ops.tier_of

    def watched(*args):
        asked.append(args[0])
        return real(*args)[0].replace("unfused", "chunked"), "as if chunked were always the faster one"

    ops.tier_of = watched
    try:
        for _ in range(10):
            asked.clear()
            net(torch.arange(11)).sum().backward()
            counts.append(len(asked))
    finally:
        ops.tier_of = real
    return counts


def falling_back(group) -> str:
    """auto on a group that may not use symmetric memory runs unfused and says so, and strict refuses it."""
    comm.configure(group, transport="collectives")
    net = Net(group)
    net(torch.arange(10)).sum().backward()
    lines = [row for row in explain(net).rows if row.asked == "auto"]
    assert [line.tier for line in lines] == ["unfused"] * 4
    assert all(line.strict == "asked for auto, runs unfused" for line in lines)
    strict = Net(group, strict=True)
    with pytest.raises(RuntimeError, match="strict: ColumnParallelLinear, all_gather_matmul with rows=10"):
        strict(torch.arange(10))
    return lines[0].reason


def names_in_a_profile(group) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net = parallelize(model, group, {"0": "column", "2": "row"})
    net[0].label = "blocks.7.up"
    with profile(activities=[ProfilerActivity.CPU]) as found:
        net(torch.ones(4, 8))
    return [event.key for event in found.key_averages()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_layer_is_explained(ranks, world_size):
    before, after = ranks.run(explained, world_size)[0]
    assert "has not run yet" in before
    lines = after.splitlines()
    assert len(lines) == 9 and lines[0].startswith("layer ")
    # The reasons that lines share are said once, below them.
    assert [line.count("[1]") for line in lines] == [0, 1, 1, 0, 0, 0, 0, 1, 0]
    assert [line.count("[2]") for line in lines] == [0, 0, 0, 1, 1, 1, 1, 0, 1] and lines[8].startswith(
        "[2] "
    )
    transport = "-" if world_size == 1 else "symmetric memory"
    cells = ["up", "forward", "all_gather_matmul", 10, 16 // world_size, 8, "float32", world_size, transport]
    assert re.split(r"  +", lines[3])[:10] == [*(str(cell) for cell in cells), "unfused"]


def test_auto_tells_its_rule(ranks):
    for lines in ranks.run(by_rule, 2):
        assert len(lines) == 4
        for _, tier, reason in lines:
            assert tier == "chunked" and reason.startswith("chunked is the rule where nothing was tuned")


def test_a_pass_without_communication_is_local(ranks):
    assert ranks.run(without_communication, 2) == [[("0", "forward"), ("1", "backward")]] * 2


def test_strict_refuses_unfused(ranks):
    message = ranks.run(strict_net, 2)[0]
    assert message is not None
    assert "strict: up, all_gather_matmul with rows=10, n=8, k=8: asked for auto, runs unfused" in message
    assert "as if unfused had been tuned" in message
    assert ranks.run(strict_net, 1) == [None]  # on one rank there is nothing to fuse


def test_strict_checks_a_backward_too(ranks):
    for counts in ranks.run(strict_checks_a_backward_too, 2):
        assert counts[0] == 4 and counts[-1] == 0


def test_a_group_without_shared_memory_is_explained_and_refused(ranks):
    for rank in ranks.launch(falling_back, 2):
        assert rank.error is None, rank.error
        assert rank.value == "transport='collectives' was asked for"


@pytest.mark.parametrize(
    ("asked", "tier", "refused"),
    [
        ("auto", "unfused", True),
        ("auto", "chunked", False),
        ("auto", "local", False),
        ("auto", "auto", False),
        ("chunked", "unfused", True),
        ("fused", "chunked", True),
        ("unfused", "unfused", False),
        ("chunked", "local", False),
    ],
)
def test_strict_rule(asked, tier, refused):
    assert bool(strict_refusal(asked, tier)) == refused


def test_a_model_without_parallel_layers_says_so():
    assert "no parallel layer" in str(explain(nn.Linear(2, 2)))


def test_layers_show_in_a_profile_by_name(ranks):
    for names in ranks.run(names_in_a_profile, 2):
        assert "tp blocks.7.up" in names and "tp 2" in names


def test_what_is_no_module_is_told():
    with pytest.raises(TypeError, match=r"^explain\(\) takes an nn.Module; found: str\.$"):
        explain("a model")
