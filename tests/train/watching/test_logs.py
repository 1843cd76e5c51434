"""What a rank logs says which rank it is."""

import os
import subprocess
import sys

PROGRAM = """
import logging, warnings
from pyruntime.cli.train import _name_rank
_name_rank()
logging.getLogger("pyruntime").warning("rank 1 is late")
warnings.warn("that is old")
"""


def test_what_a_rank_logs_and_python_warns_of_begins_with_its_number():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert lines[0] == "pyruntime: rank 3: rank 1 is late"
    assert lines[1].startswith("pyruntime: rank 3: ") and "that is old" in lines[1]
