"""A command of pyruntime in which one rank is killed or stopped at a moment that is named.

    python -m tests.cli.killed MOMENT RANK SIGNAL COMMAND ...

For tests/cli/test_kills.py: below torchrun, or with torchrun's variables.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

MOMENTS = {
    "groups": ("pyruntime.comm.runtime", "_init_process_groups"),
    "mesh": ("pyruntime.comm.runtime", "_make_mesh"),
    "compare": ("pyruntime.train.agreement", "check"),
    "corpus": ("pyruntime.train.data.corpus", "build"),
    "open": ("pyruntime.train.data.corpus", "open_corpus"),
    "model": ("pyruntime.train.run", "make_model"),
    "peak": ("pyruntime.train.watching.peak", "gemm_flops"),
    "trainer": ("pyruntime.train.run", "Trainer"),
    "step": ("pyruntime.train.loop", "Trainer._with_validation"),
    "settle": ("pyruntime.train.saving.blocks", "settle"),
    "save": ("pyruntime.train.saving.saver", "Saver._staged"),
    "write": ("pyruntime.train.saving.staging", "Staging.write"),
    "publish": ("pyruntime.train.saving.saver", "Write._settle"),
    "check": ("pyruntime.train.manifest", "check"),
    "resume": ("pyruntime.train.saving.storage", "Reader.read_metadata"),
    "load": ("pyruntime.train.saving.storage", "Reader.read_data"),
    "model_folder": ("pyruntime.train.run", "save_hf"),
    "sample": ("pyruntime.train.run", "_sample"),
}
"""Before what the rank is hit."""


def hit_before(moment: str, signum: int) -> None:
    module, _, name = MOMENTS[moment][0], "", MOMENTS[moment][1]
    place = importlib.import_module(module)
    *path, name = name.split(".")
    for each in path:
        place = getattr(place, each)
    real = getattr(place, name)

    def hit(*arguments, **named):
        os.kill(os.getpid(), signum)
        return real(*arguments, **named)

    setattr(place, name, hit)


def main() -> None:
    moment, rank, signum, *command = sys.argv[1:]
    if os.environ["RANK"] == rank:
        hit_before(moment, signal.Signals[signum])
    sys.argv = ["pyruntime", *command]
    from pyruntime.__main__ import run

    run()


if __name__ == "__main__":
    main()
