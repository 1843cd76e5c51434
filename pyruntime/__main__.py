"""`pyruntime` and `python -m pyruntime`, also below `torchrun -m pyruntime`."""

import gc
import sys
from typing import NoReturn

try:
    from pyruntime.cli import main
except KeyboardInterrupt:  # before there is anybody who turns it into an ending
    sys.exit(130)


def run() -> NoReturn:
    """The console command `pyruntime`."""
    code = main(sys.argv[1:])
    gc.freeze()  # or Python, as it ends, searches all of torch for garbage, which takes most of a second
    sys.exit(code)


if __name__ == "__main__":
    run()
