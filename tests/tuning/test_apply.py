"""From the file to the ops: auto takes what was measured, in groups like those that measured."""

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyruntime import ops
from pyruntime.comm.core import _C
from pyruntime.tuning import cache
from pyruntime.tuning.apply import find, use
from pyruntime.tuning.cache import Choice, Key, Place

SYMMETRIC = Place("any", 2, "symmetric memory", "any")
ROWS, N, K = 23, 12, 9
RULE = "chunked is the rule where nothing was tuned"


def key(op="all_gather_matmul", rows=ROWS, n=N, k=K, dtype="float64", device="cpu"):
    return Key(op, rows, n, k, dtype, device)


def choice(tier: str, tiles: str = "") -> Choice:
    return Choice(tier, {"unfused": 0.002, "chunked": 0.0015}, rounds=5, date="2026-11-21", tiles=tiles)


def asked(group, rows=ROWS):
    return ops.tier_of("all_gather_matmul", rows, N, K, torch.float64, group)


def gathered(group, rows=ROWS):
    """One call by auto, its error, and how many products it was made of."""
    torch.manual_seed(0)
    whole, weight = torch.randn(rows, K).double(), torch.randn(N, K).double()
    shard = whole.tensor_split(group.size())[group.rank()]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        y = ops.all_gather_matmul(shard, weight, group, rows=rows)
    products = sum(event.count for event in found.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    return (y - whole @ weight.t()).abs().max().item(), products


def tuned(group, tier, rows):
    """What auto says before and after its first call, and how many products that call made."""
    use({dataclasses.replace(SYMMETRIC, world_size=group.size()): {key(rows=rows): choice(tier)}})
    try:
        ops.all_gather(torch.ones(1, 1), group)  # opens the group's transport
        before = asked(group, rows)
        error, products = gathered(group, rows)
        return before, asked(group, rows), error, products
    finally:
        use({})


@pytest.mark.parametrize(("tier", "products", "rows"), [("unfused", 1, 24), ("chunked", 3, 25)])
def test_auto_takes_the_tier_that_was_measured(ranks, tier, products, rows):
    for before, after, error, made in ranks.run(tuned, 3, tier, rows):
        assert before == after == (tier, "tuned: chunked 1.5 ms, unfused 2 ms on 2026-11-21")
        assert error < 1e-12 and made == products


def not_for_this_group(group):
    """What auto says of a shape that was measured by other groups, or of another shape."""
    ops.all_gather(torch.ones(1, 1), group)
    found = []
    for place, name in (
        (dataclasses.replace(SYMMETRIC, world_size=3), key()),
        (dataclasses.replace(SYMMETRIC, transport="ring over gloo"), key()),
        (SYMMETRIC, key(rows=ROWS + 1)),
        (SYMMETRIC, key(op="all_gather_matmul_backward")),
        (SYMMETRIC, key(dtype="float32")),
        (SYMMETRIC, key(device="cuda")),
    ):
        use({place: {name: choice("unfused")}})
        found.append(asked(group))
    use({})
    return found


def test_choices_count_where_they_were_measured_and_nowhere_else(ranks):
    for found in ranks.run(not_for_this_group, 2):
        assert len(found) == 6
        assert all(tier == "chunked" and why.startswith(RULE) for tier, why in found)


def forgotten(group):
    """What auto says of a shape while choices are used, and when they are used no more."""
    ops.all_gather(torch.ones(1, 1), group)
    use({SYMMETRIC: {key(rows=30): choice("unfused")}})
    gathered(group, 30)
    before = asked(group, 30)[0]
    use({})
    return before, asked(group, 30)[0]


def test_choices_that_are_used_no_more_are_forgotten(ranks):
    assert ranks.run(forgotten, 2) == [("unfused", "chunked")] * 2


def fused_is_tuned(group):
    """What auto says of a shape before and after a call, where the tuned tier cannot run."""
    ops.all_gather(torch.ones(1, 1), group)
    use({SYMMETRIC: {key(rows=33): choice("fused")}})
    try:
        before = asked(group, 33)[0]
        error, _ = gathered(group, 33)
        return before, asked(group, 33), error
    finally:
        use({})


def test_where_a_tuned_tier_cannot_run_the_rule_holds(ranks):
    for before, after, error in ranks.run(fused_is_tuned, 2):
        assert before == after[0] == "chunked" and error < 1e-12
        assert after[1].startswith(RULE)


def test_the_core_refuses_what_is_no_tier():
    shape = ("all_gather_matmul", ROWS, N, K, torch.float32, "cpu")
    for tuned, sentence in (
        (("auto", 0, "", [], ""), "'auto' was tuned for all_gather_matmul rows=23 n=12 k=9 Float cpu"),
        (("quick", 0, "", [], ""), "tier='quick' is no tier"),
        (("chunked:4", 0, "", [], ""), "chunks and tiles have places of their own"),
        (("chunked", -1, "", [], ""), "-1 chunks were tuned for all_gather_matmul rows=23"),
    ):
        with pytest.raises(ValueError, match=sentence):
            _C.set_tuned_tiers(2, "symmetric memory", [(shape, tuned)])


HERE = Place("a GPU", 2, "symmetric memory", "pyruntime 1, torch 2")


def test_rank_0_finds_what_fits_this_machine(tmp_path):
    path = tmp_path / "tuning.json"
    assert find(path, "a GPU", 2, HERE.library).words == ""
    elsewhere = [
        dataclasses.replace(HERE, device="another"),
        dataclasses.replace(HERE, world_size=4),
        dataclasses.replace(HERE, library="pyruntime 2, torch 2"),
    ]
    cache.write(path, {place: {key(): choice("chunked")} for place in elsewhere})
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {} and "holds nothing for 2 ranks on a GPU" in found.words
    ring = dataclasses.replace(HERE, transport="ring over gloo")
    unknown = Choice("quick", {"quick": 0.1}, rounds=3, date="2026-11-21")
    older = dataclasses.replace(choice("unfused"), date="2026-11-19")
    empty = dataclasses.replace(HERE, transport="hierarchical: 2 hosts of 1 ranks")
    mine = {
        empty: {key(k=1): unknown},
        HERE: {key(): choice("chunked"), key(k=2): older, key(k=1): unknown},
        ring: {key(): choice("unfused")},
    }
    cache.write(path, {place: {key(): choice("chunked")} for place in elsewhere} | mine)
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {
        HERE: {key(): choice("chunked"), key(k=2): older},
        ring: {key(): choice("unfused")},
    }
    assert found.words == (
        "2 choices for 2 ranks over symmetric memory, 2026-11-19 to 2026-11-21; 1 choices for 2 ranks over "
        f"ring over gloo, 2026-11-21, from {path}"
    )


def test_a_file_that_cannot_be_read_is_said_and_ignored(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("{")
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {} and found.words.startswith(f"not used: the tuning file {path} is damaged: ")
