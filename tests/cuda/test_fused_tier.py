"""The fused tier of the primitives, here by the host dialect of the kernels: one kernel waits for, or sends,
the rows that it multiplies, and works with ranks that take another tier."""

from __future__ import annotations

import time

import pytest
import torch

from pyruntime import comm, explain, ops
from pyruntime.comm import CommTimeout, group_rank, group_size
from pyruntime.llama import Llama, LlamaConfig
from pyruntime.nn.cut import memory_of
from tests.cuda import cases
from tests.cuda.test_chunked import on_device
from tests.ops.test_primitives import assert_close, column_case, leaf, operand, row_case
from tests.transports import take

TIERS = ["fused", "chunked", "unfused"]


pytestmark = pytest.mark.usefixtures("host_kernels")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 41, 270])
@pytest.mark.second_tier(
    "41-dtype0-3",
    "41-dtype0-4",
    "41-dtype1-3",
    "41-dtype1-4",
    "270-dtype0-2",
    "270-dtype0-3",
    "270-dtype0-4",
    "270-dtype1-2",
    "270-dtype1-3",
    "270-dtype1-4",
)
def test_primitives_equal_exact_products(ranks, world, dtype, rows):
    seed = int(torch.randint(2**31, ()))
    for keep_gathered in (False, True):  # two weights, of which one has a bias
        ranks.run(
            on_device, world, column_case, seed, rows, 0, 7, 24, dtype, "fused", keep_gathered, True, False
        )
    ranks.run(on_device, world, row_case, seed, rows, 0, 136, 11, dtype, "fused", True)


def sequences_case(group, dtype):
    """Rows of several sequences side by side, [S, B, K] cut along S, and one sequence, [1, S, K] along 1."""
    rank, world_size = group_rank(group), group_size(group)
    generator = torch.Generator().manual_seed(8)
    for sizes, dim in (((3 * world_size, 5, 16), 0), ((1, 23, 16), 1)):
        x = operand(generator, dtype, *sizes)
        weight = operand(generator, dtype, world_size, 9, 16)
        own = leaf(weight[rank], dtype)
        shard = leaf(x.tensor_split(world_size, dim)[rank], dtype)
        y, gathered = ops.all_gather_matmul(shard, own, group, dim=dim, return_gathered=True, tier="fused")
        assert_close(y, x @ weight[rank].T, dtype, "y")
        assert torch.equal(gathered.double(), x)
        z = ops.matmul_reduce_scatter(y.detach(), own.detach().t(), group, dim=dim, tier="fused")
        parts = (x @ weight[r].T for r in range(world_size))
        exact = sum(part.to(dtype).double() @ weight[r] for r, part in enumerate(parts))
        assert_close(z, exact.tensor_split(world_size, dim)[rank], dtype, "z")


@pytest.mark.parametrize("world", [2, 3])
def test_dimensions_before_and_after_the_rows(ranks, world):
    ranks.run(on_device, world, sequences_case, torch.bfloat16)


def integers_case(group, tier_of_call, calls):
    return cases.integers_case(group, torch.device("cpu"), tier_of_call, calls)


def always_fused(rank, call):
    return "fused"


def always_chunked(rank, call):
    return "chunked"


def in_turn(rank, call):
    return TIERS[(rank + call) % 3]


def at_random(rank, call):
    return TIERS[int(torch.randint(3, (), generator=torch.Generator().manual_seed(100 * call + rank)))]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.second_tier("3", "4")
def test_ranks_may_take_different_tiers_and_get_the_same_bits(ranks, world):
    """Sums have the same order, parts are rounded alike, and signals and slots go on from call to call."""
    expected = ranks.run(on_device, world, integers_case, always_chunked, 9)
    for tiers in (always_fused, in_turn, at_random):
        for mine, theirs in zip(ranks.run(on_device, world, integers_case, tiers, 9), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), tiers.__name__


def steps_in_tier(group, sizes):
    return cases.steps_in_tier(group, torch.device("cpu"), "fused", sizes)


def random_case(group):
    generator = torch.Generator().manual_seed(group_rank(group))
    x = torch.randn(50, 40, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(56, 40, generator=generator).bfloat16().requires_grad_()
    y = ops.matmul_reduce_scatter(x, weight, group, tier="fused")
    z = ops.all_gather_matmul(y, weight.T.contiguous(), group, rows=50, tier="fused")
    z.square().sum().backward()
    return [y.detach(), z.detach(), x.grad, weight.grad]


def test_the_next_run_gives_the_same_bits(ranks):
    first, again = (ranks.run(on_device, 3, random_case) for _ in range(2))
    for mine, next_run in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, next_run, strict=True))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.second_tier("3")
def test_the_case_that_gpus_run(ranks, world):
    for errors in ranks.run(on_device, world, steps_in_tier, [(130, 40, 32), (3, 8, 72), (40, 77, 136)]):
        assert max(errors) < 1 + world, errors


# --- ranks that are late, or do not come


def late(group, op, seconds, deadline, tiers):
    """What the third call meets, to which rank 1 comes late."""
    comm.set_deadline(group, deadline)
    x, weight = torch.ones(6, 8).bfloat16(), torch.ones(16, 8).bfloat16()
    tier = tiers[group_rank(group) % len(tiers)]

    def call():
        if op == "all_gather_matmul":
            return ops.all_gather_matmul(x, weight, group, rows=6 * group_size(group), tier=tier)
        return ops.matmul_reduce_scatter(x, weight, group, tier=tier)

    expected = 8 if op == "all_gather_matmul" else 8 * group_size(group)
    try:
        for number in range(5):
            if number == 2 and group_rank(group) == 1:
                time.sleep(seconds)
            y = call()
            assert (y == expected).all() or deadline < seconds
        call()
    except CommTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.second_tier("all_gather_matmul")
def test_a_late_rank_does_no_harm(ranks, op):
    outcomes = ranks.launch(on_device, 3, late, op, 0.5, 30.0, TIERS)
    assert [outcome.value for outcome in outcomes] == ["", "", ""], outcomes


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.second_tier("matmul_reduce_scatter")
def test_a_rank_that_stays_away_is_named_on_all(ranks, op):
    outcomes = ranks.launch(on_device, 3, late, op, 4.0, 1.0, ["fused"])
    for outcome in outcomes:
        assert f"{op}, rank " in outcome.value, outcomes
        assert "waiting for rank 1 to send chunk 0 into slot" in outcome.value
        assert "the deadline has passed" in outcome.value


# --- which tier, and why not


def refusals_case(group):
    x, weight = torch.ones(2, 4, 16).bfloat16(), torch.ones(24, 16).bfloat16()
    calls = {
        "this is Float; use tier='auto' or 'chunked'": lambda tier: ops.all_gather_matmul(
            x[0].float(), weight.float(), group, tier=tier
        ),
        "lie in 2 blocks, and the fused kernels take one": lambda tier: ops.all_gather_matmul(
            x, weight, group, dim=1, tier=tier
        ),
        "cut 5 x 4 rows elsewhere": lambda tier: ops.matmul_reduce_scatter(
            torch.ones(5, 4, 16).bfloat16(), weight, group, tier=tier
        ),
        "rows of 9 elements travel": lambda tier: ops.matmul_reduce_scatter(
            x[0], weight[:9], group, tier=tier
        ),
        "no fused kernel computes it": lambda tier: ops.matmul_all_reduce(x, weight, group, tier=tier),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=f"tier='fused' was asked for .*{words}"):
            call("fused")
        assert torch.equal(torch.cat(flat(call("auto"))), torch.cat(flat(call("chunked"))))
    return ops.tier_of("all_gather_matmul", 8, 24, 16, torch.float32, group, "fused")


def flat(tensors):
    return [tensor.flatten() for tensor in (tensors if isinstance(tensors, list) else [tensors])]


def test_what_the_kernels_cannot_take_is_refused_by_name_and_left_out_of_auto(ranks):
    for tier, reason in ranks.run(on_device, 2, refusals_case):
        assert tier == "none"
        assert "fused: the fused kernels multiply bfloat16 and float16, and this is Float" in reason


def auto_case(group, dtype):
    def told(tier="auto"):
        return ops.tier_of("all_gather_matmul", 12, 5, 16, dtype, group, tier)

    x = torch.ones(12 // group_size(group), 16, dtype=dtype)
    weight = torch.ones(5, 16, dtype=dtype)
    assert (ops.all_gather_matmul(x, weight, group, rows=12) == 16).all()
    return told(), told("chunked"), told("fused")


def test_auto_is_chunked_and_fused_where_it_was_tuned_or_is_named(ranks):
    rule = "chunked is the rule where nothing was tuned (python -m pyruntime tune)"
    for auto, chunked, fused in ranks.run(on_device, 2, auto_case, torch.bfloat16):
        assert auto == ("chunked", rule)
        assert chunked == ("chunked", "tier='chunked' was asked for")
        assert fused == ("fused", "tier='fused' was asked for")
    for auto, _, _ in ranks.run(on_device, 2, auto_case, torch.float32):
        assert auto[0] == "chunked"
        assert "; fused: the fused kernels multiply bfloat16 and float16" in auto[1]


def on_symmetric_memory(group):
    x, weight = torch.ones(4, 16).bfloat16(), torch.ones(24, 16).bfloat16()
    with pytest.raises(ValueError, match=r"tier='fused' was asked for .*devices of one host only.*symmetric"):
        ops.matmul_reduce_scatter(x, weight, group, tier="fused")
    return ops.tier_of("matmul_reduce_scatter", 4, 24, 16, torch.bfloat16, group, "fused")[0]


def test_a_group_of_cpus_has_no_fused_kernels_and_says_so(ranks):
    ranks.run(take, 2, "symmetric_memory")
    assert ranks.run(on_symmetric_memory, 2) == ["none", "none"]


# --- a model


def llama_step(group, tier):
    """Loss, gradients and the tiers of a step of a small Llama in bf16."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = Llama(config, group, dtype=torch.bfloat16, tier=tier)
    ids = torch.randint(64, (3, 14), generator=torch.Generator().manual_seed(1))
    loss = model(ids, labels=ids)
    loss.backward()
    tiers = {row.tier for row in explain(model).rows if row.asked == tier}
    return float(loss.detach()), [memory_of(p.grad).float() for p in model.parameters()], tiers


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.second_tier("4")
def test_a_llama_steps_in_the_fused_tier(ranks, world):
    fused = ranks.run(on_device, world, llama_step, "fused")
    chunked = ranks.run(on_device, world, llama_step, "chunked")
    for (loss, grads, tiers), (expected_loss, expected, _) in zip(fused, chunked, strict=True):
        assert tiers == {"fused"}
        assert loss == pytest.approx(expected_loss, rel=1e-2)
        for grad, other in zip(grads, expected, strict=True):
            assert (grad - other).norm() <= 0.02 * other.norm() + 1e-4
