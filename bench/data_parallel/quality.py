"""Compares validation losses of replicas that synchronize rarely with those that synchronize every step.

    python -m bench.data_parallel.quality [--json FILE] [--minutes 60] [--seeds 3] [--steps 1488]
        [--methods "CO2 12" ...] [--plot FILE]

It runs the trainer on a Llama of 2 layers of 64 in bf16 and the standard library's sources, with two replicas
of one rank each and equally many tokens for every method. Runs go seed by seed. Each is added to FILE when it
ends, and the next call continues after the last. --minutes 0 only shows, and plots, the finished runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.launch import on_one_host
from bench.common.measuring import at_least_one, facts, parser_of, started, write_json
from bench.common.tables import table
from pyruntime.comm import Runtime
from pyruntime.train import config_file
from pyruntime.train.config import DataParallel, RunConfig
from pyruntime.train.data import corpus
from pyruntime.train.data.tokenizer import open_tokenizer
from pyruntime.train.loop import Trainer
from pyruntime.train.model_of_run import make_model
from pyruntime.train.ranks import on_rank_0
from pyruntime.train.resolved import check
from pyruntime.train.signals import StopRequest

PRESET, RANKS = "tiny", 2
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 176}
BATCH, VALIDATIONS, VAL_SEQUENCES = 16, 6, 512
CLIP = 0.01
"""Largest element of a clipped outer momentum: about three steps at the peak learning rate."""

HOW = """\
The preset {preset} with {sizes}, in bf16: {steps} steps of {tokens:,} tokens over {ranks} replicas of one
rank each, {total:,} tokens a run; the inner optimizer, its learning rates and its batches are the same for
all. Loss: validation loss of the final model, in nats a byte, on {held_out:,} held-out tokens; mean over
seeds, and half the distance between the highest and the lowest. Over AdamW: how much it exceeds AdamW with
gradients summed in every step and the same seed, mean over seeds. Penalty: median over the steps."""

ADAMW = "AdamW, every step"


def _co2(tau: int, **settings: Any) -> DataParallel:
    return DataParallel("co2", tau=tau, **settings)


METHODS: dict[str, DataParallel] = {
    ADAMW: DataParallel(),
    **{f"CO2 {tau}": _co2(tau) for tau in (12, 4, 48)},
    **{f"CO2 {tau}, no penalty": _co2(tau, penalty=False) for tau in (12, 4, 48)},
    **{f"DiLoCo {tau}": DataParallel("diloco", tau=tau) for tau in (12, 48)},
    **{f"Streaming DiLoCo {tau}": DataParallel("streaming_diloco", tau=tau) for tau in (12, 48)},
    **{f"CO2 {tau}, clip": _co2(tau, clip=CLIP) for tau in (12, 4, 48)},
    **{f"CO2 {tau}, clip, no penalty": _co2(tau, clip=CLIP, penalty=False) for tau in (12, 4, 48)},
}
SWEEP: dict[str, DataParallel] = {
    **{f"CO2 12, outer lr {lr}": _co2(12, outer_lr=lr) for lr in (0.5, 0.6, 0.8, 1.0)},
    "CO2 12, outer lr 1.0, no penalty": _co2(12, outer_lr=1.0, penalty=False),
    "CO2 12, outer lr 1.0, momentum 0.0": _co2(12, outer_lr=1.0, outer_momentum=0.0),
    "CO2 12, momentum 0.0": _co2(12, outer_momentum=0.0),
    "CO2 4, outer lr 0.5": _co2(4, outer_lr=0.5),
    "Local SGD 12": DataParallel("local_sgd", tau=12),
    "Overlapped local SGD 12": DataParallel("overlapped_local_sgd", tau=12),
}
"""Methods that run only with the first seed."""

Results = list[dict[str, Any]]


def runs(names: Sequence[str], seeds: int, found: Results) -> Iterator[tuple[int, str]]:
    """Yields the missing runs, seed by seed."""
    done = {(one["seed"], one["name"]) for one in found}
    for seed in range(seeds):
        for name in names:
            if (seed, name) not in done and (name in METHODS or seed == 0):
                yield seed, name


def config_of(name: str, seed: int, steps: int) -> RunConfig:
    config = config_file.load(config_file.find(PRESET))
    train = dataclasses.replace(
        config.train,
        steps=steps,
        seed=seed,
        dtype="bf16",
        batch_size=BATCH,
        micro_batch_size=BATCH // RANKS,
        val_every=math.ceil(steps / VALIDATIONS),
        val_sequences=VAL_SEQUENCES,
    )
    output = dataclasses.replace(config.output, log_every=max(1, steps // 30))
    parallel = dataclasses.replace(config.parallel, dp=RANKS, dp_replicate=RANKS, tp=1)
    data_parallel = (METHODS | SWEEP)[name]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **SIZES),
        train=train,
        output=output,
        parallel=parallel,
        data_parallel=data_parallel,
    )


def run(name: str, seed: int, steps: int, runtime: Runtime) -> dict[str, Any]:
    """Trains once, from random weights to the last step, and returns the figures."""
    config, began = config_of(name, seed, steps), time.perf_counter()
    tokenizer = open_tokenizer("bytes")
    resolved = check(config, runtime.world.size())
    text = corpus.open_everywhere(config, tokenizer, runtime.world, lambda _: None)
    folder = on_rank_0(runtime.world, "Making a folder", lambda: Path(tempfile.mkdtemp(prefix="quality-")))
    try:
        model = make_model(resolved, runtime)
        trainer = Trainer(resolved, model, text, runtime, folder, StopRequest())
        losses, curve, penalties = [], [], []
        for step in trainer.fit():
            losses.append(step.loss)
            penalties.append(1.0 if trainer.outer is None else trainer.outer.last_penalty)
            if step.val_loss is not None:
                curve.append((step.step, step.val_loss))
        trainer.close()
    finally:
        on_rank_0(runtime.world, "Removing the folder", lambda: shutil.rmtree(folder))
    return {
        "seed": seed,
        "name": name,
        "val_loss": curve[-1][1],
        "train_loss": statistics.fmean(losses[-len(losses) // 10 :]),
        "penalty": statistics.median(penalties),
        "curve": curve,
        "seconds": time.perf_counter() - began,
    }


def read(path: Path, steps: int) -> Results:
    """Reads the runs of earlier calls. Exits if the file holds runs with other settings."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document["settings"]["steps"] != steps:
        sys.exit(
            f"{path} holds runs of {document['settings']['steps']} steps, and --steps is {steps}; name "
            "another file, or the same number of steps."
        )
    return document["results"]


def summary(found: Results) -> list[dict[str, Any]]:
    """Returns a line for each method, in the order of METHODS and SWEEP."""
    lines = []
    base = {one["seed"]: one["val_loss"] for one in found if one["name"] == ADAMW}
    for name in METHODS | SWEEP:
        of = [one for one in found if one["name"] == name]
        if not of:
            continue
        losses = [one["val_loss"] for one in of]
        over = [one["val_loss"] / base[one["seed"]] - 1 for one in of if one["seed"] in base]
        lines.append(
            {
                "name": name,
                "seeds": len(of),
                "val_loss": statistics.fmean(losses),
                "half_range": (max(losses) - min(losses)) / 2,
                "over": over,
                "penalty": statistics.fmean(one["penalty"] for one in of),
            }
        )
    return lines


def show(found: Results) -> str:
    head = ["", "loss", "+-", "over AdamW", "penalty", "seeds"]
    rows = [
        [
            line["name"],
            f"{line['val_loss']:.4f}",
            f"{line['half_range']:.4f}",
            f"{statistics.fmean(line['over']):+.2%}" if line["over"] else "",
            f"{line['penalty']:.2f}" if line["penalty"] > 1 else "",
            str(line["seeds"]),
        ]
        for line in summary(found)
    ]
    return table(head, rows)


def plot(path: str, found: Results) -> None:
    """Draws a PNG: losses over AdamW's by method and seed, and the first seed's validation curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    curves, dots = figure.subplots(1, 2, width_ratios=(1, 1.2))
    lines = [line for line in summary(found) if line["over"] and line["name"] in METHODS]
    for row, line in enumerate(lines):
        dots.plot(
            [100 * each for each in line["over"]], [row] * len(line["over"]), "o", ms=4, color="#2e4057"
        )
    dots.axvline(0, color="#888888", lw=0.8)
    dots.axvline(1, color="#d1495b", lw=0.8, ls="--")
    dots.set_yticks(range(len(lines)), [line["name"] for line in lines], fontsize=8)
    dots.invert_yaxis()
    dots.set_xlabel("% above AdamW's loss; a dot a seed; dashed: 1 %")
    for name in (ADAMW, "CO2 4", "CO2 12", "CO2 48", "DiLoCo 12", "Streaming DiLoCo 12"):
        for one in found:
            if one["name"] == name and one["seed"] == 0:
                curves.plot(*zip(*one["curve"], strict=True), "o-", ms=3, lw=1, label=name)
    curves.set_xlabel("step")
    curves.set_ylabel("validation loss (nats a byte), seed 0")
    curves.grid(alpha=0.3)
    curves.legend(fontsize=8)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--json", metavar="FILE", default="quality.json", help="file of all runs; default %(default)s")
    add("--minutes", type=float, default=60.0, help="starts no run that would end later; default %(default)s")
    add("--seeds", type=at_least_one, default=3, help="default %(default)s")
    add("--steps", type=at_least_one, default=1488, help="steps of a run; default %(default)s = 31 * 48")
    add("--methods", nargs="+", choices=[*METHODS, *SWEEP], default=list(METHODS), metavar="METHOD")
    add("--plot", metavar="FILE", help="PNG to write")
    return parser.parse_args()


def measure(args: argparse.Namespace, found: Results, runtime: Runtime) -> None:
    """Adds runs to `found` and to the file until all are done or the time is over."""
    began, longest, where = time.monotonic(), 0.0, facts()
    tokens = BATCH * config_file.load(config_file.find(PRESET)).train.seq_len
    how = HOW.format(
        preset=PRESET,
        sizes=", ".join(f"{name} {size}" for name, size in SIZES.items()),
        steps=args.steps,
        tokens=tokens,
        ranks=RANKS,
        total=args.steps * tokens,
        held_out=VAL_SEQUENCES * tokens // BATCH,
    )
    for seed, name in runs(args.methods, args.seeds, found):
        left = 60 * args.minutes - (time.monotonic() - began)
        fits = left > longest
        if not on_rank_0(runtime.world, "Looking at the clock", lambda fits=fits: fits):
            return
        result = run(name, seed, args.steps, runtime)
        longest = max(longest, result["seconds"])
        found.append(result)
        if runtime.rank == 0:
            write_json(args.json, where, {**vars(args), "how": how}, found)
            print(f"seed {seed}  {name}: {result['val_loss']:.4f}  ({result['seconds']:.0f} s)", flush=True)


def main() -> None:
    args = arguments()
    found = read(Path(args.json), args.steps)
    if args.minutes > 0 and "RANK" not in os.environ:
        command = on_one_host("bench.data_parallel.quality", sys.argv[1:])
        os.execve(command[0], command, os.environ | {"OMP_NUM_THREADS": "1"})
    if args.minutes > 0:
        with started({"dp": RANKS, "dp_replicate": RANKS}) as runtime:
            measure(args, found, runtime)
    if os.environ.get("RANK", "0") == "0":
        print(show(found))
        if args.plot:
            plot(args.plot, found)


if __name__ == "__main__":
    main()
