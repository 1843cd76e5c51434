"""The scripts of examples/ run unchanged on two ranks, one after the other in one launch, and print right
results."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch._utils

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {path.stem: path for path in sorted(ROOT.glob("examples/*.py"))}
MOST_LINES = {name: 60 if name == "sft" else 12 for name in EXAMPLES}
NUMBER = r"(\d+\.\d+(?:e-\d+)?)"


def code_lines(path: Path) -> list[str]:
    """Returns the lines of a script without docstring, imports and blank lines."""
    tree = ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return [line for line in lines if line.strip()]


def run_all(_group) -> dict[str, str]:
    """Returns {example: its output}."""
    printed = {}
    for name, path in EXAMPLES.items():
        sys.argv = [str(path)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(path), run_name="__main__")
        printed[name] = out.getvalue()
    return printed


@pytest.fixture(scope="module")
def printed(ranks) -> list[dict[str, str]]:
    """The outputs of the examples, by rank."""
    outcomes = ranks.launch(run_all, 2, init=False, timeout=180)
    for rank in outcomes:
        assert rank.error is None and rank.exit_code == 0, f"{rank.error}\n{rank.output}"
    return [rank.value for rank in outcomes]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_to_run_it(name):
    path = EXAMPLES[name]
    assert len(code_lines(path)) <= MOST_LINES[name]
    assert f"torchrun --nproc-per-node 2 examples/{path.name}" in ast.get_docstring(
        ast.parse(path.read_text())
    )


def test_the_page_names_every_example():
    linked = re.findall(r"\]\((\w+)\.py\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(linked) == list(EXAMPLES)


@pytest.mark.parametrize("name", ["primitives", "ring_attention"])
@pytest.mark.second_tier("primitives")
def test_what_ranks_compute_together_is_the_whole(printed, name):
    for rank, said in enumerate(printed):
        (off,) = re.findall(rf"^rank {rank}: .* off by {NUMBER}\n$", said[name])
        assert float(off) < 1e-5


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("parallelize", rf"rank {{rank}}, step {{step}}: loss {NUMBER}, gradient norm \d+\.\d+"),
        ("linears", rf"rank {{rank}}, step {{step}}: up \[128, 64\], loss of own rows {NUMBER}"),
        (
            "data_parallel",
            rf"rank {{rank}}, step {{step}}: loss of own data {NUMBER}, gradient norm \d+\.\d+",
        ),
        ("sft", rf"rank {{rank}}, step {{step}}: loss {NUMBER} of 39 tokens, gradient norm \d+\.\d+"),
    ],
)
def test_losses_fall(printed, name, line):
    for rank, said in enumerate(printed):
        lines = said[name].splitlines()
        losses = [float(re.fullmatch(line.format(rank=rank, step=step), lines[step])[1]) for step in range(3)]
        assert losses[0] > losses[1] > losses[2] and len(lines) == 3


def test_the_last_stage_has_the_losses(printed):
    first, last = (said["pipeline"] for said in printed)
    lines = re.findall(r"^step (\d): losses (.+)$", last, re.M)
    losses = [ast.literal_eval(each) for _, each in lines]
    assert not first and [step for step, _ in lines] == ["0", "1", "2"]
    assert [len(each) for each in losses] == [4] * 3 and sum(losses[0]) > sum(losses[1]) > sum(losses[2])


def test_the_ledger_is_closed(printed):
    said, other = (said["ledger"] for said in printed)
    shares = [float(share) for share in re.findall(r" ms +(\d+\.\d)%$", said, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.5) and not other
    assert re.search(r"^tp +[1-9]\d* +\d", said, re.M)  # chunks that were read
    page = Path(said.splitlines()[-1]).read_text()
    assert "2 ranks: tp 2" in page and "% of a step is exposed" in page


def test_merged_adapters_have_learned(printed):
    losses = [float(re.fullmatch(rf"rank \d: loss {NUMBER} with .*\n", said["lora"])[1]) for said in printed]
    assert losses[0] == losses[1] < 6.8  # the logarithm of 1000 words is 6.9


def test_the_program_for_torchtitan_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch._utils, "_get_available_device_type", torch._utils._get_available_device_type)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(SystemExit, match=r"^torchtitan is not installed: run the two lines of pip in README"):
        runpy.run_path(str(ROOT / "examples" / "torchtitan" / "train.py"), run_name="__main__")
