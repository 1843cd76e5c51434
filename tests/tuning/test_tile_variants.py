"""Timing tile variants, with products of torch in place of those of a GPU."""

import time
import unittest.mock

import pytest
import torch

from pyruntime.cuda.library import CudaLibraryError
from pyruntime.tuning import tile_variants
from pyruntime.tuning.linears import RankLinear
from pyruntime.tuning.measure import Problem
from pyruntime.tuning.tile_variants import BUILT_IN, TimedVariants, time_variants

LINEAR = RankLinear("qkv", "all_gather_matmul", 20, 16, 24)


class Slow:
    """A product by torch that takes at least so long, and keeps what it wrote."""

    def __init__(self, layout: str, seconds: float, results: list[torch.Tensor]) -> None:
        self.layout, self.seconds, self.results = layout, seconds, results

    def matmul(self, a, b, c):
        time.sleep(self.seconds)
        torch.mm(a, b.t() if self.layout == "NT" else b, out=c)
        self.results.append(c)


def timed(group, when, quick):
    """What is timed where the tiles that are named so are quick, and rank 1 has no tiles of 256 rows."""
    problem = Problem(LINEAR, group, torch.bfloat16, torch.device("cpu"), group)
    results: list[torch.Tensor] = []

    def make(tiles, layout, dtype):
        if tiles.rows == 256 and group.rank() == 1:
            raise CudaLibraryError("no room.")
        return Slow(layout, 0.001 if str(tiles).startswith(quick) else 0.005, results)

    with unittest.mock.patch.object(tile_variants, "Variant", make):
        found = time_variants(problem, when, 3)
    exact = problem.x_whole @ problem.weight.t() if when == "forward" else problem.y_whole @ problem.weight
    assert all(torch.equal(result, exact) for result in results)
    return found, len(results)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_every_candidate_that_all_ranks_have_is_timed(ranks, when):
    first, second = ranks.run(timed, 2, when, "128x128, 2x2 warps, 3")
    assert first == second
    found, calls = first
    assert found.refused == {"256x128": "no room."} and set(BUILT_IN) < set(found.seconds)
    assert calls == 5 * len(found.seconds)  # twice to warm up, three rounds
    assert min(found.seconds, key=found.seconds.get) == "128x128"
    assert found.sentence().startswith(f"qkv {when}: of the tiles that are built in ")
    assert "; the variant 128x128 would take " in found.sentence()


def none_there(group):
    problem = Problem(LINEAR, group, torch.bfloat16, torch.device("cpu"), group)
    return time_variants(problem, "forward", 3)


def test_without_cupy_there_is_a_sentence(ranks):
    for found in ranks.run(none_there, 2):
        assert not found.seconds
        assert found.sentence().startswith("qkv forward: tile variants were not timed: tile variants ")


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (
            {"small": 0.002, "large": 0.001, "64x256": 0.0009},
            "large is the quickest, 1.000 ms; the variant 64x256",
        ),
        ({"small": 0.002, "large": 0.001, "64x256": 0.00098}, "large is the quickest, 1.000 ms"),
        ({"small": 0.001, "large": 0.002}, "small is the quickest, 1.000 ms"),
    ],
)
def test_a_variant_is_told_where_it_clearly_wins(seconds, sentence):
    told = TimedVariants("qkv forward", seconds, {}).sentence()
    assert sentence in told and ("the variant" in told) == ("the variant" in sentence)
