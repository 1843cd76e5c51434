"""Runs a step of the trainer in virtual time: which part of it no computation hides, before any GPU runs it.

The trainer itself runs, call by call, with its streams, events and transports. But its device has no memory
and no arithmetic: every launch takes the time that a table says (machines/, machine_model.py). One process
stands for all ranks of a stage and of a place in a ring, which do the same at the same time; stages, and the
places of context parallelism, have a process each.

What the clock cannot know: values, and what follows from them; ranks that differ in speed; kernels that slow
each other, because they share memory or L2 with copies or run side by side on two streams; how many launches
a host may be ahead; memory that the allocator loses between blocks; a host's own pauses. The table's numbers
are published, derived or estimated, and none is measured here. Each GPU has an adapter of its own to other
hosts; messages between stages, or around a ring, do not share it with other traffic, and switches never
block. Experts get equal shares of the rows. Replicas, multicast, rings and tensor-parallel ranks of unequal
speed have no model yet and are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyruntime.clock import mirrors, programs
from pyruntime.clock.machine_model import Machine
from pyruntime.clock.mirrors import ProgramPlace
from pyruntime.clock.step_account import COMPUTING, HOST, Span, StepAccount, by, of_step
from pyruntime.comm import Runtime
from pyruntime.comm.companions import _of_group
from pyruntime.comm.groups import group_name, workspace_bytes
from pyruntime.plan.expert_costs import share_of_rows
from pyruntime.text import columns
from pyruntime.train import validate
from pyruntime.train.config import MeshSizes, RunConfig, mesh_of
from pyruntime.train.model_of_run import slices_of
from pyruntime.train.planned import planned, predicted
from pyruntime.train.resolved import ResolvedRun
from pyruntime.train.run import RankRun, prepare
from pyruntime.train.signals import StopRequest

STEPS = 4
"""The first finds out in which order gradients and weights travel, and makes workspaces; the second begins
with weights that the first has not sent ahead. The third counts; the fourth's calls show how it ended."""
AXES = ("pp", "dp", "cp", "tp", "tp_y")
"""Those that have a model, in the order of Runtime.start."""
SEQUENCES = 64
"""Sequences of text; steps read them again and again."""
MOST_LINES = 12


@dataclasses.dataclass(frozen=True)
class Program:
    """A step of the ranks that do the same, in virtual time."""

    at: dict[str, int]
    """Their numbers on the axes whose ranks differ."""
    account: StepAccount
    memory_bytes: int
    """Most bytes in tensors."""
    workspace_bytes: int
    """Bytes of symmetric memory, which are not among them."""
    tokens: int
    """Tokens of a step of all ranks."""
    flops: float
    """Operations of a step of all ranks, as MFU counts them."""
    planned_s: float | None
    """The planner's seconds of the same step; None of a dtype that it does not know."""
    works: frozenset[tuple[str, tuple[int, ...]]]
    """The kinds and sizes of work of which the machine's seconds were asked."""
    spans: tuple[Span, ...]
    """What each stream was spent on, if that was asked for; seconds from the step's begin."""


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A step, in virtual time."""

    machine: str
    gpus: int
    programs: tuple[Program, ...]
    mfu: float
    left_bytes: float
    """Bytes of a GPU's memory beside tensors, workspaces and a process's own; below 0: it does not fit."""
    took_s: float
    """Seconds that the simulation took here."""

    @property
    def busiest(self) -> Program:
        """The program that computes most."""
        return max(self.programs, key=lambda each: sum(each.account.computing.values()))

    @property
    def account(self) -> StepAccount:
        return self.busiest.account

    @property
    def tokens(self) -> int:
        return self.programs[0].tokens

    @property
    def planned_s(self) -> float | None:
        return self.programs[0].planned_s

    @property
    def memory_bytes(self) -> int:
        return self.fullest.memory_bytes

    @property
    def workspace_bytes(self) -> int:
        return self.fullest.workspace_bytes

    @property
    def fullest(self) -> Program:
        return max(self.programs, key=lambda each: each.memory_bytes + each.workspace_bytes)

    def record(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        account = self.account
        return {
            "machine": self.machine,
            "gpus": self.gpus,
            "step_s": account.step,
            "tokens": self.tokens,
            "mfu": self.mfu,
            "exposed_s": account.exposed,
            "exposed_share": account.exposed / account.step,
            "bubble_s": account.bubble,
            "waits_s": by(account.exposed_waits, 0),
            "communicating_s": by(account.communicating, 0),
            "host_s": account.host,
            "memory_bytes": self.memory_bytes,
            "workspace_bytes": self.workspace_bytes,
            "left_bytes": self.left_bytes,
            "planned_s": self.planned_s,
        }


def simulate(config: RunConfig, machine: Machine, gpus: int, *, keeps_spans: bool = False) -> Simulated:
    """Runs STEPS steps of a run, in this process, which can simulate only once, or one of its own for each
    program. After `device_build.build`. keeps_spans: whether the programs of the result have their spans.
    Raises ConfigError for what the trainer refuses, ValueError for a mesh that has no model or a step that
    does not fit in memory."""
    with tempfile.TemporaryDirectory() as folder:
        config = _on_text(config, Path(folder), machine)
        validate.check(config, gpus)
        mesh = mesh_of(config, gpus)
        _check(mesh, config)
        axes = {name: size for name in AXES if (size := getattr(mesh, name)) > 1 or name == "tp"}
        program = functools.partial(_program, config, machine, axes, mesh.ep, keeps_spans)
        return simulated(program, machine, axes, gpus)


def simulated(
    program: Callable[[ProgramPlace], Program], machine: Machine, axes: Mapping[str, int], gpus: int
) -> Simulated:
    """Runs `program` for each place of a mesh, and returns the step that they make together. Raises what
    `programs.run` raises, and ValueError for a step that does not fit in memory."""
    began = time.monotonic()
    fitting = functools.partial(_fitting, program)
    found = programs.run(fitting, mirrors.places(axes), machine.cluster.gpus_per_node)
    flops, step = found[0].flops, max(each.account.step for each in found)
    most = max(each.memory_bytes + each.workspace_bytes for each in found)
    return Simulated(
        machine.name,
        gpus,
        tuple(found),
        flops / step / (gpus * machine.cluster.peak_flops),
        machine.cluster.memory_bytes - machine.cluster.process_bytes - most,
        time.monotonic() - began,
    )


def _fitting(program: Callable[[ProgramPlace], Program], place: ProgramPlace) -> Program:
    try:
        return program(place)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"The step does not fit in a GPU's memory, beside what a process needs: {error} Shard more "
            "(parallel.zero, parallel.tp), recompute (train.activation_checkpointing) or take smaller "
            "micro-batches; `python -m pyruntime plan` finds what fits."
        ) from None


def _program(
    config: RunConfig,
    machine: Machine,
    axes: dict[str, int],
    ep: int | None,
    keeps_spans: bool,
    place: ProgramPlace,
) -> Program:
    works = set()

    def seconds(kind: str, sizes: Sequence[int]) -> float:
        works.add((kind, tuple(sizes)))
        return machine.seconds(kind, sizes)

    core = mirrors.begin(seconds, machine.cluster.memory_bytes - machine.cluster.process_bytes)
    with (
        mirrors.mirrored(axes, place, machine.exchanged, ep) as runtime,
        contextlib.ExitStack() as of_run,
    ):
        job = prepare(config, "simulated", runtime, StopRequest(), of_run)
        _tell_routes(core, job.run, runtime)
        with named_places(core, job.model):
            core.keep_spans(True)
            marks, spans, steps = [0.0], list[Span](), job.trainer.fit()
            for _ in range(STEPS):
                next(steps)
                marks.append(core.host_time())
                # Millions, at many ranks: others are not kept.
                begin = marks[:3][-1]
                of_step_on = (each for each in core.take_spans() if each[2] > begin)
                spans += [each for each in of_step_on if keeps_spans or each[0] == COMPUTING]
            del steps  # the run ends here
        _, _, begin, end, _ = marks
        account = of_step(spans, begin, end, axes_of_groups(runtime))
        program = _of_program(job, account, machine, dict(place.at), frozenset(works))
        return dataclasses.replace(program, spans=_between(spans, begin, end) if keeps_spans else ())


def _tell_routes(core: Any, run: ResolvedRun, runtime: Runtime) -> None:
    """Tells the clock what the host reads of routes: each expert gets as many rows as any other, and each
    rank those of a router that sets all experts as likely."""
    mixture = run.shape.mixture
    if mixture is None:
        return
    core.set_experts(mixture.experts)
    ranks = run.mesh.ep or run.mesh.tp
    rows = run.config.train.micro_batch_size * min(run.slices) / run.mesh.tp / slices_of(run, runtime)
    share = share_of_rows(mixture.experts, ranks, mixture.per_token)
    core.set_integers_of([ranks, ranks], round(share * rows))


def _between(spans: Sequence[Span], begin: float, end: float) -> tuple[Span, ...]:
    """Returns the spans of a time, from its begin."""
    return tuple(
        (stream, max(first, begin) - begin, min(last, end) - begin, spent, what, where)
        for stream, first, last, spent, what, where in spans
        if first < end and last > begin
    )


def _check(mesh: MeshSizes, config: RunConfig) -> None:
    for name, unequal, who in (
        ("parallel.tp_speeds", config.parallel.tp_speeds, "tensor-parallel"),
        ("pipeline.speeds", config.pipeline.speeds, "data-parallel"),
        ("train.micro_batches", config.train.micro_batches, "data-parallel"),
    ):
        if len(set(unequal)) > 1:
            raise ValueError(
                f"{name}={list(unequal)}: in virtual time {who} ranks do the same; leave it out."
            )
    for name, size in vars(mesh).items():
        if (size or 1) > 1 and name not in (*AXES, "ep"):
            raise ValueError(f"{name}={size} has no model in virtual time yet; use {name}=1.")


def _on_text(config: RunConfig, folder: Path, machine: Machine) -> RunConfig:
    """Returns the run on a text; what it says does not matter."""
    text = folder / "text.txt"
    words = "In virtual time nobody reads this. "
    text.write_text(words * (1 + SEQUENCES * config.train.seq_len // len(words)))
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
def named_places(core: Any, model: torch.nn.Module) -> Iterator[None]:
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


def axes_of_groups(runtime: Runtime) -> dict[str, str]:
    """Returns the axis of each group, by its name; that of all ranks of a mesh with several axes is "all"."""
    found = {group_name(runtime.world): "all"}
    for name in ("ep", "edp", *AXES, "replicas"):  # ep may be tp, and edp dp, whose names come last
        axis = getattr(runtime, name)
        if axis.mesh is not None:
            for dimension in range(axis.mesh.ndim):
                found[group_name(axis.mesh.get_group(dimension))] = "dp" if name == "replicas" else name
    return found


def _of_program(
    job: RankRun,
    account: StepAccount,
    machine: Machine,
    at: dict[str, int],
    works: frozenset[tuple[str, tuple[int, ...]]],
) -> Program:
    run = job.run
    names = [
        *axes_of_groups(job.runtime),
        *(each.name for name in axes_of_groups(job.runtime) for each in _of_group(name)),
    ]
    return Program(
        at,
        account,
        torch.accelerator.max_memory_allocated(),
        sum(map(workspace_bytes, names)),
        run.tokens_per_step,
        run.flops_per_token * run.tokens_per_step,
        predicted(*planned(run, machine.cluster)).total if run.config.train.dtype == "bf16" else None,
        works,
        (),
    )


def words(found: Simulated) -> str:
    """Returns what a step costs, and the largest parts of it."""
    account = found.account
    share = 1 / account.step
    lines = [
        f"step     {account.step:.4g} s, {found.tokens} tokens, {found.mfu:.1%} of the peak "
        f"({found.gpus} GPUs, {found.machine})",
        f"computes {sum(account.computing.values()):.4g} s",
        f"exposed  {account.exposed:.4g} s, {account.exposed * share:.1%} of the step: "
        + "".join(f"waits for {axis} {each:.4g} s, " for axis, each in by(account.exposed_waits, 0).items())
        + f"signals and sums {sum(account.communicating.values()):.4g} s",
        f"bubble   {account.bubble:.4g} s, {account.bubble * share:.1%}: other ranks had not computed what "
        "they send",
        f"host     {account.host:.4g} s, {account.host * share:.1%}: the device had nothing to do",
        f"memory   {found.memory_bytes / 1e9:.3g} GB in tensors, {found.workspace_bytes / 1e9:.3g} GB in "
        f"workspaces, which {'fit' if found.left_bytes >= 0 else 'do not fit'}",
    ]
    if found.planned_s is not None:
        lines.append(f"planner  {found.planned_s:.4g} s, {found.planned_s * share - 1:+.0%}")
    lines.append(f"took     {found.took_s:.1f} s here")
    if len(found.programs) > 1:
        lines += ["", _of_programs(found)]
    for title, counted in (
        ("Waits by place", by(account.exposed_waits, 2)),
        ("Signals and sums by kernel", by(account.communicating, 0)),
        ("Computing by kernel", by(account.computing, 0)),
        ("Computing by place", by(account.computing, 1)),
    ):
        lines += ["", _table(title, counted, account.step)]
    return "\n".join(lines)


def _of_programs(found: Simulated) -> str:
    """Returns a line for each program; the tables that follow are the busiest one's."""
    rows = []
    for each in found.programs:
        name = ", ".join(f"{axis} {at}" for axis, at in each.at.items())
        spent = (
            sum(each.account.computing.values()),
            each.account.exposed,
            each.account.bubble,
            each.account.host,
        )
        memory = f"{each.memory_bytes / 1e9:.1f} + {each.workspace_bytes / 1e9:.1f}"
        mark = " (below)" if each is found.busiest else ""
        rows.append([name + mark, *(f"{1e3 * seconds:.1f}" for seconds in spent), memory])
    return columns(["Ranks, ms", "computes", "exposed", "bubble", "host", "memory, GB"], rows)


def _table(title: str, counted: dict[str, float], step: float) -> str:
    rows = [
        [name, f"{1e3 * seconds:.3f}", f"{seconds / step:.1%}"]
        for name, seconds in itertools.islice(counted.items(), MOST_LINES)
    ]
    return columns([title, "ms", "of the step"], rows)


def chrome_trace(found: Simulated) -> dict[str, Any]:
    """Returns the kept spans in the format of chrome://tracing and Perfetto: a process for each program, a
    row for each stream, microseconds from the step's begin."""
    events: list[dict[str, Any]] = []
    for number, program in enumerate(found.programs):
        ranks = ", ".join(f"{axis} {at}" for axis, at in program.at.items()) or "all ranks"
        events.append({"pid": number, "ph": "M", "name": "process_name", "args": {"name": ranks}})
        for stream, begin, end, spent, what, where in program.spans:
            if spent != HOST:
                row = "computing" if stream == COMPUTING else f"stream {stream}"
                name = f"{where}: {what}" if where else what
                about = {"pid": number, "tid": row, "ph": "X", "name": name}
                events.append({**about, "ts": begin * 1e6, "dur": (end - begin) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
