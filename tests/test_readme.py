"""The programs in the README and in docs/how-to/torch-symm-mem.md run as they stand there."""

from __future__ import annotations

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
