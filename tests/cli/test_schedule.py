"""`python -m pyruntime schedule` shows, writes and reads schedules."""

import re

import pytest

from pyruntime.cli import main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


def test_a_schedule_is_drawn_and_measured(capsys):
    assert main(["schedule", "--kind", "zb-h1", "--stages", "4", "--micro-batches", "8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 0  F0F1F2F3      B0--F4")
    assert "makespan     27 s\nclosed form  3 s of bubble on every rank\n" in shown
    rows = re.findall(r"^ +(\d) +3 +11\.1% +\d +(\d)$", shown, flags=re.MULTILINE)
    assert rows == [("0", "4"), ("1", "3"), ("2", "2"), ("3", "1")]


def test_micro_batches_that_skip_stages_are_drawn_and_named(capsys, tmp_path):
    table = tmp_path / "schedule.csv"
    made = ["schedule", "--stages", "4", "--micro-batches", "4", "--skip", "1", "--csv", str(table)]
    assert main(made) == 0
    first = capsys.readouterr().out
    assert "makespan     18 s\nstages of the micro-batches  0-1-3 0-1-3 0-2-3 0-2-3\n" in first
    assert "closed form" not in first
    assert main(["schedule", "--from-csv", str(table)]) == 0
    assert capsys.readouterr().out == first
    assert main([*made, "--kind", "zb-h1"]) == 2
    assert "zb-h1 takes every micro-batch through all stages" in capsys.readouterr().err


def test_micro_batches_that_are_routed_by_speed_are_drawn_and_named(capsys, tmp_path):
    table, speeds = tmp_path / "schedule.csv", ["--speeds", "1", "0.5", "1", "1"]
    made = ["schedule", "--stages", "2", "--micro-batches", "6", *speeds, "--csv", str(table)]
    assert main(made) == 0
    first = capsys.readouterr().out
    assert "1f1b: 4 rank(s), 4 stage(s), 6 micro-batch(es), 1 slice(s)\nmakespan     15 s\n" in first
    assert "stages of the micro-batches  0-2 0-3 1-2 0-3 0-2 1-3\n" in first
    assert main(["schedule", "--from-csv", str(table), *speeds]) == 0
    assert capsys.readouterr().out == first
    assert main(["schedule", "--stages", "2", "--speeds", "1", "1", "1"]) == 2
    assert "speeds=[1.0, 1.0, 1.0] of 2 stages must be positive numbers" in capsys.readouterr().err


def test_a_schedule_without_formula_shows_none(capsys):
    assert main(["schedule", "--transfer", "0.5"]) == 0
    assert "closed form" not in capsys.readouterr().out


def test_files_are_written_and_read_again(capsys, tmp_path):
    table, plot = tmp_path / "schedule.csv", tmp_path / "schedule.png"
    made = ["schedule", "--kind", "seq1f1b", "--stages", "2", "--micro-batches", "3", "--slices", "2"]
    assert main([*made, "--csv", str(table), "--plot", str(plot)]) == 0
    first = capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["schedule", "--from-csv", str(table)]) == 0
    assert capsys.readouterr().out == first


def test_a_table_that_cannot_run_is_refused(capsys, tmp_path):
    table = tmp_path / "broken.csv"
    table.write_text("kind,mine,micro_batches,1,slices,1,placement,0\nB0.0,F0.0\n")
    assert main(["schedule", "--from-csv", str(table)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "pyruntime: Deadlock: rank 0 waits at B0.0 for its own F0.0.\n"
    table.write_text("kind,mine,micro_batches,1,slices,1,placement,0\nF0.0,B0.x\n")
    assert main(["schedule", "--from-csv", str(table)]) == 2
    assert f"pyruntime: --from_csv {table}: line 2, cell 2: B0.x is no action;" in capsys.readouterr().err
