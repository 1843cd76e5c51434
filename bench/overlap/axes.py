"""Measures how two axes of a mesh affect each other: the trainer's step with each axis alone and with both.

    python -m bench.netlab --hosts 4 --ranks-per-host 1 --rate 400mbit -- \\
        python -m bench.overlap.axes [--meshes tp-dp cp-dp tp-pp] [--json FILE]

It needs four ranks. "Alone" is one axis of two ranks, in both pairs of neighbouring ranks at once. "Beside"
is the mesh of both axes, with equally many sequences for each replica. A rank of dp alone has twice the
weights that it has beside tp; a rank of cp alone has as many tokens as beside dp.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import pyruntime
from bench.common.measuring import Report, parser_of, started
from bench.common.tables import table
from pyruntime.comm import Runtime
from pyruntime.comm.exchange import gather
from pyruntime.overlap import Account
from pyruntime.overlap.steps import StepLedger
from pyruntime.train.config import Data, Model, Output, Parallel, RunConfig, Train
from pyruntime.train.data import corpus
from pyruntime.train.data.tokenizer import ByteTokenizer
from pyruntime.train.loop import Trainer
from pyruntime.train.model_of_run import make_model
from pyruntime.train.resolved import check
from pyruntime.train.signals import StopRequest

MESHES = ("tp-dp", "cp-dp", "tp-pp")
MICRO_BATCHES = 2
HOW = """\
{steps} training steps after a first one, micro-batches one after the other ({count} a step), zero 1, bf16; by
the ledger. Milliseconds and MB of a step: of the rank that waited most on that axis. Hidden: share of the
bytes that it read. Step: of the slowest rank."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank's place among those that train together, in torchrun's variables."""

    rank: int
    size: int
    address: str
    ports: tuple[int, ...]
    """One port for each rendezvous, because the previous store may still be open."""

    def take(self, time: int) -> None:
        """Sets the environment variables of the rendezvous number `time`."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        os.environ |= dict(
            zip(names, map(str, (self.rank, self.size, self.address, self.ports[time])), strict=True)
        )


def places(times: int) -> tuple[Place, Place, Path]:
    """Returns this rank's place in its pair and among all ranks, and a folder that all see. Collective."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(times)]
        for free in sockets:
            free.bind(("", 0))
        ports = tuple(free.getsockname()[1] for free in sockets)
    own = socket.gethostbyname(socket.gethostname()), ports
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    told = gather(dist.group.WORLD, "Gathering addresses", (*own, folder), tuple[str, tuple[int, ...], str])
    rank = dist.get_rank()
    pair = told[rank - rank % 2]
    return Place(rank % 2, 2, *pair[:2]), Place(rank, len(told), *told[0][:2]), Path(told[0][2])


def config_of(
    folder: Path, run_dir: Path, axes: dict[str, int], shape: Model, steps: int, seq: int
) -> RunConfig:
    replicas = axes.get("dp", 1)
    return RunConfig(
        model=shape,
        data=Data(paths=(str(folder / "text.txt"),), cache=str(folder / "tokens")),
        train=Train(
            steps=steps + 2, batch_size=MICRO_BATCHES * replicas, micro_batch_size=1, seq_len=seq,
            dtype="bf16", val_every=0, threads=1,
        ),
        output=Output(run_dir=str(run_dir), progress="off"),
        parallel=Parallel(**axes),
    )  # fmt: skip


def accounts(config: RunConfig) -> Account:
    """Returns this rank's account, summed over all steps except the first."""
    parallel = config.parallel
    folder = Path(config.output.run_dir)
    with Runtime.start(tp=parallel.tp, dp=parallel.dp, cp=parallel.cp, pp=parallel.pp) as runtime:
        run = check(config, runtime.world.size())
        tokenizer = ByteTokenizer()
        tokens = corpus.build(config.data, tokenizer)
        text = corpus.open_corpus(config.data, tokens, tokenizer, config.train.seq_len)
        trainer = Trainer(run, make_model(run, runtime), text, runtime, folder, StopRequest())
        with pyruntime.ledger() as ledger:
            entered = StepLedger(ledger)
            for _ in itertools.islice(trainer.fit(entered), config.train.steps - 1):
                pass  # stops before the last step, which a checkpoint would follow
        trainer.close()
        kept = entered.write(folder, runtime)
        assert kept is not None
        return kept.account


def lines(found: dict[str, list[Account]], steps: int) -> list[dict[str, Any]]:
    """Returns a line for each axis of each phase, from the accounts of all ranks."""
    rows = []
    for phase, ranks in found.items():
        for axis in phase.split("-"):
            most = max(ranks, key=lambda account: account.axes[axis].exposed_s if axis in account.axes else 0)
            figures = most.axes[axis]
            rows.append(
                {
                    "axis": axis,
                    "mesh": phase,
                    "step_s": max(account.seconds for account in ranks) / steps,
                    "bytes_read": figures.bytes_read / steps,
                    "bytes_sent": figures.bytes_sent / steps,
                    "hidden": figures.hidden,
                    "exposed_s": figures.exposed_s / steps,
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    head = ["axis", "in the mesh", "step ms", "MB read", "MB sent", "hidden", "exposed ms"]
    return table(
        head,
        [
            [
                row["axis"],
                row["mesh"],
                f"{row['step_s'] * 1e3:.0f}",
                f"{row['bytes_read'] / 1e6:.2f}",
                f"{row['bytes_sent'] / 1e6:.2f}",
                f"{row['hidden']:.1%}",
                f"{row['exposed_s'] * 1e3:.1f}",
            ]
            for row in sorted(rows, key=lambda row: (row["axis"], len(row["mesh"])))
        ],
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    asked = {*args.meshes, *(axis for mesh in args.meshes for axis in mesh.split("-"))}
    phases = sorted(asked, key=lambda phase: (len(phase), phase))
    with started({"dp": -1, "tp": 1}):
        if dist.get_world_size() != 4:
            parser.error(f"two axes of two ranks each take 4 ranks; {dist.get_world_size()} were started.")
        pair, everyone, folder = places(len(phases) + 1)
        report = Report(args, HOW.format(steps=args.steps, count=MICRO_BATCHES))
        if everyone.rank == 0:
            draw = np.random.default_rng(0)
            (folder / "text.txt").write_text(" ".join(map(str, draw.integers(0, 10**6, 20000))))
            corpus.build(
                Data(paths=(str(folder / "text.txt"),), cache=str(folder / "tokens")), ByteTokenizer()
            )
        dist.barrier()
    shape = Model(preset="debug", hidden_size=args.hidden_size, intermediate_size=args.hidden_size * 11 // 4)
    own: dict[str, Account] = {}
    for time, phase in enumerate(phases):
        axes = {"tp": 1} | {axis: 2 for axis in phase.split("-")}
        run_dir = folder / f"{phase}-{everyone.rank}"
        run_dir.mkdir()
        config = config_of(folder, run_dir, axes, shape, args.steps, args.seq)
        (everyone if "-" in phase else pair).take(time)
        own[phase] = accounts(config)
    everyone.take(len(phases))
    with started({"dp": -1, "tp": 1}):
        told = gather(dist.group.WORLD, "Gathering accounts", own, dict[str, Account])
        found = {phase: [each[phase] for each in told] for phase in phases}
        rows = lines(found, args.steps)
        report.add({"rows": rows}, show(rows))
        report.write(args.json)


if __name__ == "__main__":
    main()
