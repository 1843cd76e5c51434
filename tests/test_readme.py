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


def test_the_readme_has_four_programs_and_shard_stands_first():
    assert len(programs()) == 4
    first_screen = README.read_text().splitlines()[:40]
    assert any("pyruntime.shard(" in line for line in first_screen)
    assert any("torchrun --nproc-per-node" in line for line in first_screen)


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, r"gradient norm \d+\.\d+"),
        (1, r"loss \d+\.\d+, gradient norm \d+\.\d+\n(.*\n)+.*replicated_matmul.* chunked"),
        (2, None),
        (3, r"gradient of its keys \d+\.\d+"),
    ],
)
def test_readme_program_runs_on_two_ranks(ranks, number, printed):
    outcomes = ranks.launch(run_program, 2, number, init=False)
    for rank in outcomes:
        assert rank.error is None and rank.exit_code == 0, rank.output
    if printed:
        assert re.search(printed, outcomes[0].output)
