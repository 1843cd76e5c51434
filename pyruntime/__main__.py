"""Starts the command line: `pyruntime`, `python -m pyruntime` and `torchrun -m pyruntime`."""

import gc
import sys
from typing import NoReturn

from pyruntime import starting
from pyruntime.cli import main


def run() -> NoReturn:
    """Runs the console command `pyruntime` and exits with its code."""
    starting.leave_signals()
    code = main(sys.argv[1:])
    gc.freeze()  # else Python searches all of torch for garbage at exit, which takes most of a second
    sys.exit(code)


if __name__ == "__main__":
    run()
