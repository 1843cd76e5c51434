"""The environment that make sets up: which torch it uses, and the version of it that pip knows."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools import python_headers
from tools.make_venv import importable_torch, put_torchrun

pytestmark = pytest.mark.second_tier


def packaged(folder: Path, version: str, for_pip: str) -> None:
    """Writes a torch as a wheel installs it."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = folder / f"torch-{for_pip}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {for_pip}\n")


def test_pip_is_told_the_version_that_it_knows(tmp_path, monkeypatch):
    """PyPI's wheels for CUDA have a version with +cu130 when imported, and without it in pip."""
    packaged(tmp_path, "2.13.0+cu130", "2.13.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert importable_torch(sys.executable) == ("2.13.0+cu130", "2.13.0", str(tmp_path))


def test_a_torch_that_does_not_import_is_none(tmp_path, monkeypatch):
    packaged(tmp_path, "2.13.0", "2.13.0")
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert importable_torch(sys.executable) is None


def test_torchrun_of_an_environment_whose_torch_is_an_outer_ones_starts_its_python(tmp_path):
    folder = tmp_path / "a place" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\n')
    python.chmod(0o755)
    put_torchrun(str(python))
    started = subprocess.run(
        [folder / "torchrun", "--nproc-per-node", "2", "a b.py"], capture_output=True, text=True
    )
    assert started.stdout == f"{python}|-m|torch.distributed.run|--nproc-per-node|2|a b.py|"
    (folder / "torchrun").write_text("torch's own")
    put_torchrun(str(python))
    assert (folder / "torchrun").read_text() == "torch's own"


def test_a_python_without_headers_is_refused_in_a_sentence(tmp_path, monkeypatch):
    python_headers.refuse_without()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"has no C headers \(no Python.h in .*apt-get install python3.*-dev`\.$"
    ):
        python_headers.refuse_without()
