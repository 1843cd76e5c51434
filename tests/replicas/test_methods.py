"""Methods as data: what fits together, how layers are dealt out, what the penalty promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyruntime.plan.co2 import TAUS, least_tau, usual_tau
from pyruntime.replicas import METHODS, Method, co2, diloco, gap_penalty, local_sgd, streaming_diloco
from pyruntime.replicas.methods import fragments_of

POSITIVE = st.floats(1e-6, 1e6)


@given(POSITIVE, POSITIVE, st.floats(1e-3, 1e3))
def test_the_penalty_is_one_without_a_gap_grows_with_it_and_has_no_scale(gap, reach, scale):
    assert gap_penalty(0.0, reach) == 1.0 == gap_penalty(0.0, 0.0)
    assert gap_penalty(2 * gap, reach) > gap_penalty(gap, reach) > 1.0
    assert gap_penalty(scale * gap, scale * reach) == pytest.approx(gap_penalty(gap, reach))
    assert gap_penalty(gap, 0.0) == math.inf


@given(POSITIVE, POSITIVE)
def test_tau_hides_the_exchange_and_one_less_does_not(exchange, step):
    least = least_tau(exchange, step)
    rounded = 1 + 1e-9
    assert least == 1 or (least * step * rounded >= exchange > (least - 1) * step / rounded)
    assert usual_tau(least) >= least and (usual_tau(least) in TAUS or least > TAUS[-1])


def test_layers_are_dealt_out_in_turn_with_what_is_before_and_after_them():
    names = ["embed.weight", "layers.0.up", "layers.0.down", "layers.1.up", "layers.2.up", "norm", "head"]
    assert fragments_of(names, 2) == [0, 0, 0, 1, 0, 0, 0]
    assert fragments_of(names, 3) == [0, 0, 0, 1, 2, 2, 2]
    assert set(fragments_of(names, 1)) == {0}


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_fragments_meet_at_different_steps_and_each_once_a_round(fragments):
    method = streaming_diloco(tau=7, fragments=fragments)
    first = [method.length(7, number) for number in range(fragments)]
    assert len(set(first)) == fragments and min(first) >= 1 and max(first) == 7


def test_every_method_is_made_by_its_name():
    for name, make in METHODS.items():
        assert make(tau=12).name == name
    assert co2().tau == "auto" and co2().restarts
    assert not local_sgd(3).restarts


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tau": 0}, 'tau=0 must be at least 1, or "auto".'),
        ({"tau": True}, "tau=True must be"),
        ({"tau": 3, "lr": 0.0}, "lr=0.0 must be a positive finite number."),
        ({"tau": 3, "lr": math.nan}, "lr=nan must be"),
        ({"tau": 3, "momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1."),
        ({"tau": 3, "pull": 0.0}, "pull=0.0 must be above 0 and at most 1."),
        ({"tau": 3, "clip": 0.0}, "clip=0.0 must be above 0; leave it out for none."),
        ({"tau": 3, "delay": 3}, "delay=3 must be at least 0 and below tau=3."),
        ({"tau": 3, "fragments": 4}, "fragments=4 meet in turn within tau=3 steps; use no more than tau."),
        ({"tau": "auto"}, 'tau="auto" finds the shortest round that hides one exchange'),
        ({"tau": 3, "penalty": gap_penalty}, "A penalty needs displacements that are a round old"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")) as refusal:
        Method("mine", **settings)
    assert "\n" not in str(refusal.value)


def test_diloco_waits_for_its_average():
    assert diloco(5).delay == 0 and diloco(5).nesterov
