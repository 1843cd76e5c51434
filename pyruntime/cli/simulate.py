"""`python -m pyruntime simulate`: a step of a run on GPUs that nobody has, by a table of what they take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pyruntime.cli import train
from pyruntime.cli.arguments import take_count, take_option, writing
from pyruntime.text import as_lines
from pyruntime.train.errors import refusing, require

DESCRIPTION = """Runs a step of the trainer in virtual time, on --gpus N GPUs of which none need be there: the
real program, call by call, on a simulated GPU that takes the seconds of a table and computes nothing. It
prints which part of the step no computation hides, and behind which module. Takes the options of train
(--config FILE.toml or a preset, --section.key value), and --machine NAME (default h100), --json FILE, which
keeps the figures, a line a command, and --trace FILE, the step's streams for chrome://tracing and Perfetto.
The first run compiles the simulated GPU, which takes minutes, a C++ compiler and ninja."""
OWN = ("gpus", "machine", "json", "trace")


def main(argv: list[str]) -> None:
    gpus, of_run = take_count(argv, "gpus")
    machine, of_run = take_option(of_run, "machine")
    kept, of_run = take_option(of_run, "json")
    trace, of_run = take_option(of_run, "trace")
    asks_for_help = {"-h", "--help"} & set(of_run)
    require(gpus is not None or bool(asks_for_help), "simulate needs the number of GPUs, --gpus N.")
    config, name = train.read(of_run, gpus, "simulate", DESCRIPTION, others=OWN)
    assert gpus is not None  # --help has ended the process
    require(
        config.optimizer.offload == "none",
        "simulate has no seconds for optimizer states that lie elsewhere; leave out optimizer.offload.",
    )
    for option, path in (("json", kept), ("trace", trace)):
        require(
            not path or Path(path).absolute().parent.is_dir(),
            f"--{option}: the folder of {path} is not there; make it first, or name another file.",
        )

    from pyruntime.clock import device_build, simulated_step  # import the model, which --help does not need
    from pyruntime.clock.machine_model import find

    with refusing():
        table = find(machine or "h100")
        device_build.build()
        found = simulated_step.simulate(config, table, gpus, keeps_spans=trace is not None)
    print(f"{name}\n{simulated_step.words(found)}")
    if trace:
        with writing(f"--trace: {trace}"):
            Path(trace).write_text(json.dumps(simulated_step.chrome_trace(found)), encoding="utf-8")
    if kept:
        keep(Path(kept), {"command": command_of(name, gpus, machine, of_run), **found.record()})


def command_of(config: str, gpus: int, machine: str | None, of_run: list[str]) -> str:
    """Returns the options that ask for the same step again."""
    _, flags = take_option(of_run, "config")
    of_machine = ["--machine", machine] if machine else []
    return shlex.join(["--config", config, "--gpus", str(gpus), *of_machine, *flags])


def keep(path: Path, line: dict[str, object]) -> None:
    """Adds a line to the file of --json, in place of what the same command found before. What else the file
    has stays. Raises ConfigError."""
    document: dict[str, Any] = {"results": []}
    with refusing(f"--json: {path} is no file of simulate: ", (ValueError, KeyError, TypeError, OSError)):
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
        others = [each for each in document["results"] if each["command"] != line["command"]]
    with writing(f"--json: {path}"):
        path.write_text(as_lines({**document, "results": [*others, line]}), encoding="utf-8")
