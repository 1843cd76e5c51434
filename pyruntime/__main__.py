"""`python -m pyruntime`, also below `torchrun -m pyruntime`."""

import sys

from pyruntime.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
