"""Loads pages in a headless browser, so that their JavaScript has run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needed = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium was not found; `tools/get_tool.sh chromium` installs it"
)


def document(address: str | Path, profile: Path) -> str:
    """Returns the final document of a page, at a path or a URL. profile: a folder for the browser's files."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--window-size=390,800"]  # a phone's
    command = [CHROMIUM, *options, f"--user-data-dir={profile}", "--dump-dom", str(address)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout
