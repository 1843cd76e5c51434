"""From the file to the ops: auto starts settled by what was measured, in groups like those that measured."""

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyruntime import comm, ops
from pyruntime.comm.core import _C
from pyruntime.tuning import cache
from pyruntime.tuning.cache import Choice, Place
from pyruntime.tuning.take_up import find, hand_over

SYMMETRIC = Place("any", 2, "symmetric memory", "any")
ROWS, N, K = 23, 12, 9  # a group keeps what it has settled, so each test has rows of its own


def key(op="all_gather_matmul", rows=ROWS, n=N, k=K, dtype=torch.float64, device="cpu"):
    return _C.tier_key(op, rows, n, k, dtype, device)


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


def started_settled(group, tier, rows):
    """What auto says before and after its first call, and how many products that call made."""
    hand_over({dataclasses.replace(SYMMETRIC, world_size=group.size()): {key(rows=rows): choice(tier)}})
    try:
        ops.all_gather(torch.ones(1, 1), group)  # opens the group's transport
        before = asked(group, rows)
        error, products = gathered(group, rows)
        return before, asked(group, rows), error, products
    finally:
        hand_over({})


@pytest.mark.parametrize(("tier", "products", "rows"), [("unfused", 1, 24), ("chunked", 3, 25)])
def test_auto_starts_with_the_tier_that_was_measured(ranks, tier, products, rows):
    for before, after, error, made in ranks.run(started_settled, 3, tier, rows):
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
        (SYMMETRIC, key(dtype=torch.float32)),
        (SYMMETRIC, key(device="cuda:1")),
    ):
        hand_over({place: {name: choice("unfused")}})
        found.append(asked(group))
    hand_over({})
    return found


def test_choices_count_where_they_were_measured_and_nowhere_else(ranks):
    for found in ranks.run(not_for_this_group, 2):
        unknown = ("auto", "no call with this shape yet: the first ones measure the tiers")
        assert found == [unknown] * 6


def forgotten(group):
    """What auto says of shapes that are handed over no more: one is settled, one was not called yet."""
    ops.all_gather(torch.ones(1, 1), group)
    hand_over({SYMMETRIC: {key(rows=30): choice("unfused"), key(rows=31): choice("chunked")}})
    gathered(group, 30)
    hand_over({})
    return asked(group, 30)[0], asked(group, 31)[0]


def test_a_group_keeps_what_it_has_settled(ranks):
    assert ranks.run(forgotten, 2) == [("unfused", "auto")] * 2


def fused_is_tuned(group):
    """What auto says of a shape before and after a call, where the tuned tier cannot run."""
    ops.all_gather(torch.ones(1, 1), group)
    hand_over({SYMMETRIC: {key(rows=33): choice("fused")}})
    try:
        before = asked(group, 33)[0]
        error, _ = gathered(group, 33)
        return before, asked(group, 33), error
    finally:
        hand_over({})


def test_a_tuned_tier_that_cannot_run_here_is_measured_anew(ranks):
    for before, after, error in ranks.run(fused_is_tuned, 2):
        assert before == "auto" and error < 1e-12
        assert after == ("auto", "being measured: the first calls with this shape take the tiers in turn")


def looked_up(group):
    ops.all_gather(torch.ones(1, 1), group)
    hand_over({SYMMETRIC: {key(): choice("chunked", "large")}})
    try:
        names = comm.group_name(group)
        shape = (N, K, torch.float64, names, "cpu")
        return _C.tier_preset("all_gather_matmul", ROWS, *shape), _C.tier_preset("other", ROWS, *shape)
    finally:
        hand_over({})


def test_tiles_can_be_looked_up_by_op_and_shape(ranks):
    for preset, none in ranks.run(looked_up, 2):
        assert preset == ("chunked", 0, "large", [("chunked", 0.0015), ("unfused", 0.002)], "2026-11-21")
        assert none is None


def test_the_core_refuses_what_is_no_tier():
    for tier in ("auto", "quick"):
        with pytest.raises(ValueError, match=f"'{tier}'"):
            _C.set_tier_presets(2, "symmetric memory", {"key": (tier, 0, "", [], "")})
    for preset, sentence in (
        (("chunked:4", 0, "", [], ""), "chunks and tiles have places of their own"),
        (("chunked", -1, "", [], ""), "has -1 chunks; use 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            _C.set_tier_presets(2, "symmetric memory", {"key": preset})


def test_a_key_has_the_kind_of_a_device_and_not_its_number():
    assert key(device="cuda:3") == key(device="cuda:0") != key()


HERE = Place("a GPU", 2, "symmetric memory", "pyruntime 1, torch 2")


def test_rank_0_finds_what_fits_this_machine(tmp_path):
    path = tmp_path / "tuning.json"
    assert find(path, "a GPU", 2, HERE.library).words == ""
    elsewhere = [
        dataclasses.replace(HERE, device="another"),
        dataclasses.replace(HERE, world_size=4),
        dataclasses.replace(HERE, library="pyruntime 2, torch 2"),
    ]
    cache.write(path, {place: {"k": choice("chunked")} for place in elsewhere})
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {} and "holds nothing for 2 ranks on a GPU" in found.words
    ring = dataclasses.replace(HERE, transport="ring over gloo")
    unknown = Choice("quick", {"quick": 0.1}, rounds=3, date="2026-11-21")
    older = dataclasses.replace(choice("unfused"), date="2026-11-19")
    empty = dataclasses.replace(HERE, transport="hierarchical: 2 hosts of 1 ranks")
    mine = {
        empty: {"m": unknown},
        HERE: {"k": choice("chunked"), "l": older, "m": unknown},
        ring: {"k": choice("unfused")},
    }
    cache.write(path, {place: {"k": choice("chunked")} for place in elsewhere} | mine)
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {HERE: {"k": choice("chunked"), "l": older}, ring: {"k": choice("unfused")}}
    assert found.words == (
        "2 choices for 2 ranks over symmetric memory, 2026-11-19 to 2026-11-21; 1 choices for 2 ranks over "
        f"ring over gloo, 2026-11-21, from {path}"
    )


def test_a_file_that_cannot_be_read_is_said_and_ignored(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("{")
    found = find(path, "a GPU", 2, HERE.library)
    assert found.places == {} and found.words.startswith(f"not used: the tuning file {path} is damaged: ")
