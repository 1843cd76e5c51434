"""Checks that training on every mesh of at most 8 ranks equals training on one rank.

    python tools/check_parity.py                              # all combinations: many minutes
    python tools/check_parity.py --only pp2 zero3             # those whose name has all of these words
    python tools/check_parity.py --write bench/results/parity.md

tp, cp, pp and dp are 1, 2 or 4, ZeRO is 0 to 3, and a pipeline runs each of SCHEDULES; tensor parallelism is
sequence parallel. 4D tensor parallelism covers every tp, y and z of 2, 4 and 8 ranks, and some combinations
with other axes (BESIDE). The model has ragged sizes. Every loss and gradient norm of STEPS steps, and the
validation loss after them, must equal one rank's to TOLERANCE, and must be bitwise the same on the first and
the last rank. Small buckets make its weights travel alone, as a larger model's would.

Combinations that the trainer refuses are listed with its sentence. The exit status is 1 if a combination is
wrong. tests/train/test_parity.py runs some of them on the ranks that tests share.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import math
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from pyruntime.comm import Runtime  # noqa: E402
from pyruntime.data_parallel import reducer, shard  # noqa: E402
from pyruntime.train import assembly  # noqa: E402
from pyruntime.train.config import Grid, Model, Optimizer, RunConfig, mesh_of, with_pieces  # noqa: E402
from pyruntime.train.errors import ConfigError  # noqa: E402
from pyruntime.train.resolved import check  # noqa: E402
from tests.ranks import RankError, Ranks  # noqa: E402
from tests.train import jobs  # noqa: E402

SIZES = (1, 2, 4)
LARGEST = 8
"""Most ranks of a mesh."""
STEPS, TOLERANCE = 5, 1e-4
BATCH, SEQ = 8, 36
SCHEDULES = {"1f1b": {}, "interleaved": {"virtual": 2}, "zb-h1": {}, "zb-v": {}, "seq1f1b": {"slices": 2}}
"""The schedules of a pipeline, and their options."""
MODEL = Model(
    preset="debug",
    hidden_size=80,
    intermediate_size=132,
    num_hidden_layers=9,  # over 2, 4 and 8 stages
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=259,  # over 2 and 4 tensor-parallel ranks
)
# eps is as large as the gradients, so AdamW does not divide their size out: a wrong factor in the gradients
# shows in the next loss.
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-3, warmup_steps=1, clip_grad_norm=0.5)
BUCKET_BYTES = 8192
"""Larger weights are sent by themselves, and are cut by ZeRO 3."""
TOGETHER = 20
"""Combinations that one set of processes runs in turn."""
DEADLINE_S, CASE_S = 60.0, 60.0

Figures = list[tuple[float, ...]]
"""For each step: loss, gradient norm, and the validation loss if there is one."""


@dataclass(frozen=True)
class Case:
    """One combination of mesh, ZeRO stage and schedule."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    schedule: str = ""
    """One of SCHEDULES, if there is a pipeline."""
    y: int = 1
    """With z the other axes of 4D tensor parallelism, where tp is x. If z > 1, zero is not read."""
    z: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp * self.y * self.z

    @property
    def is_grid(self) -> bool:
        return self.y * self.z > 1

    @property
    def mesh(self) -> str:
        """The axes in words."""
        names = ("tp", "y", "z", "cp", "pp", "dp")
        sizes = [f"{name}{size}" for name in names if (size := getattr(self, name)) > 1]
        return " ".join(sizes) or "1 rank"

    def __str__(self) -> str:
        zero = "" if self.z > 1 else f"zero{self.zero}"
        return " ".join(filter(None, ["4d" if self.is_grid else "", self.mesh, zero, self.schedule]))


BESIDE = (
    Case(y=2, cp=2),
    Case(y=2, cp=2, z=2),
    Case(tp=2, y=2, cp=2),
    Case(y=2, dp=2, zero=0),
    Case(y=2, dp=2, zero=2),
    Case(y=2, dp=2, zero=3),
    Case(tp=2, y=2, dp=2, zero=1),
    Case(y=2, z=2, dp=2),
    Case(z=2, dp=2),
    *(Case(y=2, pp=2, schedule=schedule) for schedule in SCHEDULES),
    Case(y=2, z=2, pp=2, schedule="1f1b"),
    Case(tp=2, y=2, pp=2, schedule="zb-h1"),
)
"""4D tensor parallelism with other axes."""


def grids() -> Iterator[Case]:
    """Yields every tp, y and z of 2, 4 and 8 ranks with an x that divides the heads."""
    for x, y, z in product((*SIZES, LARGEST), repeat=3):
        case = Case(tp=x, y=y, z=z)
        if case.is_grid and case.ranks <= LARGEST and x < LARGEST:
            yield case


def all_cases() -> Iterator[Case]:
    for tp, cp, pp, dp in product(SIZES, repeat=4):
        if tp * cp * pp * dp <= LARGEST:
            for zero, schedule in product(range(4), SCHEDULES if pp > 1 else [""]):
                yield Case(tp, cp, pp, dp, zero, schedule)
    yield from grids()
    yield from BESIDE


def job(folder: Path) -> RunConfig:
    """Returns the configuration that all combinations train, for one rank; its text is in `folder`."""
    sizes = {"batch_size": BATCH, "micro_batch_size": 4, "seq_len": SEQ}
    config = jobs.job(folder, steps=STEPS + 1, val_every=STEPS, z_loss=1e-3, **sizes)
    config = jobs.changed(config, "comm", deadline_s=DEADLINE_S)
    for section, values in (("model", MODEL), ("optimizer", OPTIMIZER)):
        config = jobs.changed(config, section, **vars(values))
    return config


def config_of(case: Case, config: RunConfig) -> RunConfig:
    """Returns `config` for the mesh of `case`."""
    samples = case.dp * case.z
    micro_batches = min(2 if case.pp == 1 else 4, BATCH // samples)
    if case.tp * case.cp == LARGEST:
        micro_batches = BATCH  # of one sequence, so that tensor-parallel ranks have unequal numbers of tokens
    size = BATCH // (samples * micro_batches)
    config = jobs.changed(config, "train", micro_batch_size=size)
    tp = Grid(case.tp, case.y, case.z) if case.is_grid else case.tp
    sizes = {"tp": tp, "cp": case.cp, "pp": case.pp, "dp": case.dp}
    config = with_pieces(jobs.changed(config, "parallel", zero=1 if case.z > 1 else case.zero, **sizes))
    config = jobs.changed(config, "context", layout="striped" if SEQ % (2 * case.cp) else "zigzag")
    if case.pp == 1:
        return config
    return jobs.changed(config, "pipeline", kind=case.schedule, **SCHEDULES[case.schedule])


def refusal(case: Case, config: RunConfig) -> str:
    """Returns the sentence with which the trainer refuses `case`; empty if it runs it."""
    try:
        check(config_of(case, config), case.ranks)
    except ConfigError as error:
        return str(error)
    return ""


def steps_of(runtime: Runtime, config: RunConfig) -> Figures:
    """Returns this rank's figures of the first STEPS steps of a prepared job. Takes no checkpoint."""
    with (
        patch.object(assembly, "shard", functools.partial(shard, bucket_bytes=BUCKET_BYTES)),
        patch.object(reducer, "LEAST_GEMM", 0),
    ):
        trainer = jobs.trainer_over(runtime, config)
        steps = trainer.fit()
        found = [next(steps) for _ in range(STEPS)]
        steps.close()
        trainer.close()
    figures = [(each.loss, each.grad_norm, each.val_loss) for each in found]
    return [tuple(figure for figure in each if figure is not None) for each in figures]


def difference(found: Figures, expected: Figures) -> float:
    """Returns the largest difference of losses, and of gradient norms as a share of the norm; infinite if one
    is not finite."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for place, (figure, wanted) in enumerate(zip(one, other, strict=True)):
            off = abs(figure - wanted) / (wanted if place == 1 else 1.0)
            worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


# -- the tool


@dataclass(frozen=True)
class Result:
    """The result of a combination: its largest difference, or why it did not run."""

    case: Case
    off: float = math.inf
    refused: str = ""
    failed: str = ""

    @property
    def is_equal(self) -> bool:
        return self.off <= TOLERANCE

    @property
    def outcome(self) -> str:
        return "equal" if self.is_equal else "refused" if self.refused else "wrong"

    def __str__(self) -> str:
        return f"{self.case}: {self.outcome}, {self.refused or self.failed or format(self.off, '.0e')}"


def run_cases(_: object, wanted: Sequence[Case], config: RunConfig) -> tuple[list[Figures], str]:
    """Runs combinations in turn on one of their ranks, each on a new mesh, until one fails. Returns the
    figures, and the error or ""."""
    torch.set_num_threads(1)
    found: list[Figures] = []
    for case in wanted:
        wanted_config = config_of(case, config)
        sizes = mesh_of(wanted_config, case.ranks)
        try:
            with Runtime.start(**vars(sizes), deadline_s=DEADLINE_S) as runtime:
                found.append(steps_of(runtime, wanted_config))
        except Exception as error:  # reported for this combination; the next ones run on other processes
            return found, first_line(error)
    return found, ""


def judged(ranks: Ranks, wanted: Sequence[Case], config: RunConfig, expected: Figures) -> Iterator[Result]:
    """Runs combinations that need the same number of ranks, in order."""
    left, many = list(wanted), TOGETHER
    while left:
        together = left[:many]
        try:
            timeout = CASE_S * (1 + len(together))
            ended = ranks.launch(run_cases, together[0].ranks, together, config, timeout=timeout, init=False)
        except RankError as error:  # a rank hangs: run them one by one to find the combination
            if many == 1:
                yield Result(left.pop(0), failed=first_line(error))
            many = TOGETHER if many == 1 else 1
            continue
        of_ranks = [each.value or ([], f"a rank ended: {each.output[-200:]!r}") for each in ended]
        done = min(len(found) for found, _ in of_ranks)
        for place, case in enumerate(together[:done]):
            figures = [found[place] for found, _ in of_ranks]
            same = figures[0] == figures[-1]
            off = max(difference(each, expected) for each in figures) if same else math.inf
            yield Result(case, off, failed="" if same else "the first rank and the last differ")
        if done < len(together):
            said = [why for found, why in of_ranks if len(found) == done and why]
            yield Result(together[done], failed=said[0])
            done += 1
        left = left[done:]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def prove(wanted: Iterable[Case], folder: Path, show=print) -> list[Result]:
    """Runs all combinations, compares them with one rank, and shows each result at once."""
    config = job(folder)
    jobs.prepare(config)
    ranks, results = Ranks(seed=0), []
    by_size = collections.defaultdict(list)
    for case in wanted:
        if sentence := refusal(case, config):
            results.append(Result(case, refused=sentence))
            show(results[-1])
        else:
            by_size[case.ranks].append(case)
    try:
        ((found, why),) = (each.value for each in ranks.launch(run_cases, 1, [Case()], config, init=False))
        if why:
            raise RuntimeError(f"one rank alone failed: {why}")
        for _, cases in sorted(by_size.items()):
            for result in judged(ranks, cases, config, found[0]):
                results.append(result)
                show(result)
    finally:
        ranks.close()
    return results


def page(results: Sequence[Result], seconds: float) -> str:
    """Returns the text of bench/results/parity.md."""
    counts = collections.Counter(each.outcome for each in results)
    meshes = {each.case.mesh for each in results}
    torch_version = torch.__version__.split("+")[0]
    made = (
        f"Made by `make test-parity` on {time.strftime('%-d %B %Y')}: torch {torch_version}, CPU ranks of "
        f"one host, fp32, {seconds / 60:.0f} minutes. {len(results)} combinations of {len(meshes)} meshes "
        f"with 1 to {LARGEST} ranks: **{counts['equal']} equal, {counts['refused']} refused, "
        f"{counts['wrong']} wrong.**"
    )
    how = (
        f"A Llama of {MODEL.num_hidden_layers} layers of {MODEL.hidden_size} features, "
        f"{MODEL.num_attention_heads} query and {MODEL.num_key_value_heads} key heads and "
        f"{MODEL.vocab_size} tokens takes {STEPS} steps of {BATCH} sequences of {SEQ} tokens, clipped, and "
        "is validated. Every loss, and every gradient norm relative to its size, is compared with one "
        f"rank's. A difference of {TOLERANCE:g} is allowed; the tables show the largest. Tensor parallelism "
        "is sequence parallel throughout. Some of the combinations run in `make test` "
        "(`tests/train/test_parity.py`), with planted mistakes that must be found."
    )
    grid = [each for each in results if each.case.is_grid]
    alone = [each for each in results if each.case.pp == 1 and not each.case.is_grid]
    piped = [each for each in results if each.case.pp > 1 and not each.case.is_grid]
    lines = [
        "# Training on every mesh is training on one",
        *("", *textwrap.wrap(made, 118), "", *textwrap.wrap(how, 118)),
        *("", "## Without a pipeline", "", *_table(alone, lambda case: f"zero {case.zero}")),
        *(
            "",
            "## With a pipeline: the largest of zero 0 to 3",
            "",
            *_table(piped, lambda case: case.schedule),
        ),
        *(
            "",
            "## 4D tensor parallelism (x is tp)",
            "",
            *_table(grid, lambda case: case.schedule or ("zero 3" if case.z > 1 else f"zero {case.zero}")),
        ),
    ]
    said = collections.defaultdict(list)
    for each in results:
        if not each.is_equal:
            said[each.refused or each.failed or "wrong"].append(str(each.case))
    if said:
        lines += ["", "## Not equal", "", "| | combinations |", "|---|---|"]
        lines += [f"| {why} | {len(cases)}: {', '.join(cases)} |" for why, cases in said.items()]
    return "\n".join(lines) + "\n"


def _table(results: Sequence[Result], column) -> list[str]:
    rows: dict[str, dict[str, list[Result]]] = {}
    heads = list(dict.fromkeys(column(each.case) for each in results))
    for each in results:
        rows.setdefault(each.case.mesh, {}).setdefault(column(each.case), []).append(each)

    def cell(found: Sequence[Result]) -> str:
        equal = [each.off for each in found if each.is_equal]
        words = [f"{max(equal):.0e}"] if equal else []
        for outcome in ("refused", "wrong"):
            stages = [f"zero {each.case.zero}" for each in found if each.outcome == outcome]
            words += [f"{outcome}: {', '.join(stages)}"] if stages else []
        return "; ".join(words)

    lines = [f"| mesh | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    return lines + [
        f"| {mesh} | {' | '.join(cell(row.get(head, [])) for head in heads)} |" for mesh, row in rows.items()
    ]


def main(argv: Sequence[str]) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="words that a name must have")
    parser.add_argument("--write", type=Path, help="page to write about all combinations")
    options = parser.parse_args(argv)
    if options.only and options.write:
        parser.error("--write needs all combinations; leave --only out.")
    wanted = [case for case in all_cases() if set(options.only) <= set(str(case).split())]
    if not wanted:
        parser.error(f"no combination has all of {' '.join(options.only)} in its name, such as {Case(tp=2)}.")
    started = time.monotonic()
    show = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = prove(wanted, Path(folder), show)
    seconds = time.monotonic() - started
    order = {case: place for place, case in enumerate(wanted)}
    results.sort(key=lambda each: order[each.case])
    counts = collections.Counter(each.outcome for each in results)
    print(
        f"{len(results)} combinations in {seconds:.0f} s: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("equal", "refused", "wrong"))
    )
    for each in results:
        if each.outcome == "wrong":
            print(each)
    if options.write:
        options.write.write_text(page(results, seconds))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    from tools import check_parity  # ranks find functions by the name of their module

    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(check_parity.main(sys.argv[1:]))
    sys.exit(130)
