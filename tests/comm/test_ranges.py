"""Ranges are heard by NVTX tools on any device, and made only while somebody listens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyruntime.comm import ranges

HERE = Path(__file__).parent
PROGRAM = """
import torch
import pyruntime
from pyruntime.comm.ranges import is_heard, marked

layer = pyruntime.nn.ColumnParallelLinear(4, 8, group=None)
layer.label = "blocks.7.up"
with marked("dp update", "of all"):
    layer(torch.ones(2, 4))
print("heard" if is_heard() else "not heard")
"""


def run(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)


def test_a_tool_hears_layers_and_parallelism_on_the_cpu(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler was found")
    listener = tmp_path / "listener.so"
    source = HERE / "nvtx_listener.c"
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", listener, source], check=True)
    done = run(NVTX_INJECTION64_PATH=str(listener))
    heard = [line for line in done.stderr.splitlines() if line.startswith(("push", "pop"))]
    assert heard == [
        "push pyruntime: dp update of all",
        "push pyruntime: blocks.7.up",
        "pop pyruntime",
        "pop pyruntime",
    ]
    assert done.stdout == "heard\n"


def test_without_a_listener_nothing_is_made():
    assert ranges.nvtx_domain() is None and not ranges.is_heard()
    assert ranges.marked("dp update") is ranges.NOTHING


def test_without_the_package_nothing_is_heard(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert ranges.nvtx_domain.__wrapped__() is None
