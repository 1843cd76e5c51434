"""The programs in the README run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run_program(_group, number: int) -> None:
    exec(compile(programs()[number], f"README program {number}", "exec"), {})


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links and all((README.parent / link).is_file() for link in links)


def test_the_readme_has_four_programs():
    assert len(programs()) == 4


@pytest.mark.parametrize(
    ("number", "printed"), [(0, r"replicated_matmul.* chunked"), (1, None), (2, None), (3, None)]
)
def test_readme_program_runs_on_two_ranks(ranks, number, printed):
    outcomes = ranks.launch(run_program, 2, number, init=False)
    for rank in outcomes:
        assert rank.error is None and rank.exit_code == 0, rank.output
    if printed:
        assert re.search(r"loss \d+\.\d+, gradient norm \d+\.\d+", outcomes[0].output)
        assert re.search(printed, outcomes[0].output)
