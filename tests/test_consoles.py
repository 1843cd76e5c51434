"""Commands on the pages run unchanged, and print the output shown below them, except numbers and blanks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in sorted((ROOT / "docs").glob("*/*.md")) if "```console" in page.read_text()]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]\d+)?%?")


def steps_of(page: Path) -> list[tuple[str, str]]:
    """Returns the page's steps in order: (file name, its text) or ("", a command and its output)."""
    steps = []
    for kind, title, text in BLOCK.findall(page.read_text()):
        if kind == "console":
            steps += [("", part) for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
        elif title:
            steps.append((title, text))
    return steps


def without_numbers(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def check_output(shown: list[str], printed: list[str], command: str) -> None:
    """Checks that each shown line follows the one before it, directly unless "..." is between them."""
    at, may_skip = 0, True
    lines = [without_numbers(line) for line in printed]
    for line in map(without_numbers, shown):
        if line == "...":
            may_skip = True
            continue
        rest = lines[at:] if may_skip else lines[at : at + 1]
        assert line in rest, f"{command}\ndoes not print\n{line}\nbut\n" + "\n".join(printed)
        at, may_skip = at + rest.index(line) + 1, False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.second_tier
def test_a_page_prints_what_it_shows(page, tmp_path):
    """`export` is handled here, because each command has a shell of its own."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    steps = steps_of(page)
    assert steps
    for name, text in steps:
        if name:
            (tmp_path / name).write_text(text)
            continue
        command, *shown = text.splitlines()
        if export := re.fullmatch(r"export (\w+)=(\S+)", command):
            environment[export[1]] = export[2]
            continue
        command = re.sub(r"^torchrun ", f"{sys.executable} -m torch.distributed.run ", command)
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        check_output(shown, done.stdout.splitlines(), command)
