"""Training on a mesh is training on one rank: some of the combinations of `make test-parity`, with planted
mistakes that must be found."""

from unittest.mock import patch

import pytest

from pyruntime import ops
from pyruntime.context import Context
from pyruntime.nn.linear import ParallelLinear
from tests.train import jobs
from tools import check_parity as parity
from tools.check_parity import Case

FEW = [
    Case(tp=4),
    Case(cp=4, zero=3),
    Case(dp=4, zero=0),
    Case(dp=4, zero=2),
    Case(dp=4, zero=3),
    Case(tp=2, dp=2, zero=3),
    Case(tp=2, cp=2, zero=1),
    Case(cp=2, dp=2, zero=2),
    Case(pp=4, schedule="interleaved"),
    Case(pp=4, schedule="zb-h1"),
    Case(pp=4, schedule="zb-v"),
    Case(tp=2, pp=2, schedule="1f1b"),
    Case(pp=2, dp=2, zero=1, schedule="zb-h1"),
    Case(pp=2, dp=2, zero=3, schedule="zb-v"),
    Case(pp=2, dp=2, zero=3, schedule="interleaved"),
    Case(cp=2, pp=2, zero=2, schedule="seq1f1b"),
    Case(tp=2, cp=2, dp=2, zero=2),
    Case(tp=2, pp=2, dp=2, zero=3, schedule="zb-h1"),
    Case(cp=2, pp=2, dp=2, zero=3, schedule="seq1f1b"),
    Case(y=4),
    Case(tp=2, y=2),
    Case(y=2, z=2),
    Case(y=2, cp=2),
    Case(y=2, dp=2, zero=2),
    Case(y=2, pp=2, schedule="seq1f1b"),
    Case(tp=2, y=2, z=2),
    Case(y=2, z=2, dp=2),
]
"""Of four ranks and eight."""


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A job, and what one rank makes of it."""
    config = parity.job(tmp_path_factory.mktemp("whole"))
    jobs.prepare(config)
    return config, ranks.run(steps_of, 1, parity.config_of(Case(), config))[0]


def steps_of(group, config):
    return parity.steps_of(jobs.runtime(group, config), config)


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.second_tier(but=["pp4 zero0 interleaved"])
def test_losses_and_norms_are_those_of_one_rank(ranks, whole, case):
    config, expected = whole
    assert parity.refusal(case, config) == ""
    found = ranks.run(steps_of, case.ranks, parity.config_of(case, config))
    assert found[0] == found[-1]
    assert parity.difference(found[0], expected) <= parity.TOLERANCE


def without_the_sum_of_norms_gradients(group, config):
    """Those stay of a rank's own tokens."""
    with patch.object(ops, "replicate_grad", lambda weights, _: weights):
        return steps_of(group, config)


def with_the_loss_counted_twice(group, config):
    """A context rank's labels are taken for all."""
    with patch.object(Context, "sum", lambda _, count: count):
        return steps_of(group, config)


def without_sums_over_y(group, config):
    """A rank takes its features of the stream for all of them."""
    no_group = property(lambda _: "", lambda *_: None)
    with patch.object(ParallelLinear, "_sums", no_group, create=True):
        return steps_of(group, config)


def without_clipping_on_a_stage(group, config):
    if jobs.runtime(group, config).coordinate.pp == 1:
        config = jobs.changed(config, "optimizer", clip_grad_norm=0.0)
    return steps_of(group, config)


@pytest.mark.parametrize(
    ("case", "mistaken"),
    [
        (Case(tp=4), without_the_sum_of_norms_gradients),
        (Case(tp=2, cp=2), with_the_loss_counted_twice),
        (Case(tp=2, y=2), without_sums_over_y),
        (Case(tp=2, pp=2, schedule="1f1b"), without_clipping_on_a_stage),
    ],
)
@pytest.mark.second_tier
def test_a_mistake_is_found(ranks, whole, case, mistaken):
    config, expected = whole
    found = ranks.run(mistaken, case.ranks, parity.config_of(case, config))
    assert parity.difference(found[0], expected) > 3 * parity.TOLERANCE


def test_every_mesh_is_among_the_combinations():
    every = list(parity.all_cases())
    cases = [case for case in every if not case.is_grid]
    meshes = {(case.tp, case.cp, case.pp, case.dp) for case in cases}
    assert len(meshes) == 31 and len(cases) == 17 * 4 + 14 * 4 * len(parity.SCHEDULES)
    # Of 2, 4 and 8 ranks there are 3, 6 and 10 triples, 16 with more than x alone.
    assert len(list(parity.grids())) == 16
    assert len(set(every)) == len(every) and set(FEW) <= set(every)


def test_a_page_says_what_is_not_equal():
    results = [
        parity.Result(Case(tp=2), 2e-6),
        parity.Result(Case(tp=2, zero=1), refused="Not so."),
        parity.Result(Case(pp=2, dp=2, zero=3, schedule="zb-v"), 0.5),
        parity.Result(Case(pp=2, dp=2, schedule="zb-v"), failed="PeerLost: rank 1 has ended."),
    ]
    page = parity.page(results, 90.0)
    assert "4 combinations of 2 meshes" in page.replace("\n", " ")
    assert "**1 equal, 1 refused, 2 wrong.**" in page.replace("\n", " ")
    assert "| tp2 | 2e-06 | refused: zero 1 |" in page
    assert "| pp2 dp2 | wrong: zero 3, zero 0 |" in page
    assert (
        "| Not so. | 1: tp2 zero1 |" in page
        and "| PeerLost: rank 1 has ended. | 1: pp2 dp2 zero0 zb-v |" in page
    )
