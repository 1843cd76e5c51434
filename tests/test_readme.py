"""The programs in the README and in docs/how-to/torch-symm-mem.md run unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "how-to" / "torch-symm-mem.md")


def programs() -> list[str]:
    texts = (page.read_text() for page in PAGES)
    return [
        program for text in texts for program in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    ]


def run_program(_group, number: int) -> None:
    exec(compile(programs()[number], f"program {number}", "exec"), {})


def test_the_readme_has_one_short_program():
    assert len(programs()) == 2
    program = programs()[0]
    assert "pyruntime.parallelize(" in program
    assert len([line for line in program.splitlines() if line and not line.startswith("import")]) <= 10


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, r"gradient norm \d+\.\d+\n(.*\n)+.*matmul_reduce_scatter.*"),
        (1, r"rank 0: [1-9]\d* ops have run on our engines"),
    ],
)
@pytest.mark.second_tier("1-rank 0: [1-9]\\\\d* ops have run on our engines")
def test_program_runs_on_two_ranks(ranks, number, printed):
    outcomes = ranks.launch(run_program, 2, number, init=False, timeout=120)
    for rank in outcomes:
        assert rank.error is None and rank.exit_code == 0, rank.output
    assert re.search(printed, outcomes[0].output)


def test_the_two_parts_of_a_gain_are_those_of_the_last_run():
    found = json.loads((ROOT / "bench" / "results" / "compare.json").read_text())["linear"]["1gbit"][
        "results"
    ]
    dtensor, unfused, overlapped = (round(found[-1][name] * 1e3) for name in ("T_dtensor", "T_u", "T_o"))
    assert (
        f"takes {dtensor} ms with DTensor, {unfused} ms with pyruntime's overlap switched off, and "
        f"{overlapped} ms with it on."
    ) in " ".join(PAGES[0].read_text().split())


def test_steps_that_the_page_of_zero_tells_are_in_the_table_of_the_readme():
    told = re.findall(r"\b(\d{3,4})(?= ms| and \d+ ms)", (ROOT / "docs" / "how-to" / "zero.md").read_text())
    assert len(told) == 3 and all(f"| {number} |" in PAGES[0].read_text() for number in told)
