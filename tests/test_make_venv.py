"""The environment that make sets up: which torch is seen, and under which version pip knows it."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.make_venv import importable_torch


def packaged(folder: Path, version: str, for_pip: str) -> None:
    """A torch as a wheel leaves it."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = folder / f"torch-{for_pip}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {for_pip}\n")


def test_pip_is_told_the_version_that_it_knows(tmp_path, monkeypatch):
    """PyPI's wheels for CUDA say +cu130 when they are imported, and nothing of it to pip."""
    packaged(tmp_path, "2.13.0+cu130", "2.13.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert importable_torch(sys.executable) == ("2.13.0+cu130", "2.13.0", str(tmp_path))


def test_a_torch_that_does_not_import_is_none(tmp_path, monkeypatch):
    packaged(tmp_path, "2.13.0", "2.13.0")
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert importable_torch(sys.executable) is None
