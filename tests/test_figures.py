"""Numbers on the pages of figures are those of the result files that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.overlap.rates import cells

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FIGURES = ROOT / "docs" / "figures"
AXES = {
    "mlp": "mlp",
    "tp": "tp",
    "tp, 2 slices": "tp-slices",
    "cp": "cp",
    "ZeRO 1": "zero1",
    "ZeRO 3": "zero3",
    "ring, 4 hosts": "ring",
}


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell, without bold."""
    text = (FIGURES / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n|---")[2]
    lines = text.partition("\n\n")[0].replace("**", "").splitlines()[1:]
    table = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return {first: others for first, *others in table}


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def test_the_parts_of_a_gain_are_those_of_the_comparison():
    (found,) = (
        each
        for each in json.loads((RESULTS / "compare.json").read_text())["linear"]["1gbit"]["results"]
        if each["direction"] == "forward_backward"
    )
    shown = rows("results.md", "Against what people use")
    times = {"DTensor": "T_dtensor", "pyruntime, unfused": "T_u", "pyruntime": "T_o"}
    times |= {"GEMMs alone, no communication": "T_g"}
    assert {name: row[0] for name, row in shown.items()} == {
        name: ms(found[key]) for name, key in times.items()
    }
    gloo = sorted(found["rounds"]["collective gloo"])[2]
    assert f"({ms(found['T_c'])} ms where gloo's take {ms(gloo)})" in shown["pyruntime, unfused"][1]
    hidden = int(ms(found["T_u"])) - int(ms(found["T_o"]))
    assert shown["pyruntime"][1] == f"overlap: {hidden} ms of {ms(found['T_c'])} are gone"


def test_every_axis_at_equality_is_that_of_the_rates():
    kept = json.loads((RESULTS / "overlap" / "rates.json").read_text())["rows"]
    measured = {each["axis"]: cells(each) for each in kept if each["ratio"] == 1}
    shown = rows("results.md", "Every axis at every rate")
    assert shown.keys() == AXES.keys()
    for name, (share, time, over_loaded, ratio, waits, peers) in shown.items():
        row = [cell.partition(" ±")[0] for cell in measured[AXES[name]]]
        assert [share, time, over_loaded, ratio] == [f"{float(row[2]):.2f}", row[5], row[6], row[7]], name
        assert waits == f"{float(row[8].rstrip('%')):.0f} %", name
        assert all(time in row[9:] for time in re.findall(r"\d{3,}", peers)), name


@pytest.mark.parametrize("rate", ["10gbit", "3gbit", "1gbit", "300mbit", "100mbit"])
def test_co2_is_that_of_its_runs(rate):
    (run,) = json.loads((RESULTS / "thin" / f"dim1024_{rate}.json").read_text())["results"]
    found = {line["name"]: line for line in run["lines"]}
    spelled = rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    shown = rows("slow-network-and-planning.md", "CO2 by the rate of the link")[spelled]
    times = [ms(found[name]["step_s"]) for name in ("CO2", "zero 1", "DDP")]
    assert [shown[0], shown[2], *shown[4:]] == [str(run["tau"]), *times]
    assert float(shown[3]) == pytest.approx(found["CO2"]["of_loaded"], abs=0.5 * 10 ** -len(shown[3][2:]))
