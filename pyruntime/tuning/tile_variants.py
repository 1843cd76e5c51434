"""Times the rank's own GEMM with tiles that the library of kernels does not have, compiled by NVRTC.

It runs only the portable GEMM, without transfers, and shows whether other tiles are worth building in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pyruntime.cuda.library import CudaLibraryError
from pyruntime.cuda.nvrtc_tiles import CANDIDATES, LARGE, SMALL, Variant
from pyruntime.tuning.measure import MUST_WIN_BY, Problem, Run, gathered
from pyruntime.tuning.timing import interleave

BUILT_IN = tuple(name for name, tiles in CANDIDATES.items() if tiles in (SMALL, LARGE))
WARM_UP = 2


@dataclass(frozen=True)
class TimedVariants:
    """The times of one GEMM: seconds, medians over rounds of the slowest rank."""

    name: str
    """The linear and the pass, as "qkv forward"."""
    seconds: dict[str, float]
    """Seconds by the tiles' name in CANDIDATES."""
    refused: dict[str, str]
    """Reasons why other tiles were not timed."""

    def sentence(self) -> str:
        """Returns a sentence that compares the built-in tiles with the fastest variant."""
        built_in = {name: value for name, value in self.seconds.items() if name in BUILT_IN}
        if not built_in:
            return f"{self.name}: tile variants were not timed: {next(iter(self.refused.values()))}"
        best = min(self.seconds, key=lambda name: self.seconds[name])
        ours = min(built_in, key=lambda name: built_in[name])
        beaten = self.seconds[best] < MUST_WIN_BY * built_in[ours]
        told = f"{self.name}: of the tiles that are built in {ours} is the quickest, {_ms(built_in[ours])}"
        return f"{told}; the variant {best} would take {_ms(self.seconds[best])}" if beaten else told


def time_variants(problem: Problem, when: str, rounds: int) -> TimedVariants:
    """Times Y = X W^T ("forward") or dX = dY W ("backward") of all rows with every candidate that compiles
    for this device, in interleaved rounds. Collective over the problem's job; each compilation takes seconds.
    A candidate that fails on one rank is timed on none."""
    forward = when == "forward"
    layout = "NT" if forward else "NN"
    a = problem.x_whole if forward else problem.y_whole
    c = a.new_empty(a.shape[0], problem.linear.n if forward else problem.linear.k)
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for name, tiles in CANDIDATES.items():
        why, made = "", None
        try:
            made = Variant(tiles, layout, problem.dtype)
        except (CudaLibraryError, ValueError) as error:
            why = str(error)
        found = [sentence for sentence in gathered(why, str, problem.job) if sentence]
        if found or made is None:
            refused[name] = found[0]
        else:
            runs[name] = functools.partial(made.matmul, a, problem.weight, c)
    for _ in range(WARM_UP):
        for run in runs.values():
            run()
        problem.finish()
    samples = interleave(runs, rounds, finish=problem.finish, group=problem.job) if runs else {}
    seconds = {name: sample.median for name, sample in samples.items()}
    return TimedVariants(f"{problem.linear.name} {when}", seconds, refused)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
