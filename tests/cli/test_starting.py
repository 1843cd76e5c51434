"""Signals that come while the program still imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SENDS = """
import os, sys
class Sender:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), {signum})
sys.meta_path.insert(0, Sender())
"""


def ended(tmp_path, signum, arguments, **environment):
    """How a process ends that is sent the signal as it begins to import torch."""
    (tmp_path / "sitecustomize.py").write_text(SENDS.format(signum=int(signum)))
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest may ignore it
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_stopped_while_it_imports_says_so(tmp_path, signum):
    found = ended(tmp_path, signum, ["-m", "pyruntime", "train"], RANK="3")
    assert found.returncode == 128 + signum
    assert found.stderr == (
        f"pyruntime: rank 3: Stopped by {signum.name} before the program began; nothing was saved.\n"
    )


def test_the_signals_of_another_program_that_imports_it_are_its_own(tmp_path):
    arguments = ["-c", "import pyruntime", "-m", "pyruntime"]
    found = ended(tmp_path, signal.SIGTERM, arguments)
    assert found.returncode == -signal.SIGTERM and found.stderr == ""
