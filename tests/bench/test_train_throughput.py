"""bench/training runs, its figures agree with each other, and it notices unequal work."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench.training import run as bench

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_all_variants_train_and_the_ratios_follow_from_their_rounds(tmp_path):
    file = tmp_path / "train.json"
    script = [sys.executable, "-m", "bench.training.run", "--json", str(file)]
    options = ["--shapes", "tiny", "--dtypes", "fp32", "--rounds", "2", "--seconds", "0.01"]
    done = subprocess.run(
        [*script, *options], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    lines = result["lines"]
    assert set(lines) == set(bench.TURNS)
    for name, line in lines.items():
        assert name in done.stdout
        assert len(line["rounds"]) == 2
        assert min(line["rounds"]) > 0
        assert line["tokens_per_second"] == pytest.approx(statistics.median(line["rounds"]))
        ratios = [a / b for a, b in zip(line["rounds"], lines[bench.LIMIT]["rounds"], strict=True)]
        assert line["of_limit"] == pytest.approx(statistics.median(ratios))
    assert result["targets"] == []


class FakeTeam:
    def __init__(self, turns: list) -> None:
        self._turns = turns

    def order(self, steps: int, start: float) -> None:
        pass

    def turns(self, timeout_s: float) -> list:
        return self._turns


def test_variants_whose_losses_differ_are_refused():
    def turn(loss: float):
        return bench.Turn(start=0.0, end=2.0, cpu_s=1.0, loss=loss)

    teams = {bench.PLAIN: FakeTeam([turn(7.6)]), bench.TP: FakeTeam([turn(7.6004), turn(7.5996)])}
    assert bench.warm_up(teams, tolerance=1e-3, timeout_s=1.0) == 2.0
    for wrong in (7.61, float("nan")):
        teams[bench.TP] = FakeTeam([turn(7.6), turn(wrong)])
        with pytest.raises(RuntimeError, match=r"pyruntime tp=2, rank 1: the loss of step 1"):
            bench.warm_up(teams, tolerance=1e-3, timeout_s=1.0)


def test_a_team_is_as_fast_as_its_slowest_rank_and_teams_add_up():
    def turn(seconds: float):
        return bench.Turn(start=1.0, end=1.0 + seconds, cpu_s=1.0, loss=1.0)

    tokens = bench.SHAPES["tiny"].tokens_per_step
    measured = bench.tokens_per_second(bench.SHAPES["tiny"], 2, [[turn(1.0), turn(2.0)], [turn(4.0)]])
    assert measured == pytest.approx(2 * tokens / 2.0 + 2 * tokens / 4.0)


def test_targets_say_what_was_met():
    sample = bench.Sample
    samples = {bench.LIMIT: sample((100.0, 200.0)), bench.TP: sample((94.0, 188.0))}
    samples |= {bench.SOLO: sample((60.0, 66.0)), bench.PLAIN_KEPT: sample((50.0, 60.0))}
    limit, plain, aim = bench.targets("dim1024", samples)
    assert (limit["reached"], limit["least"], limit["met"]) == (pytest.approx(0.94), 0.93, True)
    assert (plain["reached"], plain["met"]) == (pytest.approx(1.15), True)
    assert (aim["reached"], aim["met"]) == (pytest.approx(1.15), False)
