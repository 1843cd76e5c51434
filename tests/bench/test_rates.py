"""bench/overlap/rates.py: its rates follow from ratios, it goes on where it stopped, its table says what the
benchmarks found; and what they hold a contender against follows the definitions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.common import limits
from bench.common.launch import shown
from bench.common.measuring import Sample
from bench.netlab.plan import parse_rate
from bench.overlap import rates
from tests.bench.netlab_runs import ROOT, on_a_network


def found(command: str, axis: str = "mlp", **others: float) -> dict:
    """As a benchmark writes it, for axes whose contender is "ours"."""
    seconds = {"T_g": 0.1, "T_c": 0.15, "loaded": 0.16, "ours": 0.168, "R": 1.12, "over_loaded": 1.05}
    figures = {name: {"median": value, "spread": 0.02} for name, value in (seconds | others).items()}
    held = figures | {"waits": {"median": 0.013, "spread": 0.5}, "sent_bytes": 2e6, "T_c_bytes": 1e6}
    peers = {"DTensor": {"median": 0.25, "spread": 0.01}}
    results = [{"limits": {rates.AXES[axis].ours: held}, "peers": peers}]
    return {"command": command, "facts": {"load_average_at_start": 0.5}, "results": results}


def test_at_the_rate_of_a_ratio_the_frames_of_the_bytes_take_that_long():
    computing_s, nbytes = 0.5, 12_345_678
    for ratio in (0.3, 1.0, 3.0):
        frames = nbytes / 1448 * 1514
        assert 8 * frames / parse_rate(rates.rate_of(ratio, computing_s, nbytes)) == pytest.approx(
            ratio * computing_s, rel=1e-3
        )
    with pytest.raises(ValueError, match=r"T_c / T_g = 3 takes links of 0\.\d+mbit .* ask for another ratio"):
        rates.rate_of(3.0, 1.0, 1000)


def test_rows_whose_turns_take_longer_have_fewer_rounds_but_a_median():
    assert [rates.rounds_of(ratio, 8) for ratio in (0.3, 1.0, 2.0, 3.0)] == [8, 8, 4, 3]
    assert [rates.rounds_of(ratio, 1) for ratio in (0.3, 3.0)] == [1, 1]


def test_what_was_measured_before_a_stop_is_not_measured_again(tmp_path, monkeypatch):
    file, ran = tmp_path / "deep" / "rates.json", []

    def run(command):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(shown(command))
        return found(ran[-1])

    def measure(rounds: int) -> list[str]:
        ran.clear()
        rates.measure("mlp", [0.5, 1.0, 2.0], 2, rounds, rates.Kept.read(file), tiny=True)
        return list(ran)

    monkeypatch.setattr(rates, "run", run)
    with pytest.raises(KeyboardInterrupt):
        measure(5)
    assert len(rates.Kept.read(file).runs["rows"]) == 2  # and the first run
    before = list(ran)
    assert len(measure(5)) == 1 and not set(ran) & set(before)
    rows = rates.Kept.read(file).runs["rows"]
    assert [row["ratio"] for row in rows] == [0.5, 1.0, 2.0]
    assert len({row["command"] for row in rows}) == 3
    assert measure(5) == []
    # Other rounds are another command: its rows take the place of those before.
    assert len(measure(4)) == 2  # three rounds are the least
    rows = sorted(rates.Kept.read(file).runs["rows"], key=lambda row: row["ratio"])
    assert [row["command"].split()[-1] for row in rows] == ["4", "4", "3"]


def test_the_table_has_a_row_for_each_rate_and_a_cell_for_each_figure():
    rows = [
        {"axis": axis, "hosts": hosts, "ratio": ratio, **found(f"python --rate {rate} -- x", axis)}
        for axis, hosts, ratio, rate in [
            ("ring", 4, 1.0, "77.0mbit"), ("tp", 2, 3.0, "5.5mbit"), ("tp", 2, 0.3, "9.1mbit"),
            ("mlp", 2, 1.0, "1.5mbit"),
        ]
    ]  # fmt: skip
    head, _, *lines = rates.table(rows).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [(line[0], line[1]) for line in cells] == [
        ("mlp", "1.5mbit"), ("tp", "9.1mbit"), ("tp", "5.5mbit"), ("ring, 4 hosts", "77.0mbit")
    ]  # fmt: skip
    names = head.strip("| ").split(" | ")
    row = dict(zip(names, lines[0].strip("|").split("|"), strict=True))
    assert {name: cell.strip() for name, cell in row.items()} == {
        "axis": "mlp", "rate": "1.5mbit", "T_c / T_g": "1.50", "alone": "100 ± 2%", "loaded": "160 ± 2%",
        "ours": "168 ± 2%", "ours / loaded": "1.05 ± 2%", "R": "1.12 ± 2%", "waits": "1.3%",
        "DDP": "", "FSDP2 zero 2": "", "FSDP2 zero 3": "", "DTensor": "250 ± 1%",
    }  # fmt: skip
    rows[0]["facts"] = {"load_average_at_start": 9.0}
    assert "Not to be relied on" in rates.table(rows)


def test_limits_are_those_of_a_rank_and_a_step(monkeypatch):
    """Alone computes what two ranks do, and there are four steps in a turn."""

    class Traffic:
        def __init__(self, nbytes: int) -> None:
            wanted.append(nbytes)

        def beside(self, work):
            return work

        def alone(self) -> None:
            pass

    wanted: list[int] = []
    monkeypatch.setattr(limits, "sent_by", lambda turn: 800_000)
    monkeypatch.setattr(limits, "Traffic", Traffic)
    monkeypatch.setattr(limits, "waits_of", lambda turn: Sample((0.02, 0.03, 0.01)))
    turns: dict = {"it": lambda: None, "whole": lambda: None}
    held = limits.Held(turns, "it", ["whole"], shares=2, steps=4)
    assert wanted == [1_600_000, 800_000]  # as many for each of what both compute
    samples = {
        "it": Sample((6.0, 9.0, 6.0)),
        "whole": Sample((8.0, 8.0, 8.0)),
        "whole, beside the bytes of it": Sample((10.0, 18.0, 11.0)),
        "the bytes of it": Sample((5.0, 5.0, 5.0)),
    }
    assert set(samples) == set(turns)
    got = held.limits(samples)
    assert [got.T_g.median, got.T_c.median, got.loaded.median, got.ours.median] == [1.0, 1.25, 1.375, 1.5]
    assert got.R.median == pytest.approx(6 / 5)
    assert got.over_loaded.median == pytest.approx(2 * 6 / 11)
    assert (got.waits.median, got.sent_bytes, got.T_c_bytes) == (0.02, 200_000, 200_000)
    samples["the bytes of it"] = Sample((1.0, 1.0, 1.0))
    assert held.limits(samples).R.median == pytest.approx(6 / 4)


@on_a_network
def test_one_command_finds_the_rate_and_measures_there_and_does_so_once(tmp_path):
    file = tmp_path / "rates.json"
    command = [sys.executable, "-m", "bench.overlap.rates", "--tiny", "--axes", "zero1", "--ratios", "1"]
    command += ["--rounds", "2", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (first,), (row,) = json.loads(file.read_text()).values()
    assert "--rate 1gbit" in first["command"] and "--peers --rounds" in first["command"]
    before = rates.limits_of("zero1", first)
    assert before["sent_bytes"] > limits.LEAST_BYTES
    rate = rates.rate_of(1.0, before["T_g"]["median"], before["T_c_bytes"])
    assert f"--rate {rate} " in row["command"]
    held = rates.limits_of("zero1", row)
    t_g, t_c, ours = (held[name]["median"] for name in ("T_g", "T_c", "ours"))
    assert held["R"]["median"] == pytest.approx(ours / max(t_g, t_c))
    assert held["sent_bytes"] == pytest.approx(before["sent_bytes"], rel=0.25)
    # What is in the burst passes at once.
    assert t_c > 0.5 * 8 * held["sent_bytes"] / parse_rate(rate)
    assert held["loaded"]["median"] >= 0.5 * max(t_g, t_c)
    assert 0 <= held["waits"]["median"] < 1
    assert set(row["results"][-1]["peers"]) == {"DDP", "FSDP2 zero 2", "FSDP2 zero 3"}
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| zero1 ")]
    assert rate in line and len(line.strip("|").split("|")) == len(rates.HEAD)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.stdout == done.stdout and not again.stderr
