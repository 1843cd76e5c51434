"""Runs a step of the trainer in virtual time: which part of it no computation hides, before any GPU runs it.

    python -m bench.clock.simulate --config llama3-8b --gpus 8 --machine h100 --parallel.tp 8 --parallel.dp 1

The trainer itself runs, call by call, with its streams, events and transports. But its device has no memory
and no arithmetic: every launch takes the time that a table says (h100.toml, machine.py). One process stands
for all ranks, which do the same at the same time. It needs a checkout and a compiler, because the device is
the simulated one of tests/device; the first run compiles it, which takes minutes.

What the clock cannot know: values, and what follows from them; ranks that differ in speed; kernels that slow
each other, because they share memory or L2 with copies or run side by side on two streams; how many launches
a host may be ahead; memory that the allocator loses between blocks; a host's own pauses. The table's numbers
are published, derived or estimated, and none is measured here. Pipelines, context parallelism, grids, several
hosts, multicast and rings have no model yet and are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.clock import mirrors
from bench.clock.account import Account, by, of_step
from bench.clock.machine import Machine, find
from bench.common.measuring import facts
from bench.common.records import write_records
from bench.common.tables import table
from pyruntime.cli import train as cli
from pyruntime.cli.arguments import take_option
from pyruntime.comm import Runtime
from pyruntime.comm.companions import _of_group
from pyruntime.comm.groups import group_name, workspace_bytes
from pyruntime.train import validate
from pyruntime.train.config import MeshSizes, RunConfig, mesh_of
from pyruntime.train.planned import planned, predicted
from pyruntime.train.run import RankRun, prepare
from pyruntime.train.signals import StopRequest

STEPS = 3
"""The first makes workspaces and the second counts; the third's calls show how the second ended."""
AXES = ("dp", "tp")
"""Those of which one rank can stand for all, in the order of Runtime.start."""
MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A step of one rank, in virtual time."""

    machine: str
    gpus: int
    account: Account
    tokens: int
    mfu: float
    memory_bytes: int
    """Most bytes in tensors."""
    workspace_bytes: int
    """Bytes of symmetric memory, which are not among them."""
    left_bytes: float
    """Bytes of the GPU's memory beside these and a process's own; below 0: the step does not fit."""
    planned_s: float | None
    """The planner's seconds of the same step; None of a dtype that it does not know."""
    took_s: float
    """Seconds that the simulation took here."""

    def record(self) -> dict[str, Any]:
        """Returns the figures as a line of bench/results."""
        account = self.account
        return {
            "machine": self.machine,
            "gpus": self.gpus,
            "step_s": account.step,
            "tokens": self.tokens,
            "mfu": self.mfu,
            "exposed_s": account.exposed,
            "exposed_share": account.exposed / account.step,
            "waits_s": dict(by(account.waits, 0)),
            "communicating_s": dict(by(account.communicating, 0)),
            "host_s": account.host,
            "memory_bytes": self.memory_bytes,
            "workspace_bytes": self.workspace_bytes,
            "left_bytes": self.left_bytes,
            "planned_s": self.planned_s,
        }


def simulate(config: RunConfig, machine: Machine, gpus: int) -> Simulated:
    """Runs STEPS steps of a run in this process, which can simulate only once, after `build_device`. Raises
    ConfigError for what the trainer refuses, ValueError for a mesh that has no model."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        config = _on_text(config, Path(folder), machine)
        validate.check(config, gpus)
        mesh = mesh_of(config, gpus)
        _check(mesh, machine)
        core = mirrors.begin(machine.seconds, machine.cluster.memory_bytes - machine.cluster.process_bytes)
        axes = {name: size for name in AXES if (size := getattr(mesh, name)) > 1 or name == "tp"}
        runtime = held.enter_context(mirrors.mirrored(axes))
        with contextlib.ExitStack() as of_run:
            job = prepare(config, "simulated", runtime, StopRequest(), of_run)
            with _named_places(core, job.model):
                core.keep_spans(True)
                marks, steps = [], job.trainer.fit()
                for _ in range(STEPS):
                    next(steps)
                    marks.append(core.host_time())
                steps.close()
        account = of_step(core.take_spans(), marks[0], marks[1], _axes(runtime))
        return _simulated(job, account, machine, gpus, time.monotonic() - began)


def _check(mesh: MeshSizes, machine: Machine) -> None:
    for name, size in vars(mesh).items():
        if (size or 1) > 1 and name not in AXES:
            raise ValueError(f"{name}={size} has no model in virtual time yet; use {name}=1.")
    ranks = mesh.ranks
    if ranks > machine.cluster.gpus_per_node:
        raise ValueError(
            f"{ranks} GPUs are more than the {machine.cluster.gpus_per_node} of one host of {machine.name}; "
            "links between hosts have no model yet."
        )


def _on_text(config: RunConfig, folder: Path, machine: Machine) -> RunConfig:
    """Returns the run on a text that is long enough; what it says does not matter."""
    text = folder / "text.txt"
    words = "In virtual time nobody reads this. "
    text.write_text(words * (1 + (STEPS + 40) * config.train.seq_len * config.train.batch_size // len(words)))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, paths=(str(text),), cache=str(folder / "tokens")),
        train=dataclasses.replace(
            config.train, steps=STEPS + 1, tokens=0, val_every=0, peak_flops=machine.cluster.peak_flops
        ),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=0),
        output=dataclasses.replace(config.output, run_dir=str(folder / "run"), progress="off", cluster=""),
    )


@contextlib.contextmanager
def _named_places(core: Any, model: torch.nn.Module) -> Any:
    """Tells the clock which module of the model is under way."""
    names = {id(module): re.sub(r"\.\d+\.", ".*.", name) for name, module in model.named_modules()}
    inside: list[str] = []

    def enter(module: torch.nn.Module, _: object) -> None:
        inside.append(names.get(id(module), inside[-1] if inside else ""))
        core.set_place(inside[-1])

    def leave(*_: object) -> None:
        inside.pop()
        core.set_place(inside[-1] if inside else "")

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _axes(runtime: Runtime) -> dict[str, str]:
    found = {}
    for name in AXES:
        axis = getattr(runtime, name)
        if axis.mesh is not None:
            for dimension in range(axis.mesh.ndim):
                found[group_name(axis.mesh.get_group(dimension))] = name
    return found


def _simulated(job: RankRun, account: Account, machine: Machine, gpus: int, took_s: float) -> Simulated:
    run = job.run
    flops = run.flops_per_token * run.tokens_per_step
    names = [*_axes(job.runtime), *(each.name for name in _axes(job.runtime) for each in _of_group(name))]
    spaces, memory = sum(map(workspace_bytes, names)), torch.accelerator.max_memory_allocated()
    return Simulated(
        machine.name,
        gpus,
        account,
        run.tokens_per_step,
        flops / account.step / (gpus * machine.cluster.peak_flops),
        memory,
        spaces,
        machine.cluster.memory_bytes - machine.cluster.process_bytes - memory - spaces,
        predicted(*planned(run, machine.cluster)).total if run.config.train.dtype == "bf16" else None,
        took_s,
    )


def words(found: Simulated) -> str:
    """Returns what a step costs, and the largest parts of it."""
    account = found.account
    share = 1 / account.step
    lines = [
        f"step     {account.step:.4g} s, {found.tokens} tokens, {found.mfu:.1%} of the peak "
        f"({found.gpus} GPUs, {found.machine})",
        f"computes {sum(account.computing.values()):.4g} s",
        f"exposed  {account.exposed:.4g} s, {account.exposed * share:.1%} of the step: waits "
        + ", ".join(f"{axis} {seconds:.4g} s" for axis, seconds in by(account.waits, 0).most_common())
        + f"; signals and sums {sum(account.communicating.values()):.4g} s",
        f"host     {account.host:.4g} s, {account.host * share:.1%}: the device had nothing to do",
        f"memory   {found.memory_bytes / 1e9:.3g} GB in tensors, {found.workspace_bytes / 1e9:.3g} GB in "
        f"workspaces, which {'fit' if found.left_bytes >= 0 else 'do not fit'}",
    ]
    if found.planned_s is not None:
        lines.append(f"planner  {found.planned_s:.4g} s, {found.planned_s * share - 1:+.0%}")
    lines.append(f"took     {found.took_s:.1f} s here")
    for title, counted in (
        ("Waits by place", by(account.waits, 2)),
        ("Signals and sums by kernel", by(account.communicating, 0)),
        ("Computing by kernel", by(account.computing, 0)),
        ("Computing by place", by(account.computing, 1)),
    ):
        lines += ["", _table(title, counted, account.step)]
    return "\n".join(lines)


def _table(title: str, counted: Counter[str], step: float) -> str:
    rows = [
        [name, f"{1e3 * seconds:.3f}", f"{seconds / step:.1%}"]
        for name, seconds in counted.most_common(MOST_LINES)
    ]
    return table([title, "ms", "of the step"], rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the job")
    parser.add_argument("--machine", default="h100", help="a table of bench/clock (default %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also keep the figures there, a line a command"
    )
    options, of_run = parser.parse_known_args(argv)
    try:
        config, name = cli.read(of_run, options.gpus)
        mirrors.build_device()
        found = simulate(config, find(options.machine), options.gpus)
    except ValueError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    print(f"{name}\n{words(found)}")
    if options.json:
        _, flags = take_option(of_run, "config")
        _keep(options.json, shlex.join(["--config", name, "--gpus", str(options.gpus), *flags]), found)
    return 0


def _keep(path: Path, command: str, found: Simulated) -> None:
    """Adds a step to the file, in place of what the same command found before."""
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    others = [each for each in kept if each["command"] != command]
    write_records(path, {"facts": facts(), "results": [*others, {"command": command, **found.record()}]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
