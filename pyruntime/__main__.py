"""`pyruntime` and `python -m pyruntime`, also below `torchrun -m pyruntime`."""

import gc
import sys
from typing import NoReturn

from pyruntime import starting
from pyruntime.cli import main


def run() -> NoReturn:
    """The console command `pyruntime`."""
    starting.leave_signals()
    code = main(sys.argv[1:])
    gc.freeze()  # or Python, as it ends, searches all of torch for garbage, which takes most of a second
    sys.exit(code)


if __name__ == "__main__":
    run()
