"""Numbers of chunks: products are right in any, ranks must agree, and auto takes what was tuned."""

import dataclasses

import pytest
import torch

from pyruntime import comm, ops
from pyruntime.cli import tune
from pyruntime.tuning import cache
from pyruntime.tuning.apply import find, use
from pyruntime.tuning.cache import Choice, Key, Place
from pyruntime.tuning.linears import RankLinear
from pyruntime.tuning.measure import Problem, measure
from tests.ops.test_primitives import all_reduce_case, column_case, row_case
from tests.transports import take

TIMES = {"unfused": 0.002, "chunked": 0.0015, "chunked:6": 0.001}


def place_of(group) -> Place:
    return Place("any", group.size(), comm.transport_of(group).split(",")[0], "any")


def choice(way: str) -> Choice:
    return Choice.of(way, TIMES | {way: 0.001}, rounds=5, date="2026-11-22")


def every_number(group, transport, seed, rows, dtype):
    """Both linears in ways that differ in tier and number of chunks, one after the other, while others are
    still under way; each against the exact products."""
    take(group, transport)
    generator = torch.Generator().manual_seed(seed)
    numbers = [2, 64] if transport != "process_group" or group.size() > 2 else [1, 7, 64]
    ways = [f"{tier}:{number}" for number in numbers for tier in ("chunked", "unfused")]
    ways += ["chunked", "unfused"]
    for at in torch.randperm(len(ways), generator=generator).tolist():
        for dim, keep in ((0, True), (1, False)):
            column_case(group, seed, rows, dim, 7, 5, dtype, ways[at], keep, True, True)
            row_case(group, seed, rows, dim, 6, 5, dtype, ways[at], True)
        all_reduce_case(group, seed, max(rows, 1), 4, 5, dtype, ways[at])


@pytest.mark.parametrize(
    ("world", "transport"), [(2, "process_group"), (3, "process_group"), (4, "hierarchical")]
)
@pytest.mark.parametrize("rows", [1, 8, 41])
def test_products_are_right_in_any_number_of_chunks(ranks, world, transport, rows):
    seed = int(torch.randint(2**31, ()))
    for dtype in (torch.float32, torch.bfloat16):
        ranks.run(every_number, world, transport, seed, rows, dtype, timeout=300)


def sums(group, transport, numbers):
    """What an unfused linear gives in each number of chunks, backward too."""
    take(group, transport)
    found = []
    for number in numbers:
        generator = torch.Generator().manual_seed(comm.group_rank(group))
        x = torch.randn(37, 9, generator=generator).requires_grad_()
        weight = torch.randn(11, 9, generator=generator).requires_grad_()
        tier = f"unfused:{number}" if number else "unfused"
        y = ops.matmul_reduce_scatter(x, weight, group, tier=tier)
        y.square().sum().backward()
        z = ops.all_gather_matmul(y.detach(), weight.detach().t(), group, rows=37, tier=tier)
        found.append([y.detach(), x.grad, weight.grad, z])
    return found


@pytest.mark.parametrize(("world", "transport"), [(3, "process_group"), (4, "hierarchical")])
def test_sums_over_ranks_have_the_same_bits_in_any_number_of_chunks(ranks, world, transport):
    for first, *others in ranks.run(sums, world, transport, [0, 2, 8, 40, 64]):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def sent_by(group, tier, rows):
    """Chunks that this rank has sent for one gather."""
    shard, weight = torch.ones(rows // group.size(), 4), torch.ones(3, 4)
    before = comm.traffic()["tp"].chunks_sent
    assert (ops.all_gather_matmul(shard, weight, group, rows=rows, tier=tier) == 4).all()
    torch.distributed.barrier(group)
    return comm.traffic()["tp"].chunks_sent - before


def taken_up(group, way):
    """What auto and other tiers say and send, with a tuned number of chunks and without."""
    take(group, "process_group")
    rows = 48 * group.size()
    key = Key("all_gather_matmul", rows, 3, 4, "float32", "cpu")

    def told(tier="auto"):
        return ops.tier_of("all_gather_matmul", rows, 3, 4, torch.float32, group, tier)

    ops.all_gather(torch.ones(1, 1), group)
    usual = sent_by(group, "chunked", rows + group.size())
    use({place_of(group): {key: choice(way)}})
    try:
        said = [told(), told("unfused")]
        sent = [sent_by(group, tier, rows) for tier in ("unfused", "auto", "chunked", "chunked:2")]
        # One rank asks for a tier by name; what travels is that of the others all the same.
        sent.append(sent_by(group, "auto" if group.rank() else "unfused", rows))
    finally:
        use({})
    return usual, said, sent


@pytest.mark.parametrize("way", ["chunked:6", "unfused:6"])
def test_auto_takes_the_tuned_number_of_chunks_and_so_does_who_names_a_tier(ranks, way):
    tier = way.partition(":")[0]
    for usual, (auto, named), sent in ranks.run(taken_up, 2, way):
        assert auto[0] == tier and auto[1].startswith("tuned: chunked 1.5 ms, chunked:6 1 ms, unfused")
        assert auto[1].endswith(" on 2026-11-22; each rank's rows in 6 chunks")
        assert named[1].startswith("tier='unfused' was asked for; tuned: each rank's rows in 6 chunks")
        assert sent == [6, 6, 6, 2, 6] and usual != 6


def told_of_another_width(group, op):
    """What auto says of `op` where a number of chunks was tuned for weights of another n, then k."""
    take(group, "process_group")
    ops.all_gather(torch.ones(1, 1), group)
    found = []
    for n, k in ((5, 4), (3, 5)):
        use({place_of(group): {Key(op, 96, n, k, "float32", "cpu"): choice("chunked:6")}})
        try:
            found.append(ops.tier_of(op, 96, 3, 4, torch.float32, group)[1])
        finally:
            use({})
    return found


@pytest.mark.parametrize(
    ("op", "cut"),
    [
        ("all_gather_matmul", "n"),
        ("all_gather_matmul_backward", "n"),
        ("replicated_matmul_backward", "n"),
        ("matmul_reduce_scatter", "k"),
        ("matmul_reduce_scatter_backward", "k"),
        ("matmul_all_reduce", "k"),
    ],
)
def test_ranks_whose_shares_of_a_weight_differ_take_one_tuned_number(ranks, op, cut):
    for other_n, other_k in ranks.run(told_of_another_width, 2, op):
        assert ("each rank's rows in 6 chunks" in other_n) == (cut == "n"), other_n
        assert ("each rank's rows in 6 chunks" in other_k) == (cut == "k"), other_k


def not_shared(group, transport, mine):
    """A linear, forward and backward, where the ranks were handed different numbers."""
    take(group, transport)
    rows = 12 * group.size()
    ops.all_gather(torch.ones(1, 1), group)
    keys = [Key(f"all_gather_matmul{name}", rows, 3, 4, "float32", "cpu") for name in ("", "_backward")]
    way = mine[group.rank()]
    use({place_of(group): {key: choice(way) for key in keys}} if way else {})
    try:
        weight = torch.ones(3, 4, requires_grad=True)
        ops.all_gather_matmul(torch.ones(12, 4), weight, group, rows=rows).sum().backward()
    finally:
        use({})


@pytest.mark.parametrize(
    ("world", "transport", "ways"),
    [
        (2, "process_group", ["chunked:2", "chunked:4"]),
        (2, "process_group", ["chunked:2", ""]),
        (3, "process_group", ["unfused:8", "chunked:8", "chunked:6"]),
        (4, "hierarchical", ["chunked:4", "chunked:2", "chunked:4", "chunked:4"]),
    ],
)
def test_numbers_that_ranks_do_not_share_are_refused(ranks, world, transport, ways):
    errors = ranks.run(not_shared, world, transport, ways, expect_errors=True, timeout=60)
    texts = [str(error) for error in errors]
    assert all(isinstance(error, ValueError | comm.CommError) for error in errors), texts
    assert any("each rank's rows in 2 chunks" in text or "in 6 chunks" in text for text in texts), texts
    told = [
        isinstance(error, ValueError) and "Ranks disagree on op" in text
        for error, text in zip(errors, texts, strict=True)
    ]
    assert any(told), texts


def cut_unevenly(group, ways):
    """Rank r's part of a weight has 3 + r rows, and each part's shape a choice of its own."""
    take(group, "process_group")
    rows = 70 * group.size()
    ops.all_gather(torch.ones(1, 1), group)
    keys = [Key("all_gather_matmul", rows, 3 + r, 4, "float32", "cpu") for r in (0, 1)]
    found = {key: choice(way) for key, way in zip(keys, ways, strict=True)}
    use({place_of(group): found})
    try:
        before = comm.traffic()["tp"].chunks_sent
        shard, weight = torch.ones(rows // group.size(), 4), torch.ones(3 + group.rank(), 4)
        assert (ops.all_gather_matmul(shard, weight, group, rows=rows) == 4).all()
        torch.distributed.barrier(group)
        return comm.traffic()["tp"].chunks_sent - before
    finally:
        use({})


def test_parts_of_different_widths_travel_in_a_number_that_all_their_choices_name(ranks):
    assert ranks.run(cut_unevenly, 2, ["chunked:6", "unfused:6"]) == [6, 6]
    first, second = ranks.run(cut_unevenly, 2, ["chunked:64", "chunked"])
    assert first == second != 64


def refusals(group, transport, tier):
    if transport == "collectives":
        comm.close(group)
        comm.configure(group, transport=transport)
    else:
        take(group, transport)
    ops.matmul_reduce_scatter(torch.ones(4, 3), torch.ones(5, 3), group, tier=tier)


@pytest.mark.parametrize(
    ("world", "transport", "tier", "sentence"),
    [
        (2, "process_group", "chunked:65", "a rank's rows are cut into 1 to 64 chunks; use tier='auto'"),
        (3, "process_group", "chunked:3", "both ways round a ring of 3 hosts, which takes an even number"),
        (
            2,
            "symmetric_memory",
            "chunked:2",
            "the number of chunks is no choice where they travel by symmetric",
        ),
        (2, "process_group", "chunked:0", "'chunked:0' is no tier; use "),
        (2, "process_group", "chunked:", "'chunked:' is no tier; use "),
        (2, "process_group", "auto:2", "'auto:2' is no tier; use "),
        (2, "process_group", "unfused:-2", "'unfused:-2' is no tier; use "),
        (2, "process_group", "chunked:2x", "'chunked:2x' is no tier; use "),
        (2, "collectives", "unfused:2", "tier='unfused:2' was asked for matmul_reduce_scatter"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_a_sentence(ranks, world, transport, tier, sentence):
    for error in ranks.run(refusals, world, transport, tier, expect_errors=True):
        assert isinstance(error, ValueError) and sentence in str(error), str(error)


def unusable(group):
    """What auto says where the tuned number cannot be had here."""
    take(group, "symmetric_memory")
    ops.all_gather(torch.ones(1, 1), group)
    use({place_of(group): {Key("all_gather_matmul", 50, 3, 4, "float32", "cpu"): choice("chunked:6")}})
    try:
        sums = ops.all_gather_matmul(torch.ones(25, 4), torch.ones(3, 4), group, rows=50)
        return (sums == 4).all().item(), ops.tier_of("all_gather_matmul", 50, 3, 4, torch.float32, group)[0]
    finally:
        use({})


def test_a_tuned_number_that_cannot_be_had_here_is_left_alone(ranks):
    assert ranks.run(unusable, 2) == [(True, "chunked")] * 2


def measured(group, transport):
    take(group, transport)
    linear = RankLinear("down", "matmul_reduce_scatter", 50, 12, 16)
    problem = Problem(linear, group, torch.float32, torch.device("cpu"), group)
    return [measure(problem, when, 3, 60.0) for when in ("forward", "backward")]


@pytest.mark.parametrize(
    ("world", "transport"), [(2, "process_group"), (3, "process_group"), (2, "symmetric_memory")]
)
def test_half_and_twice_the_usual_number_are_measured(ranks, world, transport):
    results = ranks.run(measured, world, transport)
    for other in results[1:]:
        assert [dataclasses.asdict(one) for one in other] == [dataclasses.asdict(one) for one in results[0]]
    for one in results[0]:
        numbers = [int(way.partition(":")[2]) for way in one.tiers if ":" in way]
        if transport == "symmetric_memory":
            assert not numbers
        else:
            half, twice = numbers  # chunks are of 96 bytes, so there are many
            usual = twice // 2
            assert half in (usual // 2, usual // 2 + 1) and half != usual and twice == 2 * usual
            assert world == 2 or half % 2 == usual % 2 == 0


def round_trip(group, path):
    """From a measurement in which another number was the quickest, through the file, to what auto says and
    sends."""
    take(group, "process_group")
    shape = (96, 5, 4, torch.float32)
    linear = RankLinear("qkv", "all_gather_matmul", *shape[:3])
    problem = Problem(linear, group, torch.float32, torch.device("cpu"), group)
    found = measure(problem, "forward", 3, 60.0)
    way = next(name for name in found.tiers if ":" in name)
    found = dataclasses.replace(found, tiers=found.tiers | {way: 1e-9})
    place = place_of(group)
    if group.rank() == 0:
        cache.write(path, {place: tune.choices([found])})
    torch.distributed.barrier(group)
    use(find(path, place.device, place.world_size, place.library).places)
    try:
        before = comm.traffic()["tp"].chunks_sent
        ops.all_gather_matmul(problem.x, problem.weight, group, rows=96)
        torch.distributed.barrier(group)
        sent = comm.traffic()["tp"].chunks_sent - before
        return way, sent, ops.tier_of("all_gather_matmul", *shape, group)
    finally:
        use({})


def test_what_was_measured_comes_back_from_the_file(ranks, tmp_path):
    for way, sent, (tier, why) in ranks.run(round_trip, 2, tmp_path / "tuning.json"):
        number = int(way.removeprefix("chunked:"))
        assert sent == number and tier == "chunked"
        assert f", {way} " in why and why.endswith(f"; each rank's rows in {number} chunks")
