"""Everything that the Dockerfiles name exists. hadolint checks their quality (`make lint`),
tests/test_sdist.py whether what they copy can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from pyruntime.cli.main import COMMANDS
from tools.torch_versions import is_known

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(ROOT.glob("docker/*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_it_names_is_there(file):
    text = file.read_text()
    assert f"-f docker/{file.name} ." in text
    for page in re.findall(r"\bdocs/[\w/-]+\.md", text):
        assert (ROOT / page).is_file()
    for extra in re.findall(r"/src\[(\w+)\]", text):
        assert extra in EXTRAS
    versions = re.findall(r"torch==(\d+\.\d+\.\d+)|pytorch_release_(\d+\.\d+\.\d+)", text)
    assert versions and all(is_known(one or other) for one, other in versions)
    (command,) = re.findall(r'^CMD \["python", "-m", "pyruntime", "(\w+)"\]$', text, re.M)
    assert command in COMMANDS


def test_there_is_one_for_each_kind_of_machine():
    assert [file.name.removesuffix(".Dockerfile") for file in FILES] == ["cpu", "cuda", "rocm"]
