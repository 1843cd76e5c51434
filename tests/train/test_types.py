"""`train.check_types` finds what the parity check's planted mistakes do, and raises nothing without them."""

import re
from unittest.mock import patch

import pytest
import torch

from pyruntime import ops
from pyruntime.context import Context
from pyruntime.ops.placements import PlacementCheck, PlacementError
from tests.train import jobs
from tests.train.test_parity import (
    with_the_loss_counted_twice,
    without_clipping_on_a_stage,
    without_the_sum_of_norms_gradients,
)
from tools import check_parity as parity
from tools.check_parity import Case

RIGHT = [
    Case(tp=2, cp=2),
    Case(tp=2, pp=2, schedule="1f1b"),
    Case(cp=2, pp=2, schedule="seq1f1b"),
    Case(dp=4, zero=0),
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    config = parity.job(tmp_path_factory.mktemp("types"))
    config = jobs.changed(config, "train", check_types=True, activation_checkpointing="selective")
    jobs.prepare(config)
    return config


def steps_of(group, config):
    return parity.steps_of(jobs.runtime(group, config), config)


@pytest.mark.parametrize("case", RIGHT, ids=str)
@pytest.mark.second_tier(but=["tp2 pp2 zero0 1f1b"])
def test_what_is_right_passes_and_is_bitwise_what_it_was(ranks, checked, case):
    config = parity.config_of(case, checked)
    plain = jobs.changed(config, "train", check_types=False)
    assert ranks.run(steps_of, case.ranks, config) == ranks.run(steps_of, case.ranks, plain)


def with_a_backward_that_sums_nothing(group, config):
    """Typed as if it summed."""

    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weights):
            return weights.view_as(weights)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    mark = PlacementCheck.mark

    def replicate_grad(weights, _):
        cast = Cast.apply(weights)
        for mode in torch.overrides._get_current_function_mode_stack():
            mark(mode, cast, tp="sharded", cp="sharded")
        return cast

    with patch.object(ops, "replicate_grad", replicate_grad):
        return steps_of(group, config)


def with_a_sum_too_many(group, config):
    """Over the context, of what is the same already."""
    whole = Context.sum
    with patch.object(Context, "sum", lambda context, count: count * whole(context, count)):
        return steps_of(group, config)


@pytest.mark.parametrize(
    ("case", "mistaken", "words"),
    [
        (Case(tp=4), without_the_sum_of_norms_gradients, "norm.weight.*pass it through replicate_grad"),
        (Case(tp=2, cp=2), with_the_loss_counted_twice, "clamp was given .*partial.* over the axis cp"),
        (Case(tp=2, cp=2), with_a_sum_too_many, "over the axis cp|The loss is"),
        (
            Case(tp=2, pp=2, schedule="1f1b"),
            without_clipping_on_a_stage,
            "optimizer.clip_grad_norm differs between ranks",
        ),
        (Case(tp=4), with_a_backward_that_sums_nothing, "norm.weight is replicated over group"),
    ],
)
@pytest.mark.second_tier(but=["case4-with_a_backward_that_sums_nothing-norm.weight is replicated over group"])
def test_a_mistake_is_found_in_the_first_step(ranks, checked, case, mistaken, words):
    errors = ranks.run(mistaken, case.ranks, parity.config_of(case, checked), expect_errors=True)
    assert all(isinstance(error, PlacementError) for error in errors), errors
    assert all(re.search(words, str(error)) for error in errors), errors


def over_two_ranks():
    check = PlacementCheck({"tp": ["group"]})
    rows, weight = torch.randn(4, 3), torch.randn(3, requires_grad=True)
    check.mark(rows, tp="sharded")
    check.mark(weight, "norm.weight")
    return check, rows, weight


def test_a_partial_sum_may_only_be_added_and_scaled():
    check, rows, _ = over_two_ranks()
    with check:
        total = rows.square().sum()
        assert check.of(total, "tp") == "partial"
        assert check.of(total.double().view(1)[0] / 3 + total, "tp") == "partial"
        for wrong in (lambda: total.sqrt(), lambda: total * total, lambda: 1 / total, lambda: rows * total):
            with pytest.raises(PlacementError, match="has not been taken"):
                wrong()
        with pytest.raises(PlacementError, match="has not been taken"):
            total + 1
    assert float(total.sqrt()) > 0  # outside nothing is checked


def test_a_weight_that_meets_rows_says_its_name():
    check, rows, weight = over_two_ranks()
    with check:
        with pytest.raises(PlacementError, match=r"norm\.weight \[3\] \(replicated\)"):
            rows * weight
        with torch.no_grad():
            assert check.of(rows * weight, "tp") == "sharded"
