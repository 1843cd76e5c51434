"""Runs pytest on a file of tests in a separate session, with one of our plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT


def run_pytest(folder: Path, plugin: str, tests: str, *options: str) -> str:
    """Returns what the session prints. tests: the source of its only file, which is written into `folder`."""
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-c", "/dev/null", *options],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr
