"""Measures what optimizer states in a file cost a step, and what memory they free.

    python -m bench.training.offload [--only resident|file] [--config dim1024] [--train.batch_size 32 ...]

Under torchrun for several ranks. Other options are the trainer's. Two trainers of one model, one with
resident states and one with --optimizer.offload states, take steps in turn. With --only there is one of them,
and the peak of its resident memory is that of a run.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyruntime
from bench.common.measuring import Report, parser_of, started
from bench.common.tables import table
from bench.training.saving import trainer
from pyruntime.cli.train import read
from pyruntime.comm.exchange import barrier
from pyruntime.train.ranks import on_rank_0

HOW = """\
Seconds of a step on rank 0, medians over {rounds} rounds of one step of each in shuffled order, after two
steps of each. Peak: the most resident memory of this process since then, with pages of the file that it maps;
memory before the model was made is left out. waits: of a step, for the file. MB read: of a step, from the
file; the page cache keeps none of them for longer than a few runs. rate: while it read."""
KINDS = {"resident": "none", "file": "states"}


def memory(kind: str) -> int:
    """Bytes of the resident memory (VmRSS) or of its peak (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) << 10


def measure(flags: list[str], kinds: list[str], runtime: Any, folder: Path, rounds: int) -> dict[str, Any]:
    before, dice = memory("VmRSS"), random.Random(0)
    made, steps = {}, {}
    for kind in kinds:
        offload = ["--optimizer.offload", KINDS[kind]]
        config, _ = read([*flags, "--train.steps", "1000000", "--train.val_every", "0", *offload])
        made[kind] = trainer(config, runtime, folder)
        steps[kind] = made[kind].fit()
        for _ in range(2):
            next(steps[kind])
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    accounts = []
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    for _ in range(rounds):
        for kind in dice.sample(kinds, len(kinds)):
            barrier(runtime.world, "Measuring")
            with pyruntime.ledger() as ledger:
                begin = time.perf_counter()
                next(steps[kind])
                seconds[kind].append(time.perf_counter() - begin)
            if kind == "file":
                accounts.append((ledger.account().axes["offload"], reading_s(ledger)))
    found: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in made[kinds[0]].model.parameters()),
        "tokens": config.train.batch_size * config.train.seq_len,
        "peak_bytes": memory("VmHWM") - before if len(kinds) == 1 else None,
        "seconds": seconds,
    }
    if accounts:
        found["states_bytes"] = made["file"].optimizer.home.nbytes
        found["waits_s"] = statistics.median(axis.exposed_s for axis, _ in accounts)
        found["read_bytes"] = statistics.median(axis.bytes_read for axis, _ in accounts)
        found["read_rate"] = statistics.median(axis.bytes_read / reading for axis, reading in accounts)
    for kind in kinds:
        steps[kind].close()
        made[kind].close()
    return found


def reading_s(ledger: Any) -> float:
    entries = ledger.stretch.entries
    return sum(each.seconds for each in entries if each.axis == "offload" and each.kind.name == "READ")


def show(found: dict[str, Any]) -> str:
    head, row = ["parameters", "tokens"], [f"{found['parameters'] / 1e6:.0f} M", f"{found['tokens']:,}"]
    for kind, seconds in found["seconds"].items():
        head.append(f"{kind} s")
        row.append(f"{statistics.median(seconds):.2f}")
    if len(found["seconds"]) == 2:
        resident, file = found["seconds"].values()
        ratio = statistics.median(b / a for a, b in zip(resident, file, strict=True))
        head, row = [*head, "ratio"], [*row, f"{ratio:.3f}"]
    if found["peak_bytes"] is not None:
        head, row = [*head, "peak MB"], [*row, f"{found['peak_bytes'] / 1e6:,.0f}"]
    if "states_bytes" in found:
        head += ["states MB", "waits s", "MB read", "rate GB/s"]
        row += [f"{found['states_bytes'] / 1e6:,.0f}", f"{found['waits_s']:.2f}"]
        row += [f"{found['read_bytes'] / 1e6:,.0f}", f"{found['read_rate'] / 1e9:.2f}"]
    return table(head, [row])


if __name__ == "__main__":
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--only", choices=[*KINDS], help="one kind, whose memory is measured")
    parser.add_argument("--folder", help="folder of the file; default: a temporary one")
    args, flags = parser.parse_known_args()
    with started({"dp": -1, "tp": 1}) as runtime, tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(on_rank_0(runtime.world, "Making a folder", lambda: temporary, str))
        report = Report(args, HOW.format(rounds=args.rounds))
        found = measure(flags, [args.only] if args.only else [*KINDS], runtime, folder, args.rounds)
        report.add(found, show(found))
        report.write(args.json)
